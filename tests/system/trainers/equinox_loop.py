"""Equinox's examples: filter_jit with donation, and tree_serialise_leaves."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import optax
import pattern

import optax_offload as oo


class Trainer(pattern.Trainer):
    """As the training loops of its examples, on one device."""

    under = "opt_state"

    def __init__(self, setup: pattern.Setup):
        rules = pattern.RULES
        model = eqx.nn.MLP(
            pattern.IN, pattern.OUT, pattern.OUT, 1, key=jax.random.key(0)
        )
        optim = setup.offload(optax.adamw(1e-2), rules)
        opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
        self._path = setup.directory / "state.eqx"
        if self._path.exists():
            model, opt_state = eqx.tree_deserialise_leaves(
                self._path, (model, opt_state)
            )
            if setup.second_line:
                opt_state = oo.place(opt_state, rules)

        @eqx.filter_jit(donate="all-except-first")
        def make_step(
            x: jax.Array, model: Any, opt_state: Any
        ) -> tuple[jax.Array, Any, Any]:
            loss, grads = eqx.filter_value_and_grad(
                lambda model: pattern.loss_of(jax.vmap(model)(x))
            )(model)
            updates, opt_state = optim.update(
                grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
            )
            return loss, eqx.apply_updates(model, updates), opt_state

        self._make_step, self._model, self._opt_state = make_step, model, opt_state

    def step(self, x: jax.Array) -> jax.Array:
        loss, self._model, self._opt_state = self._make_step(
            x, self._model, self._opt_state
        )
        return loss

    def state(self) -> Any:
        model = eqx.filter(self._model, eqx.is_array)
        return {"model": model, "opt_state": self._opt_state}

    def save(self) -> None:
        eqx.tree_serialise_leaves(self._path, (self._model, self._opt_state))
