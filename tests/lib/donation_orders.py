"""Steps that donate in the orders that trainers do, and in worse ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_offload as oo

SHAPE = (512, 512)
LEAF_BYTES = 512 * 512 * 4
TX = oo.offload(optax.adam(0.1))
EMA = oo.offload(optax.ema(0.9))


@dataclasses.dataclass(frozen=True)
class Order:
    """A step, the order of its arguments and results, and what it donates.

    Attributes:
      name: In a test's name.
      step: Of what `takes` names.
      takes: Names of arguments.
      returns: Names of results; those that are arguments go into the next step.
      donates: Names of arguments.
      host_leaves: How many results are in host memory.
      aliased: How many large leaves are written into donated ones: on the device, and
        on the host.
      jax_is_wrong: Whether `jax.jit` pairs across memories.
      copied: How many large leaves are copied on the host: those that are written in
        slices, and are not donated, or are written into another's place.
    """

    name: str
    step: Callable[..., Any]
    takes: Sequence[str]
    returns: Sequence[str]
    donates: Sequence[str]
    host_leaves: int
    aliased: tuple[int, int]
    jax_is_wrong: bool
    copied: int = 0

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(self.takes.index(name) for name in self.donates)

    def __str__(self) -> str:
        return self.name


def start() -> dict[str, Any]:
    """Values of all names: one parameter, so that its state is of its shape."""
    params = {"w": jnp.ones(SHAPE) / 512}
    return {
        "params": params,
        "state": TX.init(params),
        "ema": EMA.init(params),
        "x": jnp.linspace(-1.0, 1.0, 4 * 512).reshape(4, 512),
    }


def templates() -> dict[str, Any]:
    """The same, for a chip that is not here."""
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    return {
        "params": params,
        "state": oo.eval_shape(TX.init, params),
        "ema": oo.eval_shape(EMA.init, params),
        "x": jax.ShapeDtypeStruct((4, 512), jnp.float32),
    }


def _grads(params: Any, x: jax.Array) -> Any:
    return jax.grad(lambda p: jnp.mean((x @ p["w"] - 1) ** 2))(params)


def _update(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, Any]:
    grads = _grads(params, x)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, grads


def _params_first(params, state, x):
    return _update(params, state, x)[:2]


def _state_first(state, params, x):
    params, state, _ = _update(params, state, x)
    return state, params


def _swapped(params, state, x):
    params, state, _ = _update(params, state, x)
    return state, params


def _gradients_ahead(params, state, x):
    params, state, grads = _update(params, state, x)
    return grads, params, state


def _two_states(ema, state, params, x):
    params, state, _ = _update(params, state, x)
    _, ema = EMA.update(params, ema)
    return params, ema, state


def _parameters_only(state, params, x):
    return _update(params, state, x)[0]


def _moments_swapped(params, state, x):
    params, (adam, *rest), _ = _update(params, state, x)
    return params, (adam.nu, adam.mu, adam.count, rest)


ORDERS = [
    Order(
        "params-and-state", _params_first, ("params", "state", "x"),
        ("params", "state"), ("params", "state"), 2, (1, 2), False,
    ),
    Order(
        "only-state", _params_first, ("params", "state", "x"),
        ("params", "state"), ("state",), 2, (0, 2), True,
    ),
    Order(
        "only-params", _params_first, ("params", "state", "x"),
        ("params", "state"), ("params",), 2, (1, 0), False,
    ),
    Order(
        "only-params-state-returned-first", _swapped, ("params", "state", "x"),
        ("state", "params"), ("params",), 2, (1, 0), True,
    ),
    Order(
        "state-first", _state_first, ("state", "params", "x"),
        ("state", "params"), ("state", "params"), 2, (1, 2), False,
    ),
    Order(
        "state-taken-first", lambda s, p, x: _state_first(s, p, x)[::-1],
        ("state", "params", "x"), ("params", "state"), ("state", "params"),
        2, (1, 2), True,
    ),
    Order(
        "state-returned-first", _swapped, ("params", "state", "x"),
        ("state", "params"), ("params", "state"), 2, (1, 2), True,
    ),
    Order(
        "gradients-ahead", _gradients_ahead, ("params", "state", "x"),
        ("grads", "params", "state"), ("params", "state"), 2, (1, 2), True,
    ),
    Order(
        "gradients-ahead-only-state", _gradients_ahead, ("params", "state", "x"),
        ("grads", "params", "state"), ("state",), 2, (0, 2), True,
    ),
    Order(
        "two-states", _two_states, ("ema", "state", "params", "x"),
        ("params", "ema", "state"), ("ema", "state", "params"), 3, (1, 3), True,
    ),
    Order(
        "state-dropped", _parameters_only, ("state", "params", "x"),
        ("params",), ("state", "params"), 0, (1, 0), True, 2,
    ),
    Order(
        "moments-swapped", _moments_swapped, ("params", "state", "x"),
        ("params", "other"), ("state",), 2, (0, 2), True, 1,
    ),
]  # fmt: skip
