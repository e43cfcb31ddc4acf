"""Optimizers with decompositions of matrices, over a stack of layers.

SOAP and Shampoo keep a matrix for each side of a parameter. Of a stack of parameters
these are stacks of matrices, which are updated slice by slice.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def inverse_root(s, g):
    """Shampoo: by eigenvalues."""
    values, vectors = jnp.linalg.eigh(product(s + g))
    scaled = vectors * (values[..., None, :] ** -0.25)
    return scaled @ jnp.swapaxes(vectors, -1, -2)


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


def orthogonalized(s, g):
    """Muon: Newton-Schulz."""
    x = g / jnp.linalg.norm(g, axis=(1, 2), keepdims=True)
    return lax.fori_loop(
        0, 4, lambda _, x: 1.5 * x - 0.5 * x @ jnp.swapaxes(x, 1, 2) @ x, x
    )


def solved(s, g):
    """Natural gradients: with a Cholesky factor."""
    factor = jnp.linalg.cholesky(product(s))
    return jax.scipy.linalg.cho_solve((factor, True), g)


def inverted(s, g):
    """PSGD and others: by LU, and by singular values."""
    u, _, v = jnp.linalg.svd(product(s), full_matrices=False)
    return jnp.linalg.solve(product(s), g) + u @ v


def written(s, g):
    """L-BFGS: a history, of which one entry is written."""
    at = jnp.int32(jnp.sum(g) * 0) + 2
    return s.at[:, at].set(s[:, 0] / 2) + g


FUNCTIONS = {
    fn.__name__: fn
    for fn in (
        rotated,
        inverse_root,
        iterated_root,
        orthogonalized,
        solved,
        inverted,
        written,
    )
}


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
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
