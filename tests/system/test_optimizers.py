"""Every optimizer in the table, in whole steps and in few bits, is what it was."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import committed, extra_args, gradient, plain
from limited import limited
from low_bit_cases import BOUNDS, described, distance, encoded_leaves
from low_bit_cases import make_params as make_encoded_params
from optimizers import INSIDE
from scanned_models import (
    BATCH,
    DONATED,
    make_params,
    make_step,
    offloaded,
    train,
)

import optax_offload as oo
from benchmarks.common.differences import ulps
from optax_offload._low_bit import known_fields
from optax_offload._places import memory

pytestmark = pytest.mark.usefixtures("rank_promotion")

# In units of the last place of each leaf's maximum, after five steps. 16.4 was seen, of
# clipping, whose norm is summed up in another order; 4 of what needs no norm as a rule.
BOUND = 32
# A number that rounds the other way to bfloat16 is 2^16 units of float32 away; what is
# clipped or divided by nearly nothing makes much of little. The mean of Adafactor's
# updates is 55 away from itself, plain, jitted and not, on a CPU where it is 59 fused.
EXCEPTIONS = {"adafactor_momentum": 128, "adam_bfloat16_mu": 128, "adopt": 128}
# They mix all layers, or all leaves at once: of these nothing is fused.
NOT_FUSED = {
    "backtracking": "reshape needs",
    "dadapt_adamw": "reshape needs",
    "dog": "its update needs all gradients first",
    "lbfgs": "reshape needs",
    "mechanic": "reshape needs",
    "momo_adam": "reshape needs",
    "novograd": "reduce_sum needs",
    "prodigy": "reshape needs",
}
# They need something first, for which no gradient waits unless state is offloaded.
NEED_ALL = {
    "adafactor",
    "adafactor_momentum",
    "apply_if_finite",
    "clip_and_schedule",
    "lamb",
    "lars",
    "multi_steps_skip",
}
OFTEN = {"adamw", "clip_and_schedule"}
DIFFER = {*OFTEN, *NEED_ALL, *NOT_FUSED}


@dataclasses.dataclass(frozen=True)
class Way:
    """A form of whole step.

    Attributes:
      names: The optimizers that go through it. What moves residuals is not of the
        optimizer, and where state is on the device there are only fewer equations, so
        not all need go through all.
      quick: Those of them that are not slow.
      fused: Whether it is of `oo.jit`, and not of `jax.jit`.
      host: What is in host memory: "state", and "params".
      options: Those of `oo.jit`.
    """

    names: frozenset[str]
    quick: frozenset[str] = frozenset(OFTEN)
    fused: bool = True
    host: tuple[str, ...] = ("state",)
    options: Any = dataclasses.field(default_factory=dict)


ALL = frozenset(INSIDE)
UNFUSED = {"adafactor", "adamw", "lamb", "lion", "multi_steps", "muon", "sgd_momentum"}
PARAMS = ("state", "params")
WAYS = {
    # Each alone is in `test_contract.py`.
    "jit": Way(frozenset(DIFFER) | UNFUSED, frozenset(UNFUSED), fused=False),
    "state": Way(ALL),
    "nothing": Way(frozenset(DIFFER), host=()),
    "params": Way(ALL - DIFFER | OFTEN, host=PARAMS),
    "residuals": Way(frozenset(DIFFER), host=PARAMS, options={"residuals": "host"}),
    "late host": Way(frozenset(NEED_ALL), options={"late_gradients": "host"}),
    "recompute": Way(frozenset(NEED_ALL), options={"late_gradients": "recompute"}),
}
# Their state holds parameters, at these fields: encoding it is refused.
WITH_PARAMETERS = {
    "cocob": "init_particles",
    "dog": "init_params",
    "lbfgs": "params",
    "madgrad": "x0",
    "mechanic": "x0",
    "prodigy": "params0",
    "schedule_free_adamw": "z",
    "schedule_free_sgd": "z",
}
# What they keep of these parameters is none, or factors of a few values.
NOTHING_TO_ENCODE = {"adafactor", "dog", "noisy_sgd", "schedule_free_sgd", "sign_sgd"}
# Their first state is a number that bfloat16 does not have, and counts at once.
STARTS_ROUNDED = {"adagrad", "yogi"}
QUICK = ["adamw", "lamb", "multi_steps", "lion"]
OF_CODEC = {"int8": QUICK, "bfloat16-stochastic": ["adamw"]}
# They keep other things, or in other ways, than those do.
KINDS = ["adafactor", "adamax", "ema", "mechanic", "muon", "partition", "sm3"]
KINDS += ["adam_bfloat16_mu", "apply_if_finite", "dadapt_adamw", "lbfgs", "yogi"]


def case(name, *values, quick):
    """One process for all tests of an optimizer: they share the plain one's history."""
    marks = [pytest.mark.xdist_group(name)] + [pytest.mark.slow] * (not quick)
    return pytest.param(name, *values, marks=marks)


@functools.cache
def plain_results(name):
    """Five steps of the plain optimizer, and how often it was compiled."""
    tx = INSIDE[name]()
    step = jax.jit(make_step(tx), **DONATED)
    return train(step, tx), step._cache_size()


def assert_kinds(tx, results, of_params="device", of_state="pinned_host"):
    """All that was put into host memory is there, and nothing else."""
    params, state, _ = results
    wanted = jax.eval_shape(tx.init, params)
    for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        movable = memory.nbytes(like) >= 8 and x.ndim > 0
        assert x.sharding.memory_kind == (of_state if movable else "device")
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(params)}
    assert kinds == {of_params}


def said_of(name, way):
    """How the schedule of a step of `oo.jit` begins, and what else it says."""
    why = NOT_FUSED.get(name)
    if name in NEED_ALL and not way.host:
        why = "its update needs all gradients first (reduce_"
    if name == "multi_steps" and way.host == ("state",):
        why = "its state is kept in some steps"
    if why:
        return "nothing is fused", f"left outside: {why}"
    late = way.options.get("late_gradients")
    said = {"host": "stored to host memory", "recompute": "the scan runs"}
    return "backward scan of 4 iterations", said.get(late, "")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        case(name, way, quick=name in WAYS[way].quick)
        for way in WAYS
        for name in sorted(WAYS[way].names)
    ],
)
def test_five_steps(name, way, monkeypatch):
    """Values, memory kinds, compilations, and what the schedule says is fused."""
    limited(monkeypatch, least_residual_rows_bytes=0)
    way = WAYS[way]
    tx = offloaded(INSIDE[name]()) if way.host else INSIDE[name]()
    jit = functools.partial(oo.jit, **way.options) if way.fused else jax.jit
    step = jit(make_step(tx), **DONATED)
    of_params = "pinned_host" if "params" in way.host else "device"
    got = train(step, tx, oo.set_memory_kind(make_params(), ".*", of_params))
    want, compilations = plain_results(name)
    assert ulps(got, want) <= EXCEPTIONS.get(name, BOUND)
    assert_kinds(tx, got, of_params, "pinned_host" if way.host else "device")
    # The first step of some changes a weak type.
    assert step._cache_size() == compilations
    if way.fused:
        text = str(step.schedule(*got[:2], BATCH))
        begins, said = said_of(name, way)
        if "params" not in way.host:
            assert text.startswith(begins)
            assert said in text
        elif name not in {*NOT_FUSED, "multi_steps"}:
            assert "never on the device" in text


def test_frozen_parameters():
    """Zeros take the place of their updates, which need no gradient any more."""

    def frozen(params):
        return jax.tree.map(lambda x: x.ndim > 2, params) | {"head": True}

    tx = optax.chain(optax.adamw(1e-2), optax.masked(optax.set_to_zero(), frozen))
    want = train(jax.jit(make_step(tx)), tx)
    tx = offloaded(tx)
    step = oo.jit(make_step(tx), **DONATED)
    got = train(step, tx)
    assert ulps(got, want) <= BOUND
    assert_kinds(tx, got)
    said = "2 gradients of 12.00 KiB never on the device whole"
    assert said in str(step.schedule(*got[:2], BATCH))


@pytest.mark.parametrize("late_gradients", ["host", "recompute"])
def test_state_on_the_device_waits_if_asked(late_gradients):
    """Gradients alone are in host memory, or nothing is."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    want = train(jax.jit(make_step(tx)), tx)
    step = oo.jit(make_step(tx), late_gradients=late_gradients)
    got = train(step, tx)
    assert ulps(got, want) <= BOUND
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got)}
    assert kinds == {"device"}


def test_each_result_replaces_an_argument_of_its_type():
    """Also where results are in another order than arguments."""
    tx = optax.sgd(1e-2, 0.9, accumulator_dtype=jnp.bfloat16)

    def step(params, state, tokens):
        return make_step(tx)(params, state, tokens)[1::-1]

    args = make_params(), tx.init(make_params()), BATCH
    said = "updated with their rows: 2 gradients of 12.00 KiB"
    assert said in str(oo.jit(step).schedule(*args))
    assert jax.eval_shape(oo.stream(step), *args) == jax.eval_shape(step, *args)
    assert ulps(oo.stream(step)(*args), jax.jit(step)(*args)) <= 16


def history(tx, given):
    """Three updates, of the parameters of another history if there is one."""

    @jax.jit
    def update(updates, state, params, value):
        return tx.update(updates, state, params, **extra_args(value, updates))

    params = make_encoded_params()
    state = committed(tx.init(params))
    for step in range(3):
        if given is not None:
            params = given[step][2]
        value, grads = gradient(params)
        updates, state = update(grads, state, params, value)
        yield updates, state, params
        params = optax.apply_updates(params, updates)


@functools.cache
def plain_history(name):
    """Three updates of the plain optimizer, each with what it was given."""
    return list(history(optax.with_extra_args_support(plain(INSIDE[name]())), None))


def rules_of(name):
    """All that can be encoded."""
    field = WITH_PARAMETERS.get(name)
    pattern = rf"(?!(.*/)?{field}/).*" if field else ".*"
    return oo.Rule(pattern, optional=True)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        case(name, codec, quick=name in OF_CODEC.get(codec, ()))
        for name in sorted(INSIDE)
        for codec in BOUNDS
        if name in QUICK or codec == ("float8" if name in KINDS else "int8")
    ],
)
def test_three_updates_in_few_bits(name, codec):
    """Structure kept, the first update the plain one, the second near it."""
    want = plain_history(name)
    tx = oo.low_bit(INSIDE[name](), rules_of(name), codec)
    template = jax.eval_shape(tx.init, make_encoded_params())
    found = encoded_leaves(template)
    # In bfloat16 already, as mu is in one of them, is not encoded in as much.
    assert bool(found) == (name not in NOTHING_TO_ENCODE)
    got = list(history(tx, want))
    for decoded in map(oo.low_bit_decode, (template, got[-1][1])):
        for _, plain_state, _ in want:
            assert jax.tree.structure(decoded) == jax.tree.structure(plain_state)
            assert described(decoded) == described(plain_state)
    for _, state, _ in got:
        assert jax.tree.structure(state) == jax.tree.structure(template)
        assert described(state) == described(template)
    first, second, _ = (
        distance(updates, plain_updates)
        for (updates, *_), (plain_updates, *_) in zip(got, want, strict=True)
    )
    assert first <= (3e-4 if name in STARTS_ROUNDED else 1e-5)
    assert second <= BOUNDS[codec]


@pytest.mark.parametrize("name", sorted(WITH_PARAMETERS))
def test_parameters_in_the_state_are_refused(name):
    """An update is a difference of them: rounded, they are off by more than it."""
    tx = oo.low_bit(INSIDE[name](), ".*")
    path = f"'(./)?{WITH_PARAMETERS[name]}/embed'"
    with pytest.raises(
        ValueError, match=rf"{path}, .*: these leaves are parameters, and"
    ):
        tx.init(make_encoded_params())


@pytest.mark.parametrize("name", [case(n, quick=n in QUICK) for n in sorted(INSIDE)])
def test_what_is_known_of_states(name):
    """What is said never to be negative is not; what is said to be parameters is."""
    for _, state, _ in plain_history(name):
        leaves = {
            jax.tree_util.keystr(k, simple=True, separator="/"): x
            for k, x in jax.tree_util.tree_flatten_with_path(state)[0]
        }
        never_negative = known_fields.never_negative(state)
        assert never_negative <= leaves.keys()
        for path in never_negative:
            assert np.min(np.asarray(leaves[path])) >= 0, path
        parameters = known_fields.parameters(state)
        assert bool(parameters) == (name in WITH_PARAMETERS)
        assert parameters <= leaves.keys()
    _, state, _ = plain_history("adamw")[-1]
    assert known_fields.never_negative(state) == {
        "0/nu/embed",
        "0/nu/layers/bias",
        "0/nu/layers/kernel",
    }


def test_known_fields_of_states_within_others():
    """A moment of an optimizer inside one that keeps parameters."""
    inner = optax.contrib.mechanize(INSIDE["schedule_free_adamw"]())
    state = jax.eval_shape(inner.init, {"w": jnp.ones(4)})
    assert known_fields.parameters(state) == {"x0/w", "base_optimizer_state/z/w"}
    (nu,) = known_fields.never_negative(state)
    assert nu.endswith("/nu/w")
