"""Updates under `jax.vmap`, `jax.jvp` and `jax.grad`, whole and in slices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close

import optax_offload as oo
from optax_offload import aot

MEMBERS = 3
MOST = oo.Rule(".*", min_bytes=64)  # Not the counters of members.


def population(shape=(64, 128)):
    """Parameters of several models, that of each member along the first axis."""
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        n: jax.random.normal(k, (MEMBERS, *shape))
        for n, k in zip("wv", keys, strict=True)
    }


def two_steps(tx, params):
    """Updates and state of two vmapped steps."""
    update = jax.jit(jax.vmap(tx.update))
    _, state = update(params, jax.vmap(tx.init)(params), params)
    return update(params, state, params)


@pytest.mark.parametrize("window_bytes", [2**17, None])
@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    ],
    ids=["adam", "clip", "apply_if_finite", "MultiSteps"],
)
def test_a_population(tx, window_bytes):
    """The members' updates, and their state in host memory."""
    params = population()
    want = two_steps(tx, params)
    got = two_steps(oo.offload(tx, MOST, window_bytes=window_bytes), params)
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    kinds = {x.shape: x.sharding.memory_kind for x in jax.tree.leaves(got[1])}
    assert kinds[(MEMBERS, 64, 128)] == "pinned_host"


def test_a_population_of_leaves_that_are_sliced():
    """Of 16 MiB each: small arrays never showed that this failed."""
    params = population((2048, 2048))
    _, state = two_steps(oo.offload(optax.adam(0.1)), params)
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"


def test_what_members_share_is_not_batched():
    """Gradients of one member for all, by ``in_axes=None``."""
    params = population()
    tx = oo.offload(optax.sgd(0.1, momentum=0.9), MOST, window_bytes=2**16)
    state = jax.vmap(tx.init)(params)
    shared = jax.tree.map(lambda x: x[0], params)
    updates, _ = jax.jit(jax.vmap(tx.update, in_axes=(None, 0)))(shared, state)
    np.testing.assert_allclose(updates["w"][1], -0.1 * shared["w"], rtol=1e-6)


@pytest.mark.parametrize(
    "window_bytes", [pytest.param(2**17, marks=pytest.mark.slow), None]
)
def test_forward_mode(window_bytes):
    """Tangents of updates and of state are those of the inner optimizer."""
    params = {"w": jnp.linspace(1.0, 2.0, 64 * 128).reshape(64, 128)}
    inner = optax.adam(0.1)

    def derivative(tx):
        state = tx.init(params)

        def f(c):
            updates, new = tx.update(jax.tree.map(lambda x: c * x, params), state)
            return updates, new[0].mu

        out, tangent = jax.jit(lambda c: jax.jvp(f, (c,), (1.0,)))(2.0)
        return [*jax.tree.leaves(out), *jax.tree.leaves(tangent)]

    got = derivative(oo.offload(inner, MOST, window_bytes=window_bytes))
    for x, y in zip(got, derivative(inner), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


def test_reverse_mode_is_refused():
    """With what to do instead."""
    params = {"w": jnp.ones((64, 128))}
    tx = oo.offload(optax.adam(0.1), MOST)
    state = tx.init(params)

    def f(c):
        return tx.update(jax.tree.map(lambda x: c * x, params), state)[0]["w"].sum()

    with pytest.raises(TypeError, match="Differentiate through the inner optimizer"):
        jax.jit(jax.grad(f))(2.0)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_nothing_is_computed_on_the_host_for_a_population(target):
    """With a predicate for each member, state is selected on the device."""
    params = {"w": jax.ShapeDtypeStruct((MEMBERS, 256, 512), jnp.float32)}
    tx = oo.offload(optax.apply_if_finite(optax.adam(0.1), 3), ".*/(mu|nu)/.*")
    state = oo.eval_shape(jax.vmap(tx.init), params)
    update = jax.vmap(lambda g, s, p: tx.update(g, s, p))
    compiled = aot.compile(
        update, params, state, params, target=aot.Target(target), donate_argnums=(0, 1)
    )
    assert aot.host_computations(compiled) == ()
    assert aot.peak(compiled).host_temporary_bytes == 0
