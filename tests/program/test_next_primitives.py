"""Steps that are traced with the primitives of JAX's next `remat` and `custom_vjp`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from small_steps import train_step

import optax_offload as oo

FLAGS = "jax_remat3", "jax_custom_vjp3"


@pytest.fixture
def next_primitives():
    """Both flags on, and as before afterwards."""
    before = {flag: getattr(jax.config, flag) for flag in FLAGS}
    for flag in FLAGS:
        jax.config.update(flag, True)
    yield
    for flag, value in before.items():
        jax.config.update(flag, value)


@jax.custom_vjp
def squashed(x):
    """A function whose derivative is given."""
    return jnp.tanh(x)


squashed.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


def losses(**how):
    """Those of three steps of checkpointed layers at rest on the host."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), oo.offload(optax.adamw(3e-4)))

    def loss_fn(params, x):
        layer = jax.checkpoint(lambda h, w: (h + squashed(h @ w), None))
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    step = oo.jit(train_step(tx, loss_fn, value=True), donate_argnums=(0, 1), **how)
    params = jax.random.normal(jax.random.key(0), (4, 128, 128)) / 12
    params = oo.set_memory_kind(params, "", "pinned_host")
    state, x = tx.init(params), jax.random.normal(jax.random.key(1), (64, 128))
    found = []
    for _ in range(3):
        params, state, loss = step(params, state, x)
        found.append(float(loss))
    return found


def test_a_step_is_streamed_with_them(next_primitives):
    """To the losses of a step that is not fused."""
    assert losses(residuals="host") == pytest.approx(losses(fuse=False), rel=1e-5)
