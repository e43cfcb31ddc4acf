"""Slices, tables and counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._program import shape
from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    Unary,
    only,
    resized,
    rule,
)


@rule("slice")
class Slice(Unary):
    """With all rows."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        strides = e.params["strides"] or (1,) * len(shape(e.invars[0]))
        taken = e.params["start_indices"][axis], e.params["limit_indices"][axis]
        return axis if taken == (0, rows.count) and strides[axis] == 1 else None

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        limits = e.params["limit_indices"]
        return {"limit_indices": resized(limits, only(axes.outs, e), size)}


@rule("dynamic_slice")
class DynamicSlice(Unary):
    """With all rows: of a slice as large as the axis the start is clamped to 0."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return axis if e.params["slice_sizes"][axis] == rows.count else None

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        sizes = e.params["slice_sizes"]
        return {"slice_sizes": resized(sizes, only(axes.outs, e), size)}


@rule("dynamic_update_slice")
class DynamicUpdateSlice(RowRule):
    """With all rows, as `DynamicSlice`; at a position that is the same for all."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis = only(ins[:2], e)
        if any(x is not None for x in ins[2:]) or (
            shape(e.invars[1])[axis] != rows.count
        ):
            raise NotRowLocalError(e.primitive.name)
        return Axes([axis, axis, *ins[2:]], [axis])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = only(outs, e)
        return self.forward(e, [axis, axis, *[None] * len(e.invars[2:])], rows).ins


@rule("iota")
class Iota(RowRule):
    """The same for all rows, unless it counts them."""

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        if e.params["dimension"] == only(outs, e):
            raise NotRowLocalError(e.primitive.name)
        return [None] * len(e.invars)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        return {"shape": resized(e.params["shape"], only(axes.outs, e), size)}


@rule("gather")
class Gather(RowRule):
    """Gathers from a table that is the same for all rows, or from each row by itself.

    Rows of the indices are axes of the results that are not in ``offset_dims``; rows
    of an operand that is taken from whole are among those that are.
    """

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        operand, indices = ins
        numbers = e.params["dimension_numbers"]
        if operand is not None and operand in numbers.operand_batching_dims:
            at = numbers.operand_batching_dims.index(operand)
            wanted = numbers.start_indices_batching_dims[at]
            if indices not in (None, wanted):
                raise NotRowLocalError(e.primitive.name)
            return Axes([operand, wanted], [self._of_indices(e, wanted)])
        if operand is None and indices is not None:
            if indices in numbers.start_indices_batching_dims:
                at = numbers.start_indices_batching_dims.index(indices)
                operand = numbers.operand_batching_dims[at]
            return Axes([operand, indices], [self._of_indices(e, indices)])
        whole = operand is not None and indices is None
        if not whole or e.params["slice_sizes"][operand] != rows.count:
            raise NotRowLocalError(e.primitive.name)
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        if operand in gone or operand in numbers.start_index_map:
            raise NotRowLocalError(e.primitive.name)
        kept: list[int | None] = [
            d for d in range(len(shape(e.invars[0]))) if d not in gone
        ]
        return Axes([*ins], [numbers.offset_dims[kept.index(operand)]])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = only(outs, e)
        operand, indices = (range(len(shape(a))) for a in e.invars)
        candidates: list[list[Axis]] = [[None, i] for i in indices[:-1]]
        candidates += [[i, None] for i in operand]
        for ins in candidates:
            if any(
                x is not None and shape(a)[x] != rows.count
                for a, x in zip(e.invars, ins, strict=True)
            ):
                continue
            try:
                found = self.forward(e, ins, rows)
            except NotRowLocalError:
                continue
            if found.outs == [axis]:
                return found.ins
        raise NotRowLocalError(e.primitive.name)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        operand, indices = axes.ins
        if operand is None or indices is not None:
            return {}
        return {"slice_sizes": resized(e.params["slice_sizes"], operand, size)}

    def _of_indices(self, e: jex.JaxprEqn, axis: int) -> int:
        """The axis of the result that is an axis of the indices; the last has none."""
        if axis == len(shape(e.invars[1])) - 1:
            raise NotRowLocalError(e.primitive.name)
        offsets = e.params["dimension_numbers"].offset_dims
        batch = [d for d in range(len(shape(e.outvars[0]))) if d not in offsets]
        return batch[axis]


# fmt: off
_SCATTERS = (
    "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
    "scatter-sub",
)
# fmt: on


@rule(*_SCATTERS)
class Scatter(RowRule):
    """Into all rows at the same places, or into each row at its own."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        for found in self._ways(e, rows):
            if all(x in (None, y) for x, y in zip(ins, found, strict=True)):
                return Axes(found, found[:1])
        raise NotRowLocalError(e.primitive.name)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return self.forward(e, [only(outs, e), None, None], rows).ins

    def _ways(self, e: jex.JaxprEqn, rows: Rows) -> Iterator[list[Axis]]:
        """The axes that rows can have: of the operand, the indices and the updates."""
        operand, _, updates = map(shape, e.invars)
        numbers = e.params["dimension_numbers"]
        windows = numbers.update_window_dims
        own = [d for d in range(len(updates)) if d not in windows]
        of_indices = numbers.scatter_indices_batching_dims
        for axis, at in zip(numbers.operand_batching_dims, of_indices, strict=True):
            yield [axis, at, own[at]]
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = (d for d in range(len(operand)) if d not in gone)
        for axis, window in zip(kept, windows, strict=True):
            everywhere = updates[window] == operand[axis] == rows.count
            if everywhere and axis not in numbers.scatter_dims_to_operand_dims:
                yield [axis, None, window]
