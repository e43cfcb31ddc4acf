"""Counting matrix products, against counts by hand and by XLA."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from optax_offload._program import flops_of_jaxpr

A, B, C = 4, 8, 16
X, W = jnp.ones((A, B)), jnp.ones((B, C))
ONCE = 2 * A * B * C
MESH = jax.sharding.Mesh(jax.devices()[:2], "d")


def count(fn, *args):
    """The operations of a function."""
    return flops_of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def test_products():
    """Two operations for each element of a product and of what is summed."""
    assert count(jnp.dot, X, W) == ONCE
    batched = jax.vmap(jnp.dot, in_axes=(0, None))
    assert count(batched, jnp.ones((3, A, B)), W) == 3 * ONCE


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (jax.jit(jnp.dot), 1),
        (jax.checkpoint(jnp.dot), 1),
        (lambda x, w: lax.scan(lambda c, _: (c, x @ w), 0.0, None, length=5), 5),
        (lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w + x @ w, lambda: x @ w), 2),
        (lambda x, w: lax.fori_loop(0, 7, lambda i, c: c + x @ w, jnp.ones((A, C))), 7),
        (
            lambda x, w: lax.while_loop(
                lambda c: c[0, 0] < 9, lambda c: c + x @ w, x @ w
            ),
            2,
        ),
        (jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=(0, 1)), 3),
        (
            jax.shard_map(jnp.dot, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d")),
            1,
        ),
    ],
)
def test_nested(fn, times):
    """Loops count as often as they run; all shards; the larger branch; a while once."""
    assert count(fn, X, W) == times * ONCE


def test_remat_is_counted_again():
    """The backward pass of a rematerialized layer has its forward pass in it."""

    def loss(w, x):
        hidden = jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(x)
        return jnp.sum(hidden)

    plain = 6  # Two products forward, four backward.
    assert count(jax.grad(loss, argnums=(0, 1)), W, X) > plain * ONCE


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups):
    """As many as XLA counts, without padding."""
    x, k = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4 // groups, 6))

    def convolve(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    analysis = jax.jit(convolve).lower(x, k).compile().cost_analysis()
    assert count(convolve, x, k) == analysis["flops"]
