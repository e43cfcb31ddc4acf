"""Step factories in Flax linen, Flax NNX and Equinox, for `optax-offload fit`.

Each has the same scanned layers and an ordinary train step. `fit` finds what should
rest on the host, parameters included, and the step stays as it is. Nothing is
allocated.

Run:
    optax-offload fit examples.factories:linen --target h100 --budget 2GiB
    optax-offload fit examples.factories:in_nnx --target h100 --budget 2GiB
    optax-offload fit examples.factories:in_equinox --target h100 --budget 2GiB
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import optax_offload as oo
from optax_offload import aot

Wrap = Callable[[Any], Any]
ROWS = 4096


def _batch(width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS, width), jnp.float32)


class LinenLayer(nn.Module):
    """One layer of `LinenStack`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """The layer's output, as `nn.scan` wants it."""
        return x + nn.tanh(nn.Dense(x.shape[-1])(x)), None


class LinenStack(nn.Module):
    """Layers under `nn.scan`."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The last layer's output."""
        scanned = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        return scanned(name="layers")(x, None)[0]


def linen(
    offload: Wrap, target: aot.Target, layers: int = 24, width: int = 4096
) -> oo.Step:
    """A step of a `TrainState`, which holds parameters and state."""
    del target
    model = LinenStack(layers)
    tx = offload(optax.adamw(1e-3))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, width)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = oo.eval_shape(create, jax.random.key(0))
    return oo.Step(step, (state, _batch(width)), donate_argnums=0, tokens=ROWS)


class NnxLayer(nnx.Module):
    """One layer of `NnxStack`."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        """Makes the parameters."""
        self.dense = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output."""
        return x + jnp.tanh(self.dense(x))


class NnxStack(nnx.Module):
    """Layers under `nnx.scan`."""

    def __init__(self, layers: int, width: int, *, rngs: nnx.Rngs):
        """Makes the layers, stacked."""

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> NnxLayer:
            return NnxLayer(width, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The last layer's output."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer: NnxLayer, x: jax.Array) -> jax.Array:
            return layer(x)

        return forward(self.layers, x)


def in_nnx(
    offload: Wrap, target: aot.Target, layers: int = 24, width: int = 4096
) -> oo.Step:
    """A step of a model and its `nnx.Optimizer`, both changed in place."""
    del target
    tx = offload(optax.adamw(1e-3))

    def create() -> tuple[NnxStack, nnx.Optimizer]:
        model = NnxStack(layers, width, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model: NnxStack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        def loss_fn(model: NnxStack) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    args = (*oo.eval_shape(create), _batch(width))
    return oo.Step(step, args, donate_argnums=(0, 1), tokens=ROWS)


class EquinoxLayer(eqx.Module):
    """One layer, or several whose arrays are stacked."""

    dense: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        """Makes the parameters."""
        self.dense = eqx.nn.Linear(width, width, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output."""
        return x + jnp.tanh(jax.vmap(self.dense)(x))


def in_equinox(
    offload: Wrap, target: aot.Target, layers: int = 24, width: int = 4096
) -> oo.Step:
    """A step of the arrays of an Equinox module, and the optimizer's state."""
    del target
    tx = offload(optax.adamw(1e-3))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), layers))
    stacked = eqx.filter_vmap(lambda key: EquinoxLayer(width, key))
    model = eqx.filter_eval_shape(stacked, keys)
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            @jax.checkpoint
            def layer(x: jax.Array, row: Any) -> tuple[jax.Array, None]:
                return eqx.combine(row, static)(x), None

            return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    state = oo.eval_shape(tx.init, params)
    args = (params, state, _batch(width))
    return oo.Step(step, args, donate_argnums=(0, 1), tokens=ROWS)
