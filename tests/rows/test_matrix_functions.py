"""Optimizers with decompositions of matrices, over a stack of layers.

SOAP and Shampoo keep a matrix for each side of a parameter. Of a stack of parameters
these are stacks of matrices, which are updated slice by slice.
"""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import assert_close
from jax import lax

import optax_offload as oo

LAYERS, WIDTH = 16, 16
EYE = jnp.eye(WIDTH)[None]


def product(x):
    """A symmetric, positive definite matrix for each layer."""
    return x @ jnp.swapaxes(x, -1, -2) + EYE


def rotated(s, g):
    """SOAP: the basis of a preconditioner, anew now and then."""
    return lax.cond(
        jnp.sum(g) < 1e9,
        lambda: jnp.linalg.qr(product(g) @ s + 3 * EYE)[0],
        lambda: s,
    )


def iterated_root(s, g):
    """Distributed Shampoo: the inverse square root of each matrix, until it is near."""

    def of_one(a):
        scale = jnp.sqrt(jnp.sum(a * a))

        def far(c):
            y, z, n = c
            return (jnp.max(jnp.abs(y @ z - jnp.eye(WIDTH))) > 1e-2) & (n < 30)

        def nearer(c):
            y, z, n = c
            t = 1.5 * jnp.eye(WIDTH) - 0.5 * z @ y
            return y @ t, t @ z, n + 1

        begin = a / scale, jnp.eye(WIDTH), 0
        return lax.while_loop(far, nearer, begin)[1] / jnp.sqrt(scale)

    return jax.vmap(of_one)(product(s + g))


FUNCTIONS = {fn.__name__: fn for fn in (rotated, iterated_root)}


def optimizer(fn):
    """A quarter of what a function makes of state and gradient is the new state."""

    def update(grads, state, params=None):
        state = jax.tree.map(lambda s, g: s / 2 + fn(s, g) / 4, state, grads)
        return jax.tree.map(lambda s: -0.1 * s, state), state

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: p / 3, params), update
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_slices(name):
    """Without a reason why not, and as whole."""
    plain = optimizer(FUNCTIONS[name])
    tx = oo.offload(plain, oo.Rule(".*", min_bytes=8), window_bytes=2**11)
    keys = jax.random.split(jax.random.key(0))
    params, grads = (
        {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 3} for key in keys
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(tx.schedule(params))
        state = tx.init(params)
        got = jax.jit(tx.update)(grads, state)
    assert "in 8 slices" in text
    assert "whole:" not in text
    want = jax.jit(plain.update)(grads, plain.init(params))
    assert_close(got, want)
