"""Operands and results that have their rows along the same axis."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from optax_offload._update.slicing_rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    Rows,
    Rule,
    arrays,
    only,
    rule,
)

# fmt: off
_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy",
    "cos", "cosh", "device_put", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "population_count", "pow", "real", "reduce_precision",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "threefry2x32", "xor",
)
# fmt: on


@rule(*_ELEMENTWISE)
class Elementwise(Rule):
    """Operands and results have one shape, scalars aside."""

    arithmetic = True

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis = only(ins, e)
        return Axes(arrays(e, axis), [axis] * len(e.outvars))

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return arrays(e, only(outs, e))


@rule("optimization_barrier")
class Barrier(Rule):
    """Each result is an operand."""

    arithmetic = True

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        return Axes([*ins], [*ins])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return [*outs]


@rule("concatenate", "sort")
class AlongDimension(Elementwise):
    """Of one array or of several, along another axis than that of the rows."""

    arithmetic = False

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        if e.params["dimension"] == only(ins, e):
            raise NotRowLocalError(e.primitive.name)
        return super().forward(e, ins, rows)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        if e.params["dimension"] == only(outs, e):
            raise NotRowLocalError(e.primitive.name)
        return super().backward(e, outs, rows)
