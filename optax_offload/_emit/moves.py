"""The only loads and stores: between where a value rests and where it is used."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from optax_offload import _memory, _tpu_layout
from optax_offload._lowered import Sharded, constrain


def load(x: Any, of: Any) -> Any:
    """A value, or some of its rows, on the device.

    Args:
      x: The value, wherever it is.
      of: The type of all of it, whose layout the rows keep on a TPU.
    """
    if not _memory.on_host(x):
        return x
    return _tpu_layout.constrain(_memory.transfer(x, "device"), of)


def load_whole(x: Any) -> Any:
    """A value on the device, all of it."""
    return _memory.transfer(x, "device")


def store(
    y: Any,
    memory_kind: str,
    *,
    of: Any = None,
    like: Sharded | None = None,
    axis: int | None = None,
) -> Any:
    """Moves a value, or some of its rows, to where it rests.

    Args:
      y: The value, on the device.
      memory_kind: The memory kind in which it rests.
      of: The type of all of it, if rows have to keep its layout on a TPU.
      like: The sharding of the value that it replaces, if its type does not say it.
      axis: The axis of the rows; None for a whole value.
    """
    if memory_kind == "device":
        return y
    y = constrain(y, like, axis)
    if of is not None:
        y = _tpu_layout.constrain(y, of)
    return _memory.transfer(y, memory_kind)


def rows_of(x: jax.Array, first: Any, count: int, axis: int) -> jax.Array:
    """Some rows of a value, in its memory."""
    return lax.dynamic_slice_in_dim(x, first, count, axis, allow_negative_indices=False)


def with_rows(x: jax.Array, rows: jax.Array, first: Any, axis: int) -> jax.Array:
    """A value with other rows in their place, in its memory."""
    return lax.dynamic_update_slice_in_dim(
        x, rows, first, axis, allow_negative_indices=False
    )
