"""Carrying out the update of a row in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex

from optax_offload._emit.moves import Rest, rows_of, with_rows
from optax_offload._places import memory
from optax_offload._schedule import Fused, Parted


def run(
    fused: Fused,
    i: Any,
    rows: Mapping[jex.Var, Any],
    whole: Callable[[jex.Var], Any],
    buffers: dict[jex.Var, Any],
) -> None:
    """Writes the results for a row into buffers, part after part.

    A part is read from the buffer that the one before was written into, and so loaded
    when that is stored. Values that each part takes whole are read before the first
    part.

    Args:
      fused: The update, whose rows have parts.
      i: The position of the row.
      rows: The values of the row alone, such as its gradient.
      whole: Returns the value that other rows are taken from, as it is now.
      buffers: The buffers that the results are written into.
    """
    parts = fused.parts
    assert parts is not None

    def loaded(place: Parted, offset: int) -> Any:
        v = place.variable
        if v in rows:
            return _cut(place, rows[v], None, offset, parts.size)
        return Rest(layout=v.aval).loaded(_cut(place, whole(v), i, offset, parts.size))

    all_of = {p.variable: loaded(p, 0) for p in parts.inputs if p.part is None}
    for offset in range(0, parts.equations.rows, parts.size):
        inputs = [
            loaded(p, offset) if p.part is not None else all_of[p.variable]
            for p in parts.inputs
        ]
        values = jax.core.eval_jaxpr(parts.jaxpr, (), *inputs)
        for place, value in zip(parts.outputs, values, strict=True):
            v = place.variable
            layout = v.aval if v in fused.codes else None
            rest = Rest(memory.kind_of_type(v.aval), layout=layout)
            buffers[v] = _with_part(place, buffers[v], rest.stored(value), i, offset)


def _cut(place: Parted, x: Any, row: Any, offset: int, size: int) -> Any:
    """The part of a row; of a row alone where it is None."""
    if row is None or place.rows is None:
        if place.part is None:
            return x
        return lax.slice_in_dim(x, offset, offset + size, axis=place.part)
    if place.part is None:
        return rows_of(x, row, 1, place.rows)
    rows, at = _as_rows(place, x, row, offset, size)
    return rows_of(rows, at, 1, place.rows)


def _with_part(place: Parted, x: Any, part: Any, row: Any, offset: int) -> Any:
    """A value with the part of a row in its place."""
    assert place.rows is not None
    assert place.part is not None
    rows, at = _as_rows(place, x, row, offset, part.shape[place.part])
    shape = (*rows.shape[: place.rows], 1, *rows.shape[place.rows + 1 :])
    rows = with_rows(rows, _reshaped(part, shape, rows), at, place.rows)
    return _reshaped(rows, x.shape, x)


def _as_rows(
    place: Parted, x: Any, row: Any, offset: int, size: int
) -> tuple[Any, Any]:
    """A value with its parts as rows, and the position of one: along one axis.

    A TPU's compiler takes a slice of host memory along one axis only.
    """
    assert place.rows is not None
    assert place.part is not None
    count = x.shape[place.part] // size
    shape = (
        *x.shape[: place.rows],
        x.shape[place.rows] * count,
        size,
        *x.shape[place.part + 1 :],
    )
    return _reshaped(x, shape, x), row * count + offset // size


def _reshaped(x: Any, shape: Sequence[int], like: Any) -> Any:
    """A value in another shape, its axes sharded as those of another value are."""
    sharding = jax.typeof(like).sharding
    if not any(sharding.spec):
        return lax.reshape(x, shape)
    return lax.reshape(x, shape, out_sharding=sharding)
