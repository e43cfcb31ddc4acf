"""Reductions by a function, and those of windows."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    only,
    rule,
)


class _Windows(RowRule):
    """Operands and results of as many axes, of which some are gone along."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        return self._axes(e, only(ins, e))

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return self._axes(e, only(outs, e)).ins

    def _axes(self, e: jex.JaxprEqn, axis: int) -> Axes:
        """A window of size one moves by one, if there is no padding and no dilation."""
        params = e.params
        names = "window_dimensions", "window_strides", "base_dilation"
        of_row = [params[name][axis] for name in names if name in params]
        if {*of_row} != {1} or tuple(params["padding"][axis]) != (0, 0):
            raise NotRowLocalError(e.primitive.name)
        return Axes(self.operands(e, axis), [axis] * len(e.outvars))

    def operands(self, e: jex.JaxprEqn, axis: int) -> list[Axis]:
        """The axes of the operands, from that of the rows."""
        return [axis] * len(e.invars)


# fmt: off
_OF_ARRAYS = (
    "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    "select_and_gather_add", "select_and_scatter_add",
)
# fmt: on


@rule(*_OF_ARRAYS)
class Windows(_Windows):
    """Of windows that are not along the rows."""


@rule("reduce_window")
class ReduceWindow(_Windows):
    """By a function, each with a value to begin with that is the same for all rows."""

    def operands(self, e: jex.JaxprEqn, axis: int) -> list[Axis]:
        return [axis] * len(e.outvars) + [None] * len(e.outvars)


@rule("reduce")
class ReduceByFunction(RowRule):
    """Along other axes, each with a value to begin with that is the same for all."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        count = len(e.outvars)
        axis = only(ins[:count], e)
        gone = e.params["dimensions"]
        if axis in gone or any(x is not None for x in ins[count:]):
            raise NotRowLocalError(e.primitive.name)
        to = axis - sum(d < axis for d in gone)
        return Axes([axis] * count + [None] * count, [to] * count)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = only(outs, e)
        for d in sorted(e.params["dimensions"]):
            axis += d <= axis
        return [axis] * len(outs) + [None] * len(outs)
