"""Carrying out the update of a row in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.core
from jax.extend import core as jex

from optax_offload import _memory, _tpu_layout
from optax_offload._backward.fused import Fused
from optax_offload._backward.parts import Place


def run(
    fused: Fused,
    i: Any,
    rows: Mapping[jex.Var, Any],
    whole: Callable[[jex.Var], Any],
    buffers: dict[jex.Var, Any],
) -> None:
    """Writes the results for a row into buffers, part after part.

    A part is read from what the one before was written into, and so loaded when that is
    stored. What each part takes all of is read before the first one.

    Args:
      fused: The update, whose rows have parts.
      i: The position of the row.
      rows: What there is of the row alone, as its gradient.
      whole: The value that other rows are taken of, now.
      buffers: What the results are written into.
    """
    parts = fused.parts
    assert parts is not None

    def loaded(place: Place, offset: int) -> Any:
        v = place.variable
        if v in rows:
            return place.cut(rows[v], None, offset, parts.size)
        part = place.cut(whole(v), i, offset, parts.size)
        if not _memory.on_host(part):
            return part
        return _tpu_layout.constrain(_memory.transfer(part, "device"), v.aval)

    all_of = {p.variable: loaded(p, 0) for p in parts.inputs if p.part is None}
    for offset in range(0, parts.equations.rows, parts.size):
        inputs = [
            loaded(p, offset) if p.part is not None else all_of[p.variable]
            for p in parts.inputs
        ]
        values = jax.core.eval_jaxpr(parts.jaxpr, (), *inputs)
        for place, value in zip(parts.outputs, values, strict=True):
            v = place.variable
            if v in fused.codes and _memory.on_host(v.aval):
                value = _tpu_layout.constrain(value, v.aval)
            value = _memory.transfer(value, _memory.kind_of_type(v.aval))
            buffers[v] = place.paste(buffers[v], value, i, offset)
