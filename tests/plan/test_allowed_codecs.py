"""The codecs that a plan may keep state in."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from step_factories import HEAD, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan.allowed import allowed, forms, worth_allowing
from optax_offload._plan.budget import Budget, PlanRequest
from optax_offload._plan.planner import Planner
from optax_offload._plan.state import movable_state
from optax_offload._plan.step import StepFactory, record

H100 = aot.Target("h100")
BOTH = ("int8", "bfloat16-remainder")


def step_of(optimizer, dtype=jnp.bfloat16):
    """A factory of a step with such parameters."""
    return StepFactory(
        functools.partial(adam_step, optimizer=optimizer, dtype=dtype), H100
    )


MASTERS = step_of(oo.master_weights(optax.adam(1e-3)))


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        (None, ()),
        ("int8", ("int8",)),
        ("int8,bfloat16-remainder", BOTH),
        (" int8 , bfloat16-remainder", BOTH),
        (["int8", "bfloat16-remainder"], BOTH),
        (["int8,bfloat16-remainder", "int8"], BOTH),
    ],
)
def test_allowed(allow, expected):
    """A name, or several, however they are given."""
    assert allowed(allow) == expected


@pytest.mark.parametrize("allow", ["int3", "int8,int3", ["int8", "int3"]])
def test_a_codec_that_is_none(allow):
    """All that there are is said."""
    with pytest.raises(ValueError, match=r"allow has 'int3'; each must be .*'int8', "):
        allowed(allow)


def test_forms():
    """One codec of moments at a time."""
    assert forms(()) == []
    assert forms(("int8", "float8")) == [("int8",), ("float8",)]
    assert forms(BOTH) == [("int8",), ("bfloat16-remainder",), BOTH]


def test_sizes_of_forms():
    """Masters take half as remainders, moments a quarter in int8."""
    parameters = STACK + HEAD
    sizes = {}
    for codecs in [(), *forms(BOTH)]:
        state = movable_state(record(MASTERS, codecs=codecs), None, 1)
        sizes[codecs] = state.state_bytes / parameters
        assert {p.codec for p in state.patterns} - {None} == {*codecs}
        assert len(state.patterns) == 6
        rules = state.config(frozenset([0])).rules
        kept = {r.regex: r.codec for r in rules if r.codec}
        assert len(kept) == (codecs.count("int8") * 4) + 2 * (BOTH[1] in codecs)
    assert sizes[()] == pytest.approx(3, rel=1e-3)
    assert sizes[("int8",)] == pytest.approx(1 + 2.03 / 4, rel=1e-2)
    assert sizes[("bfloat16-remainder",)] == pytest.approx(2.5, rel=1e-3)
    assert sizes[BOTH] == pytest.approx(0.5 + 2.03 / 4, rel=1e-2)


def test_given_rules_decide_first():
    """What they encode is not encoded again, and what they keep keeps its dtype."""
    given = oo.OffloadConfig(
        [
            oo.Rule(r"master/layers", codec="bfloat16-remainder"),
            oo.Rule(r".*/mu/layers", "device"),
        ]
    )
    state = movable_state(record(MASTERS, given, BOTH), given, 1)
    codecs = {p.pattern: p.codec for p in state.patterns}
    assert "master/layers" not in codecs
    assert codecs["master/head"] == "bfloat16-remainder"
    assert sum(c == "int8" for c in codecs.values()) == 3


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (step_of(optax.adam(1e-3), jnp.float32), "its parameters are float32; make"),
        (step_of(optax.adam(1e-3)), "its bfloat16 parameters have no such copies; wr"),
    ],
)
def test_remainders_of_what_there_is_not(factory, message):
    """The likeliest cause, and what to write."""
    asked = PlanRequest(Budget(2**30), BOTH)
    with pytest.raises(ValueError, match=message) as found:
        Planner(factory, asked)
    assert "offload(oo.master_weights(optimizer))" in str(found.value)


def test_master_weights_outside_of_offload():
    """They are no state of what is offloaded."""

    def make_step(offload, target):
        params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}
        tx = oo.master_weights(offload(optax.adam(1e-3)))
        return oo.Step(lambda p, s: (p, s), (params, oo.eval_shape(tx.init, params)))

    with pytest.raises(ValueError, match="its master weights are outside of offload"):
        oo.plan(make_step, target=H100, allow="bfloat16-remainder")


def test_what_is_worth_allowing():
    """What the step has state for, and is not allowed yet."""
    masters = record(MASTERS)
    plain = record(step_of(optax.adam(1e-3), jnp.float32))
    assert worth_allowing((), masters) == BOTH
    assert worth_allowing(("int8",), masters) == BOTH
    assert worth_allowing(("float8",), masters) == ("float8", BOTH[1])
    assert worth_allowing(BOTH, masters) == ()
    assert worth_allowing((), plain) == ("int8",)
    assert worth_allowing(("int8",), plain) == ()
    assert worth_allowing((), record(step_of(optax.sgd(1.0), jnp.float32))) == ()
