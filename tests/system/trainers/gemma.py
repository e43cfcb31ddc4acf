"""Flax's gemma example: an nnx.Optimizer made within a mesh, and a jitted step.

Its mesh has explicit axes, in which NNX leaves the state where it is made.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
import pattern
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo


class Model(nnx.Module):
    """One layer, sharded over its outputs, of which those of a batch are gathered."""

    def __init__(self, rngs: nnx.Rngs, out_sharding: P | None):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))
        self.dense = nnx.Linear(pattern.IN, pattern.OUT, kernel_init=kernel, rngs=rngs)
        self._out_sharding = out_sharding

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x, out_sharding=self._out_sharding)


def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
    """A step of `jax.jit`, which hands all state back."""
    graph, params = nnx.split(model)

    def loss_fn(params: Any) -> jax.Array:
        return pattern.loss_of(nnx.merge(graph, params)(x))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


class Trainer(pattern.Trainer):
    """As its train_and_evaluate."""

    under = "opt_state"
    axis_type = jax.sharding.AxisType.Explicit

    def __init__(self, setup: pattern.Setup):
        rules = pattern.RULES
        self._mesh = pattern.mesh("fsdp", self.axis_type)
        explicit = self.axis_type is jax.sharding.AxisType.Explicit
        with jax.set_mesh(self._mesh):
            model = Model(nnx.Rngs(0), P("fsdp", None) if explicit else None)
            tx = setup.offload(optax.adamw(1e-2), rules)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        self._path = setup.directory / "checkpoint"
        if self._path.exists():
            target = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            with ocp.StandardCheckpointer() as checkpointer:
                checkpoint = checkpointer.restore(self._path, target)
            nnx.update(model, checkpoint["model"])
            nnx.update(optimizer, checkpoint["optimizer"])
        if setup.second_line:
            oo.place(optimizer, rules, under="opt_state")
        self._model, self._optimizer = model, optimizer
        self._step = jax.jit(train_step, donate_argnames=("model", "optimizer"))

    def step(self, x: jax.Array) -> jax.Array:
        x = jax.device_put(x, NamedSharding(self._mesh, P("fsdp")))
        with jax.set_mesh(self._mesh):
            state, loss = self._step(self._model, self._optimizer, x)
        nnx.update((self._model, self._optimizer), state)
        return loss

    def state(self) -> Any:
        return nnx.state(self._optimizer)

    def save(self) -> None:
        states = {
            "model": nnx.state(self._model),
            "optimizer": nnx.state(self._optimizer),
        }
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._path, states)


class AutoTrainer(Trainer):
    """In a mesh of Auto axes, where NNX puts the state on the device."""

    axis_type = jax.sharding.AxisType.Auto
