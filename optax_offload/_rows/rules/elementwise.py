"""Operands and results that have their rows along the same axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core as jex
from jax.sharding import NamedSharding, Sharding

from optax_offload._program import shape
from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    arrays,
    only,
    rule,
)

# fmt: off
_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex",
    "conj", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq",
    "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le",
    "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min",
    "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "polygamma", "polynomial", "population_count", "pow", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stage", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor",
    "zeta",
)
# fmt: on


@rule(*_ELEMENTWISE)
class Elementwise(RowRule):
    """Operands and results have one shape, scalars aside."""

    arithmetic = True

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis = only(ins, e)
        return Axes(arrays(e, axis), [axis] * len(e.outvars))

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return arrays(e, only(outs, e))


@rule("device_put", "reshard", "sharding_constraint")
class Placement(Elementwise):
    """A value's place applies to each row, unless the rows are spread over devices."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        _check_keeps_rows_together(e, only(ins, e))
        return super().forward(e, ins, rows)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        _check_keeps_rows_together(e, only(outs, e))
        return super().backward(e, outs, rows)


def _check_keeps_rows_together(e: jex.JaxprEqn, axis: int) -> None:
    """Raises if an equation has its operands sharded along an axis."""
    named = ("devices", "dst_sharding", "sharding")
    for to in jax.tree.leaves([e.params.get(name) for name in named]):
        if isinstance(to, NamedSharding):
            spec = (*to.spec, *[None] * len(shape(e.invars[0])))
            along = spec[axis]
            names = along if isinstance(along, tuple) else (along,)
            together = all(to.mesh.shape.get(name, 1) == 1 for name in names)
        else:
            together = not isinstance(to, Sharding) or to.is_fully_replicated
        if not together:
            raise NotRowLocalError(f"{e.primitive.name} along the axis of the rows")


@rule("optimization_barrier")
class Barrier(RowRule):
    """Each result is an operand."""

    arithmetic = True

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        return Axes([*ins], [*ins])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return [*outs]


@rule("concatenate", "sort")
class AlongDimension(Elementwise):
    """Arrays are joined or sorted along another axis than that of the rows."""

    arithmetic = False

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        if e.params["dimension"] == only(ins, e):
            raise NotRowLocalError(e.primitive.name)
        return super().forward(e, ins, rows)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        if e.params["dimension"] == only(outs, e):
            raise NotRowLocalError(e.primitive.name)
        return super().backward(e, outs, rows)
