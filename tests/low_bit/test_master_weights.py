"""Float32 weights in the state, whole and as what bfloat16 parameters lack."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import bits
from low_bit_cases import distance, make_params

import optax_offload as oo
from optax_offload._low_bit import convert

LR = 1e-2


@pytest.mark.parametrize("codec", [None, "bfloat16-remainder"])
def test_master_weights_are_float32_weights(codec):
    """As training in float32: parameters are those, rounded; in 2 + 2 bytes as well."""
    start = make_params(jnp.bfloat16)
    inner = optax.adamw(LR)
    tx = oo.master_weights(inner)
    if codec:
        tx = oo.low_bit(tx, oo.Rule("master/.*", codec=codec))

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    weights = jax.tree.map(lambda x: x.astype(jnp.float32), start)
    plain_state, state, params = inner.init(weights), tx.init(start), start
    update = jax.jit(inner.update)
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), start)
        updates, plain_state = update(
            jax.tree.map(lambda x: x.astype(jnp.float32), grads), plain_state, weights
        )
        weights = optax.apply_updates(weights, updates)
        params, state = step(params, state, grads)
        master = oo.low_bit_decode(state, params).master
        assert distance(master, weights) <= 1e-7
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        assert distance(params, weights) <= 0.003
    if codec:
        assert state.master["embed"].codes.dtype == jnp.int16


def test_master_weights_skip_what_is_float32():
    """Such a parameter is its own master; masked leaves and empty trees are left."""
    params = make_params(jnp.bfloat16)
    params["layers"]["bias"] = jnp.ones(24)
    masked = optax.masked(
        oo.master_weights(optax.adam(LR)),
        {"embed": True, "layers": {"kernel": False, "bias": True}},
    )
    grads = jax.tree.map(jnp.ones_like, params)
    state = masked.init(params)
    master = state.inner_state.master
    assert master["layers"]["bias"] == optax.MaskedNode()
    assert master["embed"].dtype == jnp.float32
    updates, new = masked.update(grads, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    _, bias, kernel = jax.tree.leaves(updates)
    assert bits(kernel) == bits(grads["layers"]["kernel"])
    np.testing.assert_allclose(bias, -LR, rtol=1e-5)


def test_master_weights_of_frozen_parameters():
    """A parameter that is None has no update either."""
    params = {"w": jnp.ones((16, 256), jnp.bfloat16), "frozen": None}
    tx = oo.master_weights(optax.sgd(LR))
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["frozen"] is None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: oo.master_weights(optax.apply_if_finite(tx, 3)),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
    ids=["master_weights", "stochastic_round"],
)
def test_steps_that_are_not_finite(wrap):
    """Are left out, `apply_if_finite` being before what makes float32 of updates."""
    tx = optax.chain(wrap(optax.sgd(LR)), oo.stochastic_round())
    params = {"w": jnp.ones((16, 256), jnp.bfloat16)}
    update = jax.jit(tx.update)
    updates, state = update({"w": params["w"] * jnp.nan}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], 0)
    updates, _ = update(params, state, params)
    np.testing.assert_allclose(updates["w"], -LR, atol=LR)


def test_errors_of_master_weights():
    """A factory, no parameters, and halves without their parameters."""
    with pytest.raises(TypeError, match=r"wraps an optax\.GradientTransformation"):
        oo.master_weights(optax.adamw)
    params = make_params(jnp.bfloat16)
    tx = oo.master_weights(optax.sgd(LR))
    with pytest.raises(ValueError, match=r"master_weights needs params: tx\.update"):
        tx.update(params, tx.init(params))
    tx = oo.low_bit(tx, oo.Rule("master/.*", codec="bfloat16-remainder"))
    with pytest.raises(ValueError, match=r"'master/embed', .*: half of each is in"):
        tx.update(params, tx.init(params))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    message = r"params has the parameter in another dtype: 'master/embed' \(float32\), "
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), wide)


def test_master_weights_are_refused_another_codec():
    """They are parameters, too."""
    tx = oo.low_bit(oo.master_weights(optax.adam(LR)), ".*master.*")
    with pytest.raises(
        ValueError, match=r"'master/embed', .*: these leaves are parameters"
    ):
        tx.init(make_params(jnp.bfloat16))


REMAINDERS = oo.Rule(".*/?master/.*", codec="bfloat16-remainder")


def test_a_parameter_in_another_dtype_is_told():
    """Whatever other parameter has the end of its path, and would have a half."""
    w, other = (
        jax.random.normal(jax.random.key(seed), (64, 256)).astype(jnp.bfloat16)
        for seed in range(2)
    )
    params = {"w": w, "inner": {"w": other}}
    tx = oo.low_bit(oo.master_weights(optax.sgd(0.1)), REMAINDERS)
    state = tx.init(params)
    decoded = oo.low_bit_decode(state, params).master
    assert bits(decoded) == bits(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    wider = params | {"inner": {"w": other.astype(jnp.float32)}}
    with pytest.raises(ValueError, match=r"dtype: 'master/inner/w' \(float32\)\. Give"):
        oo.low_bit_decode(state, wider)


def test_parameters_that_are_called_as_their_copies():
    """One under ``master`` that has no copy is not that of another's copy."""
    w = jax.random.normal(jax.random.key(0), (64, 256))
    params = {"w": w.astype(jnp.bfloat16), "master": {"w": 2 * w}}
    tx = oo.low_bit(oo.master_weights(optax.sgd(0.1)), REMAINDERS)
    state = tx.init(params)
    decoded = oo.low_bit_decode(state, params).master["w"]
    np.testing.assert_array_equal(decoded, params["w"].astype(jnp.float32))
    params["master"]["w"] = (2 * w).astype(jnp.bfloat16)
    decoded = oo.low_bit_decode(tx.init(params), params).master["master"]["w"]
    np.testing.assert_array_equal(decoded, params["master"]["w"].astype(jnp.float32))


def test_the_parameter_that_has_the_other_half():
    """Of its shape; of several that of the longest end of its path."""
    halves = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16),
        "a/w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16),
        "b/w": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16),
        "d/v": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    }
    copy = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    key = jax.tree_util.GetAttrKey("master")
    for path, of in (
        ("w", "w"),
        ("a/w", "a/w"),
        ("b/w", "w"),
        ("d/v", "d/v"),
        ("e/v", None),
    ):
        keys = (key, *map(jax.tree_util.DictKey, path.split("/")))
        assert convert._upper_half(keys, copy, halves) is halves.get(of), path
