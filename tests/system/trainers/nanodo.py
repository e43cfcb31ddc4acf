"""nanodo's train.py: shardings from Flax's boxes, given to init and to the step.

The optimizer is made within init, and is a MultiSteps whose counter is the step.
"""

from __future__ import annotations

import pathlib
from typing import Any

import flax.linen as nn
import jax
import optax
import orbax.checkpoint as ocp
import pattern
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo


class Trainer(pattern.Trainer):
    """As nanodo's Trainer and what builds its state."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        mesh = pattern.mesh()
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data"))
        model = nn.Dense(pattern.OUT, kernel_init=kernel)

        def init(rng: jax.Array, inputs: jax.Array) -> TrainState:
            params = model.init(rng, inputs)["params"]
            tx: Any = setup.offload(
                optax.MultiSteps(optax.adamw(1e-2), 1), pattern.RULES
            )
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        rng, inputs = jax.random.key(0), pattern.batch(0)
        abstract = jax.eval_shape(init, rng, inputs)
        shardings = nn.get_sharding(abstract, mesh)
        if setup.second_line:
            shardings = oo.state_shardings(init, rng, inputs, mesh=mesh)
        self._state = jax.jit(init, out_shardings=shardings)(rng, inputs)
        replicated = NamedSharding(mesh, P())
        self._step = jax.jit(
            self._train_step,
            in_shardings=(shardings, replicated),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        self._path: pathlib.Path = setup.directory / "state"
        if self._path.exists():
            restore_args = ocp.checkpoint_utils.construct_restore_args(self._state)
            with ocp.PyTreeCheckpointer() as checkpointer:
                self._state = checkpointer.restore(
                    self._path, item=self._state, restore_args=restore_args
                )

    @staticmethod
    def _train_step(state: Any, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return pattern.loss_of(state.apply_fn({"params": params}, x))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        state = state.replace(
            step=opt_state.gradient_step,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        return state, loss

    def step(self, x: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x)
        return loss

    def state(self) -> Any:
        return self._state

    def save(self) -> None:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(self._path, self._state)
