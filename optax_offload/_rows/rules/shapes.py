"""Equations on one array that change its shape, or go along some of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@rule("broadcast_in_dim")
class Broadcast(Unary):
    """The operand of a broadcast is shared by all rows that it gives."""

    arithmetic = True

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return e.params["broadcast_dimensions"][axis]

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = self.back(e, only(outs, e), rows)
        return [axis, *[None] * (len(e.invars) - 1)]

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        return {"shape": resized(e.params["shape"], only(axes.outs, e), size)}


@rule("reshape")
class Reshape(Unary):
    """The axes before the rows, and so those after them, keep their size in all."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        if e.params.get("dimensions") is not None:
            return None
        before = math.prod(shape(e.invars[0])[:axis])
        sizes = e.params["new_sizes"]
        places = (i for i, n in enumerate(sizes) if n == rows.count)
        return next((i for i in places if math.prod(sizes[:i]) == before), None)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        return {"new_sizes": resized(e.params["new_sizes"], only(axes.outs, e), size)}


@rule("transpose")
class Transpose(Unary):
    """Axes change places."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return e.params["permutation"].index(axis)


class Removes(Unary):
    """Some axes go, and those behind them move up."""

    parameter = ""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        removed = e.params[self.parameter]
        return None if axis in removed else axis - sum(d < axis for d in removed)


@rule("stack")
class Stack(RowRule):
    """Several arrays along a new axis, and those behind it move down."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis = only(ins, e)
        return Axes([axis] * len(e.invars), [axis + (axis >= e.params["axis"])])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis, new = only(outs, e), e.params["axis"]
        if axis == new:
            raise NotRowLocalError(e.primitive.name)
        return [axis - (axis > new)] * len(e.invars)


@rule("unstack")
class Unstack(Unary):
    """Makes an array for each index along an axis, which is removed."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        along = e.params["axis"]
        return None if axis == along else axis - (axis > along)


@rule("squeeze")
class Squeeze(Removes):
    """Axes of size one go."""

    parameter = "dimensions"


# fmt: off
_REDUCTIONS = (
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_prod", "reduce_sum", "reduce_xor",
)
# fmt: on


@rule(*_REDUCTIONS)
class Reduce(Removes):
    """Along other axes than that of the rows."""

    parameter = "axes"


class Along(Unary):
    """Each result at a row is of that row, unless the equation is along the rows."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        """The axes that the equation is along."""
        raise NotImplementedError

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return None if axis in self.along(e) else axis


@rule("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
class Cumulative(Along):
    """Sums and the like of what came before."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return (e.params["axis"],)


@rule("rev")
class Reverse(Along):
    """The order along some axes is reversed."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return e.params["dimensions"]


@rule("split")
class Split(Along):
    """Into several results along an axis."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return (e.params["axis"],)


@rule("top_k")
class TopK(Along):
    """The largest along an axis, the last in older versions of JAX."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return (e.params.get("axis", -1) % len(shape(e.invars[0])),)


@rule("approx_top_k")
class ApproxTopK(Along):
    """The largest along an axis, nearly."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return (e.params["reduction_dimension"],)


@rule("fft")
class Fourier(Along):
    """Along the last axes."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        axes = len(shape(e.invars[0]))
        return range(axes - len(e.params["fft_lengths"]), axes)


@rule("tile")
class Tile(Along):
    """Repeated, but not along the rows."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        return [i for i, n in enumerate(e.params["reps"]) if n != 1]


@rule("pad")
class Pad(Along):
    """Before, after or between, but not along the rows; with one value for all."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        configuration = e.params["padding_config"]
        return [i for i, x in enumerate(configuration) if tuple(x) != (0, 0, 0)]


@rule("bitcast_convert_type")
class Bitcast(Along):
    """Narrower numbers have one more axis at the end, wider ones lose it."""

    def along(self, e: jex.JaxprEqn) -> Sequence[int]:
        before, after = len(shape(e.invars[0])), len(shape(e.outvars[0]))
        return () if before <= after else (before - 1,)
