"""State in few bits: signs, errors, and what is around or beside an optimizer."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import bits, run_updates
from low_bit_cases import (
    BOUNDS,
    MOMENTS,
    described,
    distance,
    encoded_leaves,
    make_params,
)

import optax_offload as oo
from optax_offload._low_bit import Encoded

LR = 1e-2


class Loose:
    """A transformation of another package, whose fields say nothing."""

    @staticmethod
    def make():
        def update(updates, state, params=None):
            del params
            return updates, jax.tree.map(lambda m, g: 0.9 * m + g, state, updates)

        return optax.GradientTransformation(lambda p: {"nu": p}["nu"], update)


def test_strangers_have_a_sign():
    """Only optax's own moments are known not to need one; a rule may say so."""
    params = make_params()
    state = oo.low_bit(Loose.make(), ".*").init(params)
    assert {x.codec.signed for x in encoded_leaves(state).values()} == {True}
    rules = [oo.Rule("embed", signed=False), oo.Rule(".*", codec="float8")]
    state = encoded_leaves(oo.low_bit(Loose.make(), rules).init(params))
    assert (state["embed"].codec.name, state["embed"].codec.signed) == ("int8", False)
    assert state["layers/kernel"].codec.name == "float8"


def test_a_negative_moment_without_a_sign_is_told():
    """Decoded as NaN, not clipped to zero."""
    params = make_params()
    tx = oo.low_bit(optax.sgd(LR, momentum=0.9), oo.Rule(".*trace.*", signed=False))
    _, state = jax.jit(tx.update)(params, tx.init(params))
    trace = oo.low_bit_decode(state)[0].trace
    assert np.all(np.isnan(trace["embed"]))


def test_each_step_draws_its_own_chances():
    """Equal values are rounded otherwise in the next step, which a state counts."""

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda m: jnp.full_like(m, 1.004), state)

    constant = optax.GradientTransformation(lambda params: params, update)
    tx = oo.low_bit(constant, oo.Rule(".*", codec="bfloat16-stochastic"))
    params = {"w": jnp.ones((32, 256))}
    state, codes = tx.init(params), []
    for step in range(1, 4):
        _, state = jax.jit(tx.update)(params, state, params)
        assert state["w"].step == step
        codes.append(np.asarray(state["w"].codes, np.float32))
    assert {*np.unique(codes)} == {1.0, np.float32(1 + 2**-7)}
    for one, other in itertools.pairwise(codes):
        assert 0.4 < np.mean(one == other) < 0.6


@pytest.mark.parametrize(
    ("codec", "signed"),
    [
        ("int8", None),
        ("int8", True),
        ("int8-companded", None),
        ("int8-companded", True),
        ("float8", None),
    ],
)
def test_small_second_moments_make_no_large_steps(codec, signed):
    """Beside a large one, of gradients that came once; also where codes have a sign.

    As of a unit of a ReLU network that is seldom active. An update is the first moment
    over the root of the second: 10**4 and more where that is lost alone.
    """
    rows, lr = np.random.default_rng(0).standard_normal((3, 16, 256)), 1e-2
    large = np.arange(256) == 0
    gradients = [large + ~large * 1e-2 * rows[0], *(large * rows[1:])]
    rule = oo.Rule(MOMENTS, codec=codec, signed=None)
    second = oo.Rule(".*/nu/.*", codec=codec, signed=signed)
    tx = oo.low_bit(optax.adam(lr), [second, rule])
    update = jax.jit(tx.update)
    state = tx.init({"w": jnp.zeros((16, 256))})
    for gradient in gradients:
        updates, state = update({"w": jnp.asarray(gradient, jnp.float32)}, state)
        assert np.max(np.abs(updates["w"])) < 2 * lr


def test_paths_that_are_the_same():
    """Two leaves of one path, of which one is encoded, keep their forms."""
    params = {"a/b": jnp.ones((16, 256)), "a": {"b": jnp.ones(8)}}
    tx = oo.low_bit(optax.adam(LR), MOMENTS)
    state = tx.init(params)
    _, new = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.float16]
)
def test_moments_of_short_parameters_keep_their_dtype(dtype):
    """Encoded leaves stand for the dtype that inner has."""
    params = make_params(dtype)
    tx = oo.low_bit(optax.adam(LR), MOMENTS)
    inner = optax.adam(LR)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    want, plain_state = jax.jit(inner.update)(params, inner.init(params), params)
    assert bits(updates) == bits(want)
    assert described(oo.low_bit_decode(state)) == described(plain_state)


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((optax.adamw, ".*"), TypeError, r"got <function adamw.*Call it first, as in"),
        ((3, ".*"), TypeError, "low_bit wraps an optax.GradientTransformation or"),
        ((optax.sgd(LR), 3), TypeError, "rules must be a regex, a Rule, a sequence"),
        (
            (optax.sgd(LR), ".*", "int7"),
            ValueError,
            "codec is 'int7'; it must be one of 'int8', 'int8-companded', 'float8'",
        ),
    ],
)
def test_wrong_arguments(arguments, error, message):
    """Each where it is given."""
    with pytest.raises(error, match=message):
        oo.low_bit(*arguments)


def test_a_rule_that_matches_nothing():
    """From init, with the paths that are near."""
    tx = oo.low_bit(optax.adam(LR), ".*/muu/.*")
    with pytest.raises(ValueError, match=r"'\.\*/muu/\.\*', matches no leaf\. Write"):
        tx.init(make_params())


def test_a_remainder_of_what_is_no_master_weight():
    """A moment has no parameter that is its upper half."""
    tx = oo.low_bit(optax.adam(LR), oo.Rule(MOMENTS, codec="bfloat16-remainder"))
    message = r"'bfloat16-remainder' for '0/mu/embed', .*it works only on the"
    with pytest.raises(ValueError, match=message):
        tx.init(make_params())


# Compositions.


def test_optax_sees_through():
    """`tree_map_params` reaches codes and scales; `optax.tree.get` what it did."""
    params = make_params()
    tx = oo.low_bit(optax.adam(LR), MOMENTS)
    state = tx.init(params)
    mapped = optax.tree_map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert np.all(np.asarray(mapped[0].nu["embed"].codes) == 1)
    assert mapped[0].count == 0
    nu = optax.tree.get(state, "nu")
    assert isinstance(nu["embed"], Encoded)
    assert nu["embed"].shape == (32, 256)


WRAPPERS = {
    "apply_if_finite": lambda wrap: optax.apply_if_finite(wrap(optax.adamw(LR)), 3),
    "chain": lambda wrap: optax.chain(wrap(optax.adam(LR)), optax.scale(0.5)),
    "masked": lambda wrap: optax.masked(
        wrap(optax.adam(LR)), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "multi_steps": lambda wrap: optax.MultiSteps(
        wrap(optax.adam(LR)), 2
    ).gradient_transformation(),
    "partition": lambda wrap: optax.partition(
        {"all": wrap(optax.adam(LR))}, lambda p: jax.tree.map(lambda _: "all", p)
    ),
}


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("chain", "int8"),
        pytest.param("chain", "bfloat16-stochastic", marks=pytest.mark.slow),
        *(
            pytest.param(name, "int8", marks=pytest.mark.slow)
            for name in WRAPPERS
            if name != "chain"
        ),
    ],
)
def test_inside_another_transformation(name, codec):
    """Around `low_bit`, others work as around the plain optimizer."""
    params = make_params()
    inner = WRAPPERS[name](lambda inner: inner)
    tx = WRAPPERS[name](lambda inner: oo.low_bit(inner, MOMENTS, codec))
    want, _ = run_updates(inner, params, inner.init(params), steps=4)
    state = tx.init(params)
    assert len(encoded_leaves(state)) == 4
    got, _ = run_updates(tx, params, state, steps=4)
    for (updates, new, _), (plain_updates, *_) in zip(got, want, strict=True):
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert distance(updates, plain_updates) <= 3 * BOUNDS[codec]


def test_extra_arguments_pass():
    """Arrays and functions alike."""
    seen = {}

    def update(updates, state, params=None, *, scale, fn):
        del params
        seen["fn"] = fn
        return jax.tree.map(lambda u: u * scale, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: {"m": p}, update)
    tx = oo.low_bit(inner, ".*")
    params = make_params()
    update = jax.jit(functools.partial(tx.update, fn=len))
    updates, _ = update(params, tx.init(params), scale=jnp.float32(2))
    assert seen["fn"] is len
    np.testing.assert_array_equal(updates["embed"], 2 * params["embed"])


@pytest.mark.parametrize(
    "codec", [pytest.param("int8", marks=pytest.mark.slow), "bfloat16-stochastic"]
)
def test_under_vmap(codec):
    """An ensemble, each member as by itself."""
    tx = oo.low_bit(optax.sgd(LR, momentum=0.9), ".*", codec)
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), make_params())
    state = jax.jit(jax.vmap(tx.init))(params)
    update = jax.jit(jax.vmap(lambda p, s: tx.update(p, s, p)))
    got = params, state
    for _ in range(2):
        got = update(params, got[1])
    one = jax.tree.map(lambda x: x[1], params)
    want = one, tx.init(one)
    for _ in range(2):
        want = jax.jit(tx.update)(one, want[1], one)
    got = jax.tree.map(lambda x: x[1], got)
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    assert distance(got[0], want[0]) <= 1e-6
    assert distance(oo.low_bit_decode(got[1]), oo.low_bit_decode(want[1])) <= 1e-3


def test_no_key_is_used_twice():
    """As far as JAX can tell, in the codec by chance and in parameters."""
    tx = optax.chain(
        oo.low_bit(optax.adam(LR), MOMENTS, "bfloat16-stochastic"),
        oo.stochastic_round(),
    )
    params = make_params(jnp.bfloat16)
    with jax.debug_key_reuse(True):
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        jax.jit(tx.update)(updates, state, params)


def test_chances_differ_in_leaves_and_steps():
    """What is rounded up in one is not in another."""
    params = {"a": jnp.full((16, 512), 1.001), "b": jnp.full((16, 512), 1.001)}
    inner = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, u))
    tx = oo.low_bit(inner, ".*", "bfloat16-stochastic")
    state = tx.init(params)
    drawn = [state["a"].codes, state["b"].codes]
    for _ in range(2):
        _, state = jax.jit(tx.update)(params, state)
        drawn += [state["a"].codes, state["b"].codes]
    drawn = [np.asarray(x) == 1 for x in drawn]
    up = 1 - np.mean(drawn, axis=(1, 2))
    # 1.001 is 0.128 of the way; of 8192 values that is known to 0.0037.
    np.testing.assert_allclose(up, 0.128, atol=0.02)
    for i, x in enumerate(drawn):
        for y in drawn[:i]:
            assert 0.7 < np.mean(x == y) < 0.85  # 1 - 2 * 0.128 * 0.872 is 0.777
