"""Flax's gemma example: an NNX model, split, in a TrainState made under jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pattern
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo


class TrainState(train_state.TrainState):
    """With the model's graph."""

    graphdef: Any


class Model(nnx.Module):
    """One layer, sharded over its inputs."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.dense = nnx.Linear(pattern.IN, pattern.OUT, kernel_init=kernel, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def setup_initial_state(tx: Any, mesh: Any, second_line: bool) -> tuple[Any, Any]:
    """The state, sharded as its metadata says, and its shardings."""

    @jax.jit
    def sharded_init() -> TrainState:
        graphdef, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
        state = TrainState.create(
            apply_fn=graphdef.apply, params=params, tx=tx, graphdef=graphdef
        )
        state = jax.tree.map(jnp.asarray, state)
        return jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))

    with jax.set_mesh(mesh):
        state = sharded_init()
        state_sharding = nnx.get_named_sharding(state, mesh)
        if second_line:
            state_sharding = oo.state_shardings(sharded_init)
    return state, state_sharding


class Trainer(pattern.Trainer):
    """As its train_and_evaluate."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        mesh = pattern.mesh("fsdp")
        tx = setup.offload(optax.adamw(1e-2), pattern.RULES)
        state, sharding = setup_initial_state(tx, mesh, setup.second_line)
        self._path = setup.directory / "checkpoint"
        if self._path.exists():
            with ocp.StandardCheckpointer() as checkpointer:
                state = checkpointer.restore(self._path, state)
        self._state = state
        self._step = jax.jit(
            self._train_step,
            in_shardings=(sharding, NamedSharding(mesh, P("fsdp"))),
            out_shardings=(sharding, None),
            donate_argnums=0,
        )

    @staticmethod
    def _train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return pattern.loss_of(nnx.merge(state.graphdef, params)(x))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def step(self, x: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x)
        return loss

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._path, self._state)
