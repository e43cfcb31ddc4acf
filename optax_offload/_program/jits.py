"""Calls of jitted functions around what rests on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex
from jax.sharding import NamedSharding

from optax_offload._program.row_values import rests


def around(
    fn: Callable[..., Sequence[Any]], e: jex.JaxprEqn, values: Sequence[Any]
) -> Sequence[Any]:
    """The results of a call whose body is evaluated in its place.

    Shardings that a jit has constrain what is on the device.

    Args:
      fn: The body, a function of the values.
      e: The call: a jit, or one that has no shardings.
      values: The values that it takes, each where it rests.
    """
    if "in_shardings" not in e.params:
        return fn(*values)
    results = fn(*_constrained(values, e.params["in_shardings"]))
    return _constrained(results, e.params["out_shardings"])


def _constrained(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
        lax.with_sharding_constraint(x, like.with_memory_kind("device"))
        if _constrains(like) and not rests(x)
        else x
        for x, like in zip(values, shardings, strict=True)
    ]


def _constrains(like: Any) -> bool:
    """Returns whether it is a sharding, and no type says as much."""
    return isinstance(like, NamedSharding) and like.mesh.are_all_axes_auto
