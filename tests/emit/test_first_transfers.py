"""What rests on the host for a while, in steps that are given and return nothing there.

JAX lowers a transfer as nothing in a program in which it sees none before.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import assert_close
from jax import lax
from limited import limited
from small_steps import train_step

import optax_offload as oo

LAYERS, WIDTH = 12, 64
WEIGHTS = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
X = jax.random.normal(jax.random.key(1), (512, WIDTH))


def scanned(params, x):
    """Layers under a scan."""
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    return jnp.mean(lax.scan(layer, x, params["w"])[0] ** 2)


def looped(params, x):
    """Layers in a Python loop."""
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def assert_stored_and_same(step, params, tx, **options):
    """A GPU's program has transfers, and numbers are those of the plain step."""
    args = params, tx.init(params), X
    ours = oo.jit(step, **options)
    text = ours.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("annotate_device_placement") >= 2
    got, want = ours(*args), jax.jit(step)(*args)
    assert_close(got, want, atol=1e-6)
    return ours.schedule(*args)


def test_gradients_that_wait():
    """The optimizer is optax's own, and its norm needs all of them first."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = train_step(tx, scanned)
    found = assert_stored_and_same(step, {"w": WEIGHTS}, tx, late_gradients="host")
    assert found.gradient_bytes == WEIGHTS.nbytes


@pytest.mark.newest
def test_residuals_of_a_loop(monkeypatch):
    """Where the backward pass begins, JAX says."""
    limited(monkeypatch, segment_bytes=2**18, least_residual_bytes=2**16)
    tx = optax.adam(1e-3)
    step = train_step(tx, looped)
    found = assert_stored_and_same(step, [*WEIGHTS], tx, residuals="host")
    assert found.residual_bytes >= (LAYERS - 1) * X.nbytes
