"""Steps made with other libraries, in the forms that they have there."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from harness import kinds_in

import optax_offload as oo

RULES = r".*/(mu|nu)/.*"
X = jnp.linspace(-1.0, 1.0, 4 * 256).reshape(4, 256)


def wrap(offloaded):
    """Adam, offloaded or not."""
    return oo.offload(optax.adam(1e-3), RULES) if offloaded else optax.adam(1e-3)


def linen(jit, tx):
    """`TrainState`, the whole of it donated."""
    model = nn.Dense(256)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=tx
    )

    @functools.partial(jit, donate_argnums=(0,))
    def train_step(state, x):
        def loss(params):
            return jnp.mean(state.apply_fn(params, x) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return value, state.apply_gradients(grads=grads)

    losses = []
    for _ in range(3):
        loss, state = train_step(state, X)
        losses.append(loss)
    return losses, state.params, state.opt_state


def nnx_split_and_merge(jit, tx):
    """What `nnx.jit` does for its users, with the jit that is given."""
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(jit, static_argnums=0, donate_argnums=1)
    def train_step(graphdef, state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss, nnx.state((model, optimizer))

    graphdef, state = nnx.split((model, optimizer))
    losses = []
    for _ in range(3):
        loss, state = train_step(graphdef, state, X)
        losses.append(loss)
    nnx.update((model, optimizer), state)
    return losses, nnx.state(model), nnx.state(optimizer.opt_state)


def nnx_only_the_optimizer_donated(jit, tx):
    """Two states, of which the second is donated."""
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(jit, static_argnums=0, donate_argnums=2)
    def train_step(graphdef, params, rest, x):
        model, optimizer = nnx.merge(graphdef, params, rest)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss, *nnx.state((model, optimizer), nnx.Param, ...)

    graphdef, params, rest = nnx.split((model, optimizer), nnx.Param, ...)
    losses = []
    for _ in range(3):
        loss, params, rest = train_step(graphdef, params, rest, X)
        losses.append(loss)
    return losses, params, rest


class Module(eqx.Module):
    """A module whose leaves are an array and a function."""

    weight: Any
    activation: Any

    def __call__(self, x):
        return self.activation(x @ self.weight)


def equinox_partition(jit, tx):
    """What `equinox.filter_jit` does: arrays are traced, all else is static."""
    model = Module(jnp.ones((256, 256)) / 256, jnp.tanh)

    @functools.partial(jit, static_argnums=1, donate_argnums=0)
    def train_step(arrays, static, x):
        model, opt_state = eqx.combine(arrays, static)
        weights, rest = eqx.partition(model, eqx.is_array)

        def loss(weights):
            return jnp.mean(eqx.combine(weights, rest)(x) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        updates, opt_state = tx.update(grads, opt_state, weights)
        model = eqx.apply_updates(model, updates)
        return value, eqx.filter((model, opt_state), eqx.is_array)

    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    arrays, static = eqx.partition((model, opt_state), eqx.is_array)
    losses = []
    for _ in range(3):
        loss, arrays = train_step(arrays, static, X)
        losses.append(loss)
    model, opt_state = eqx.combine(arrays, static)
    return losses, model.weight, opt_state


def haiku_tuples(jit, tx):
    """Parameters in dicts of dicts, and a tuple of everything, state first."""
    params = {"linear": {"w": jnp.ones((256, 256)) / 256, "b": jnp.zeros(256)}}

    @jit
    def unrelated(x):
        return x + 1

    @functools.partial(jit, donate_argnums=(0, 1))
    def train_step(opt_state, params, x):
        def loss(params):
            linear = params["linear"]
            return jnp.mean((x @ linear["w"] + linear["b"][None]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, unrelated(value) - 1

    opt_state, losses = tx.init(params), []
    for _ in range(3):
        params, opt_state, loss = train_step(opt_state, params, X)
        losses.append(loss)
    return losses, params, opt_state


@pytest.mark.parametrize(
    "form",
    [
        linen,
        nnx_split_and_merge,
        nnx_only_the_optimizer_donated,
        equinox_partition,
        haiku_tuples,
    ],
)
def test_steps(form):
    """Losses and parameters as without offload; the state on the host."""
    losses, params, state = form(oo.jit, wrap(True))
    plain_losses, plain_params, _ = form(jax.jit, wrap(False))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert kinds_in(params) == {"device"}
    assert kinds_in(state) == {"device", "pinned_host"}
    for a, b in zip(
        jax.tree.leaves(params), jax.tree.leaves(plain_params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
