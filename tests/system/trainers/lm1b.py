"""Flax's lm1b example: logical axes, shardings made of them, and an unboxed state."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pattern
from flax.linen import spmd
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

LOGICAL_AXIS_RULES = (("embed", "data"), ("mlp", None))


def init_train_state(model: Any, tx: Any, rng: jax.Array) -> TrainState:
    """The state, with boxes that name logical axes."""
    variables = jax.jit(model.init)(rng, jnp.ones((pattern.BATCH, pattern.IN)))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)


def setup_initial_state(
    model: Any, tx: Any, rng: jax.Array, second_line: bool
) -> tuple[TrainState, Any]:
    """The state without its boxes, and its shardings."""
    mesh = pattern.mesh()
    init_train_state_partial = functools.partial(init_train_state, model, tx)
    annotations = nn.get_partition_spec(jax.eval_shape(init_train_state_partial, rng))
    with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL_AXIS_RULES):
        state_mesh_annotations = spmd.logical_to_mesh_sharding(
            annotations, mesh, LOGICAL_AXIS_RULES
        )
        if second_line:
            state_mesh_annotations = oo.state_shardings(
                init_train_state_partial, rng, shardings=state_mesh_annotations
            )
        state = jax.jit(init_train_state_partial, out_shardings=state_mesh_annotations)(
            rng
        )
    return nn.unbox(state), state_mesh_annotations


class Trainer(pattern.Trainer):
    """As its train_and_evaluate, with checkpoints of flax.training.checkpoints."""

    under = "opt_state/1"

    def __init__(self, setup: pattern.Setup):
        kernel = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "mlp")
        )
        model = nn.Dense(pattern.OUT, kernel_init=kernel)
        tx = optax.chain(
            optax.clip_by_global_norm(1.0),
            setup.offload(optax.adamw(1e-2), pattern.RULES),
        )
        state, shardings = setup_initial_state(
            model, tx, jax.random.key(0), setup.second_line
        )
        self._path = setup.directory / "checkpoint.msgpack"
        if self._path.exists():
            state = flax.serialization.from_bytes(state, self._path.read_bytes())
            state = jax.device_put(state, shardings)
        self._state = state
        data = NamedSharding(pattern.mesh(), P("data"))
        self._step = jax.jit(
            self._train_step,
            in_shardings=(shardings, data),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )

    @staticmethod
    def _train_step(state: Any, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return pattern.loss_of(state.apply_fn({"params": params}, x))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def step(self, x: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x)
        return loss

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        self._path.write_bytes(flax.serialization.to_bytes(self._state))
