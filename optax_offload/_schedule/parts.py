"""Rows that are more than the window: updated in parts, along another axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory, tpu_layout
from optax_offload._program import Program, bound, is_unknown, shape
from optax_offload._rows import NotRowLocalError, RowLocal, analyze, kernel_of


class Parted(NamedTuple):
    """A value of the step that parts are taken of, or written into.

    Attributes:
      variable: The variable of the step.
      rows: The axis along which it has the rows of a scan; None if it has none.
      part: The axis along which a row has parts; None if each part takes all of it.
    """

    variable: jex.Var
    rows: int | None
    part: int | None


@dataclasses.dataclass(frozen=True)
class Parts:
    """A row's update, in parts.

    Attributes:
      equations: The equations for a row, which treat each index along the axes of the
        parts alone.
      size: The size of a part along these axes.
      inputs: The operands of the equations.
      outputs: The results of the equations.
      debug_info: The names that JAX keeps of the step for its messages.
    """

    equations: RowLocal
    size: int
    inputs: tuple[Parted, ...]
    outputs: tuple[Parted, ...]
    debug_info: Any

    @functools.cached_property
    def jaxpr(self) -> jex.Jaxpr:
        """The equations for a part."""
        return self.equations.jaxpr(self.size, self.debug_info)

    @property
    def count(self) -> int:
        """Returns how many there are."""
        return self.equations.rows // self.size


def parts(rows: RowLocal, least: float, debug_info: Any) -> Parts:
    """Divides the update of a row into parts.

    Args:
      rows: The equations for rows.
      least: Into as many, or as many as there can be: none is less than a tile.
      debug_info: The names that JAX keeps of the step for its messages.

    Raises:
      NotRowLocalError: Every axis is mixed by some equation, or may be sharded.
    """
    k = kernel_of(rows)
    one = k.rows.jaxpr(1, debug_info)
    # Nothing is computed for the whole row beside: so it has no results of its own.
    program = Program(list(one.eqns), {}, list(one.invars), [], debug_info)
    sources = bound(one.invars, k.sources)
    loaded = [
        v
        for v, source in sources.items()
        if memory.on_host(source.aval) and source in rows.axes
    ]
    if any(is_unknown(v.aval) for v in loaded):
        raise NotRowLocalError("no type says along which axes it is not sharded")
    taken = bound(one.invars, k.rows.inputs)
    of_rows = {v: k.rows.axes.get(row) for v, row in taken.items()}
    # A part is at one position along both axes (`_emit/part_by_part.py`).
    behind = {v: axis + 1 for v, axis in of_rows.items() if axis is not None}
    why = NotRowLocalError("it has no other axis")
    for axis in range(max((len(shape(v)) for v in loaded), default=0)):
        if any(axis != behind[v] or axis >= len(shape(v)) for v in loaded):
            continue
        positions = range(len(program.equations))
        along = dict.fromkeys(loaded, axis)
        try:
            found = analyze(program, positions, along, one.outvars, {})
            size = _size(found, loaded, least)
        except NotRowLocalError as e:
            why = e
            continue
        axes = found.axes
        outputs = zip(k.targets, k.rows.outputs, found.outputs, strict=True)
        return Parts(
            found,
            size,
            tuple(Parted(sources[v], of_rows[v], axes.get(v)) for v in found.inputs),
            tuple(Parted(v, k.rows.axes[a], axes[b]) for v, a, b in outputs),
            debug_info,
        )
    raise why


def _size(found: RowLocal, loaded: Collection[jex.Var], least: float) -> int:
    """The size of a part along its axis: at least so many parts, if that can be."""
    unit = max(tpu_layout.unit(v.aval, found.axes[v]) for v in loaded)
    sizes = [n for n in range(unit, found.rows, unit) if found.rows % n == 0]
    if not sizes:
        raise NotRowLocalError(f"{found.rows} along an axis, in units of {unit}")
    return max((n for n in sizes if n * least <= found.rows), default=sizes[0])
