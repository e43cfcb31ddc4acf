"""Levanter's Trainer over Haliax's named_jit: out_shardings from names of axes.

The state is an Equinox module with functions in it, so that what is jitted takes and
returns its arrays. Checkpoints are written by JAX's array_serialization, leaf by leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pattern
from jax.experimental.array_serialization import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

AXIS_MAPPING = {"embed": "data"}


class Named(eqx.Module):
    """An array whose axes have names."""

    array: jax.Array
    axes: tuple[str, ...] = eqx.field(static=True)


class Model(eqx.Module):
    """One layer, and a function."""

    weight: Named
    bias: Named
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        weight = jax.random.normal(key, (pattern.IN, pattern.OUT)) / pattern.IN
        self.weight = Named(weight, ("embed", "mlp"))
        self.bias = Named(jnp.zeros(pattern.OUT), ("mlp",))
        self.activation = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(x @ self.weight.array + self.bias.array[None])


class TrainerState(eqx.Module):
    """As Levanter's: the transformation is in it, and is static."""

    step: jax.Array
    model: Model
    opt_state: Any
    training_key: jax.Array
    optimizer: Any = eqx.field(static=True)


def infer_resource_partitions(tree: Any, mapping: Mapping[str, str]) -> Any:
    """A sharding for each array of a tree, by the names of its axes."""
    mesh = pattern.mesh()

    def sharding_of(x: Any) -> Any:
        if isinstance(x, Named):
            spec = P(*(mapping.get(axis) for axis in x.axes))
            return jax.tree.map(lambda _: NamedSharding(mesh, spec), x)
        return NamedSharding(mesh, P())

    return jax.tree.map(sharding_of, tree, is_leaf=lambda x: isinstance(x, Named))


def named_pjit(fn: Callable[..., Any], second_line: bool, **jitkwargs: Any) -> Any:
    """Haliax's `_named_pjit_cache`."""
    if second_line:
        return oo.jit(fn, donate_argnums=0, **jitkwargs)
    return jax.jit(fn, donate_argnums=0, **jitkwargs)


def named_jit(
    fn: Callable[..., Any], mapping: Mapping[str, str], second_line: bool, donate: int
) -> Callable[..., Any]:
    """Haliax's, where ``donate`` of the first arguments are donated."""
    cache: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        dynamic, static = eqx.partition(args, eqx.is_array)
        leaves, structure = jax.tree.flatten(static)
        key = (structure, tuple(leaves))
        if key not in cache:
            shapes = eqx.filter_eval_shape(fn, *args)
            arrays, rest = eqx.partition(shapes, eqx.is_array_like)
            out_shardings = infer_resource_partitions(arrays, mapping)

            def on_arrays(donated: Any, reserved: Any) -> Any:
                out = fn(*eqx.combine((*donated, *reserved), static))
                return eqx.filter(out, eqx.is_array)

            jitted = named_pjit(on_arrays, second_line, out_shardings=out_shardings)
            cache[key] = jitted, rest
        jitted, rest = cache[key]
        return eqx.combine(jitted(dynamic[:donate], dynamic[donate:]), rest)

    return call


def train_step(state: TrainerState, x: jax.Array) -> tuple[TrainerState, jax.Array]:
    """As the trainer's `_train_step`."""

    def loss_fn(model: Model) -> jax.Array:
        return pattern.loss_of(model(x))

    loss, grads = eqx.filter_value_and_grad(loss_fn)(state.model)
    trainable = eqx.filter(state.model, eqx.is_inexact_array)
    updates, opt_state = state.optimizer.update(grads, state.opt_state, trainable)
    model = eqx.apply_updates(state.model, updates)
    state = dataclasses.replace(
        state, step=state.step + 1, model=model, opt_state=opt_state
    )
    return state, loss


class Trainer(pattern.Trainer):
    """As Levanter's initial_state, train_step and load_checkpoint."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        rules = pattern.RULES
        optimizer = setup.offload(optax.adamw(1e-2), rules)

        def init_state(key: jax.Array) -> TrainerState:
            model = Model(key)
            opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            step = jnp.zeros((), jnp.int32)
            return TrainerState(step, model, opt_state, key, optimizer)

        key = jax.random.key_data(jax.random.key(0))
        make = named_jit(init_state, AXIS_MAPPING, setup.second_line, donate=0)
        self._state = make(key)
        self._step = named_jit(train_step, AXIS_MAPPING, setup.second_line, donate=1)
        self._directory = setup.directory / "step-3"
        if self._directory.exists():
            state = self._load_checkpoint()
            if setup.second_line:
                state = oo.place(state, rules, under="opt_state")
            self._state = state

    def _specs(self, leaves: list[Any]) -> list[Any]:
        return [
            serialization.get_tensorstore_spec(str(self._directory / str(i)))
            for i in range(len(leaves))
        ]

    def _load_checkpoint(self) -> TrainerState:
        arrays, rest = eqx.partition(self._state, eqx.is_array)
        shardings = infer_resource_partitions(arrays, AXIS_MAPPING)
        leaves, structure = jax.tree.flatten(shardings)
        manager = serialization.GlobalAsyncCheckpointManager()
        loaded = manager.deserialize(leaves, self._specs(leaves))
        return eqx.combine(jax.tree.unflatten(structure, loaded), rest)

    def step(self, x: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x)
        return loss

    def state(self) -> Any:
        return eqx.filter(self._state, eqx.is_array)

    def save(self) -> None:
        leaves = jax.tree.leaves(eqx.filter(self._state, eqx.is_array))
        self._directory.mkdir()
        manager = serialization.GlobalAsyncCheckpointManager()
        manager.serialize(leaves, self._specs(leaves), on_commit_callback=lambda: None)
        manager.wait_until_finished()
