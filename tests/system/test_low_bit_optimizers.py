"""Every optimizer in the table, its state in few bits, within the codec's error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import extra_args, gradient, plain
from low_bit_cases import BOUNDS, described, distance, encoded_leaves, make_params
from optimizers import INSIDE

import optax_offload as oo
from optax_offload._low_bit import known_fields

# Their state holds parameters, at these fields: refused, and then left out.
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
# They keep other things, or in other ways, than those do: in every codec, as slow.
KINDS = ["adafactor", "adamax", "ema", "mechanic", "muon", "partition", "sm3"]
KINDS += ["adam_bfloat16_mu", "apply_if_finite", "dadapt_adamw", "lbfgs", "yogi"]


@pytest.fixture(autouse=True)
def rank_promotion():
    """Optimizers of optax promote ranks; that is theirs to do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def cases():
    """All optimizers in int8, those that differ in each codec; most of it as slow."""
    for name in sorted(INSIDE):
        for codec in BOUNDS:
            if codec != "int8" and name not in [*QUICK, *KINDS]:
                continue
            marks = [pytest.mark.xdist_group(name)]
            if not (name == "adamw" or (codec == "int8" and name in QUICK)):
                marks.append(pytest.mark.slow)
            yield pytest.param(name, codec, marks=marks)


def each_once():
    """All optimizers, beside the tests that need the same history."""
    for name in sorted(INSIDE):
        marks = [pytest.mark.xdist_group(name)]
        yield pytest.param(name, marks=marks + [pytest.mark.slow] * (name not in QUICK))


@functools.cache
def plain_history(name):
    """Three updates of the plain optimizer, each with what it was given."""
    tx = optax.with_extra_args_support(plain(INSIDE[name]()))
    return list(history(tx, make_params(), None))


def history(tx, params, given):
    """Three updates, of the parameters of another history if there is one."""

    @jax.jit
    def update(updates, state, params, value):
        return tx.update(updates, state, params, **extra_args(value, updates))

    state = tx.init(params)
    for step in range(3):
        if given is not None:
            params = given[step][2]
        value, grads = gradient(params)
        updates, state = update(grads, state, params, value)
        yield updates, state, params
        params = optax.apply_updates(params, updates)


def rules_of(name):
    """All that can be encoded."""
    field = WITH_PARAMETERS.get(name)
    pattern = rf"(?!(.*/)?{field}/).*" if field else ".*"
    return oo.Rule(pattern, optional=True)


@pytest.mark.parametrize(("name", "codec"), list(cases()))
def test_three_updates(name, codec):
    """Structure kept, the first update the plain one, the second near it."""
    want = plain_history(name)
    tx = oo.low_bit(INSIDE[name](), rules_of(name), codec)
    template = jax.eval_shape(tx.init, make_params())
    found = encoded_leaves(template)
    # In bfloat16 already, as mu is in one of them, is not encoded in as much.
    assert bool(found) == (name not in NOTHING_TO_ENCODE)
    got = list(history(tx, make_params(), want))
    for (_, state, _), (_, plain_state, _) in zip(got, want, strict=True):
        assert jax.tree.structure(state) == jax.tree.structure(template)
        decoded = oo.low_bit_decode(state)
        assert jax.tree.structure(decoded) == jax.tree.structure(plain_state)
        assert described(decoded) == described(plain_state)
        assert described(oo.low_bit_decode(template)) == described(plain_state)
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
        tx.init(make_params())


@pytest.mark.parametrize("name", list(each_once()))
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
