"""Which equations treat each row alone, and what they are for some of the rows.

A row is an index along one axis, such as the layer axis of a stacked leaf. A value has
rows along an axis, or it is the same for all of them. That is carried from equation to
equation as `jax.vmap` carries its batch axes; what mixes rows is not row-local.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._compat import _scan_counts
from optax_offload._jaxpr import signature

Atom = Any  # jex.Var or jex.Literal

# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier",
    "or", "population_count", "pow", "real", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "xor",
))
_REDUCTIONS = frozenset((
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_prod", "reduce_sum", "reduce_xor",
))
_CUMULATIVE = frozenset((
    "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev",
))
# fmt: on


class NotRowLocalError(Exception):
    """An equation mixes rows, or is not known not to. The message names it."""


@dataclasses.dataclass(frozen=True)
class RowLocal:
    """Equations that can be evaluated for some of the rows.

    Attributes:
      equations: in their order.
      rows: the number of rows in all.
      axes: the variables that have rows, and along which axis.
      inputs: the variables that the equations take and do not define.
      outputs: what they are evaluated for, each with rows.
    """

    equations: tuple[jex.JaxprEqn, ...]
    rows: int
    axes: Mapping[jex.Var, int]
    inputs: tuple[jex.Var, ...]
    outputs: tuple[jex.Var, ...]

    def jaxpr(self, rows: int, debug_info: Any) -> jex.Jaxpr:
        """The equations for a slice of so many rows.

        It takes slices of the inputs that have rows, along their axis, and the others
        whole, and gives slices of the outputs.
        """
        return _resized(
            self.equations, self.inputs, self.outputs, self.axes, rows, debug_info
        )

    def split(
        self,
        early: Collection[jex.Var],
        outputs: Sequence[jex.Var],
        last: Sequence[jex.Var],
    ) -> tuple[RowLocal, RowLocal]:
        """What some of the outputs need, and what the last ones need besides.

        The first has as further outputs what depends on the early inputs and is an
        input of the other. What does not depend on them is computed by both.
        """
        first, inputs = self._needed(outputs, ())
        depends = set(early)
        for e in first:
            if not depends.isdisjoint(a for a in e.invars if isinstance(a, jex.Var)):
                depends.update(e.outvars)
        depends &= {*inputs, *(v for e in first for v in e.outvars)}
        rest, needed = self._needed(last, depends)
        handed = tuple(v for v in needed if v in depends)
        return (
            dataclasses.replace(
                self, equations=first, inputs=inputs, outputs=(*outputs, *handed)
            ),
            dataclasses.replace(self, equations=rest, inputs=needed, outputs=(*last,)),
        )

    def _needed(
        self, outputs: Sequence[jex.Var], known: Collection[jex.Var]
    ) -> tuple[tuple[jex.JaxprEqn, ...], tuple[jex.Var, ...]]:
        """The equations that outputs need, and the variables that these take."""
        needed = set(outputs)
        equations = []
        for e in reversed(self.equations):
            if any(v in needed and v not in known for v in e.outvars):
                equations.append(e)
                needed.update(a for a in e.invars if isinstance(a, jex.Var))
        defined = {v for e in equations for v in e.outvars}
        candidates = (*self.inputs, *(v for e in self.equations for v in e.outvars))
        inputs = (v for v in candidates if v in needed)
        return (
            tuple(equations[::-1]),
            tuple(v for v in inputs if v in known or v not in defined),
        )

    def signature(self) -> Hashable:
        """Equal for equations that only the names of their variables tell apart."""
        axes = tuple(self.axes.get(v) for v in (*self.inputs, *self.outputs))
        return axes, signature(self.equations, self.inputs, self.outputs)


def analyze(
    equations: Sequence[tuple[int, jex.JaxprEqn]],
    producers: Mapping[jex.Var, tuple[int, jex.JaxprEqn]],
    loads: Mapping[jex.Var, int],
    outputs: Sequence[Atom],
    whole: Collection[jex.Var],
    others: Mapping[jex.Var, jex.Var],
) -> RowLocal:
    """Proves that equations are row-local, or raises `NotRowLocalError`.

    What the equations take besides the loads is followed back through arithmetic, so
    that it is computed for the slice too rather than whole beforehand; up to arguments
    and to what has to be computed whole anyway.

    Args:
      equations: those that depend on a load, with their positions, in order.
      producers: the equation that defines each variable, with its position.
      loads: the axis along which the rows of each load are counted.
      outputs: what is computed from the loads.
      whole: variables that are computed whole anyway.
      others: of inputs, a variable that replaces it: where rows of the input are taken
        and arithmetic leads to the variable, it becomes an output too.
    """
    counts = {_shape(v)[axis] for v, axis in loads.items()}
    if len(counts) != 1:
        sizes = ", ".join(str(_shape(v)) for v in loads)
        raise NotRowLocalError(f"leaves with different numbers of rows: {sizes}")
    (rows,) = counts
    analysis = _Analysis(rows, producers, whole)
    for v, axis in loads.items():
        analysis.mark(v, axis)
    for position, e in equations:
        analysis.visit(e)
        analysis.positions[position] = e
    for a in outputs:
        if isinstance(a, jex.Literal) or a not in analysis.axes:
            raise NotRowLocalError("an output that is the same for every row")
    outputs = list(outputs)
    for before in [v for v in analysis.axes if v in others]:
        more = analysis.with_result(others[before], before)
        if more is not None:
            analysis = more
            outputs.append(others[before])
    ordered = tuple(analysis.positions[i] for i in sorted(analysis.positions))
    defined = {v for e in ordered for v in e.outvars}
    used = (a for e in ordered for a in e.invars if isinstance(a, jex.Var))
    free = dict.fromkeys(v for v in (*loads, *used, *outputs) if v not in defined)
    return RowLocal(ordered, rows, analysis.axes, tuple(free), tuple(outputs))


class _Analysis:
    """Carries row axes through equations: forward, and back where they are needed."""

    def __init__(
        self,
        rows: int,
        producers: Mapping[jex.Var, tuple[int, jex.JaxprEqn]],
        whole: Collection[jex.Var] = (),
        follow_all: bool = False,
    ):
        self.rows = rows
        self.axes: dict[jex.Var, int] = {}
        self.positions: dict[int, jex.JaxprEqn] = {}
        self._producers = producers
        self._whole = whole
        self._follow_all = follow_all

    def mark(self, v: jex.Var, axis: int) -> None:
        aval: Any = v.aval
        if self.axes.setdefault(v, axis) != axis:
            raise NotRowLocalError("a value with rows along two axes")
        if axis >= len(aval.shape) or aval.shape[axis] != self.rows:
            raise NotRowLocalError(f"a value of shape {aval.shape}")
        if aval.sharding.spec[axis] is not None:
            raise NotRowLocalError(f"a value that is sharded along axis {axis}")

    def demand(self, a: Atom, axis: int) -> None:
        """Has a value that was taken for whole counted in rows."""
        wanted = [(a, axis)]
        while wanted:
            a, axis = wanted.pop()
            if isinstance(a, jex.Literal):
                raise NotRowLocalError("a constant array")
            known = a in self.axes
            self.mark(a, axis)
            if known or a in self._whole or a not in self._producers:
                continue
            position, e = self._producers[a]
            name = e.primitive.name
            if name in ELEMENTWISE and len(e.outvars) == 1:
                operands = [(x, axis) for x in e.invars if _shape(x)]
            elif name == "broadcast_in_dim" and len(e.invars) == 1:
                operands = _before_broadcast(e, axis, self.rows)
            elif self._follow_all:
                raise NotRowLocalError(name)
            else:
                continue
            self.positions[position] = e
            wanted.extend(operands)

    def with_result(self, v: jex.Var, like: jex.Var) -> _Analysis | None:
        """With another result, which has its rows where an input has; if it can be."""
        if v not in self._producers:
            return None
        position, e = self._producers[v]
        if e.primitive.name not in ELEMENTWISE or len(e.outvars) > 1:
            return None
        more = copy.copy(self)
        more.axes, more.positions = dict(self.axes), dict(self.positions)
        try:
            more.mark(v, self.axes[like])
            for a in e.invars:
                if _shape(a):
                    more.demand(a, self.axes[like])
        except NotRowLocalError:
            return None
        more.positions[position] = e
        return more

    def visit(self, e: jex.JaxprEqn) -> None:
        """Finds the rows of an equation's results from those of its operands."""
        operands = [_axis_of(a, self.axes) for a in e.invars]
        if all(axis is None for axis in operands):
            return
        for v, axis in zip(e.outvars, self._rule(e, operands), strict=True):
            if axis is not None:
                self.mark(v, axis)

    def _rule(
        self, e: jex.JaxprEqn, operands: Sequence[int | None]
    ) -> Sequence[int | None]:
        name = e.primitive.name
        if name == "optimization_barrier":
            return operands
        if name in ELEMENTWISE or name == "concatenate":
            axis = self._common_axis(e, operands)
            if e.params.get("dimension") == axis:
                raise NotRowLocalError(name)
            return [axis] * len(e.outvars)
        if name == "dot_general":
            return [self._dot_general(e, operands)]
        if name in _Bodies.HANDLED:
            bodies = _Bodies(e, self.rows, operands)
            for a, known, axis in zip(e.invars, operands, bodies.ins, strict=True):
                if known is None and axis is not None:
                    self.demand(a, axis)
            return bodies.outs
        axis, *rest = operands
        if axis is None or any(x is not None for x in rest):
            raise NotRowLocalError(name)
        return [_unary(e, axis, self.rows)] * len(e.outvars)

    def _common_axis(self, e: jex.JaxprEqn, operands: Sequence[int | None]) -> int:
        axes = {x for x in operands if x is not None}
        if len(axes) != 1:
            raise NotRowLocalError(e.primitive.name)
        (axis,) = axes
        for a, known in zip(e.invars, operands, strict=True):
            if known is None and _shape(a):
                self.demand(a, axis)
        return axis

    def _dot_general(self, e: jex.JaxprEqn, operands: Sequence[int | None]) -> int:
        """Rows have to be a batch axis of both operands."""
        _, batch = e.params["dimension_numbers"]
        side = 0 if operands[0] is not None else 1
        if operands[side] not in batch[side]:
            raise NotRowLocalError("dot_general")
        at = batch[side].index(operands[side])
        other = batch[1 - side][at]
        if operands[1 - side] is None:
            self.demand(e.invars[1 - side], other)
        elif operands[1 - side] != other:
            raise NotRowLocalError("dot_general")
        return at


def _shape(a: Atom) -> tuple[int, ...]:
    return a.aval.shape


def _axis_of(a: Atom, axes: Mapping[jex.Var, int]) -> int | None:
    return None if isinstance(a, jex.Literal) else axes.get(a)


def _before_broadcast(e: jex.JaxprEqn, axis: int, rows: int) -> list[tuple[Atom, int]]:
    """The operand of a broadcast, if it has rows where its result has."""
    (operand,) = e.invars
    dimensions = e.params["broadcast_dimensions"]
    if axis not in dimensions:
        return []
    at = dimensions.index(axis)
    return [(operand, at)] if _shape(operand)[at] == rows else []


def _unary(e: jex.JaxprEqn, axis: int, rows: int) -> int:
    """The axis of the rows of the results of an equation on one array."""
    name, params, shape = e.primitive.name, e.params, _shape(e.invars[0])
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]
    if name == "reshape" and params.get("dimensions") is None:
        before = math.prod(shape[:axis])
        for to, size in enumerate(params["new_sizes"]):
            if size == rows and math.prod(params["new_sizes"][:to]) == before:
                return to
    elif name == "transpose":
        return params["permutation"].index(axis)
    elif name == "squeeze" and axis not in params["dimensions"]:
        return axis - sum(d < axis for d in params["dimensions"])
    elif name in _REDUCTIONS and axis not in params["axes"]:
        return axis - sum(d < axis for d in params["axes"])
    elif name in _CUMULATIVE:
        if axis not in params.get("dimensions", (params.get("axis"),)):
            return axis
    elif name == "sort" and params["dimension"] != axis:
        return axis
    elif name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        taken = params["start_indices"][axis], params["limit_indices"][axis]
        if taken == (0, rows) and strides[axis] == 1:
            return axis
    raise NotRowLocalError(name)


class _Bodies:
    """The row axes of the operands and results of an equation that has bodies.

    A carry has the axis of what goes in or of what comes out, whichever has one.
    """

    HANDLED = ("scan", "while", "cond", "jit", "pjit")

    def __init__(self, e: jex.JaxprEqn, rows: int, operands: Sequence[int | None]):
        self.ins: list[int | None] = list(operands)
        self.outs: list[int | None] = [None] * len(e.outvars)
        self._rows = rows
        step = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "jit": self._jit,
            "pjit": self._jit,
        }[e.primitive.name]
        before = None
        while before != (self.ins, self.outs):
            before = list(self.ins), list(self.outs)
            step(e.params)

    def _jit(self, params: Mapping[str, Any]) -> None:
        self.ins, self.outs = self._body(params["jaxpr"], self.ins, self.outs)

    def _cond(self, params: Mapping[str, Any]) -> None:
        if self.ins[0] is not None:
            raise NotRowLocalError("cond")
        for branch in params["branches"]:
            ins, self.outs = self._body(branch, self.ins[1:], self.outs)
            self.ins = [None, *ins]

    def _while(self, params: Mapping[str, Any]) -> None:
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        consts = of_cond + of_body
        carry = _join(self.ins[consts:], self.outs)
        ins, outs = self._body(
            params["body_jaxpr"], [*self.ins[of_cond:consts], *carry], carry
        )
        carry = _join(ins[of_body:], outs)
        cond, (goes_on,) = self._body(
            params["cond_jaxpr"], [*self.ins[:of_cond], *carry], [None]
        )
        if goes_on is not None:
            raise NotRowLocalError("while")
        carry = _join(carry, cond[of_cond:])
        self.ins = [*cond[:of_cond], *ins[:of_body], *carry]
        self.outs = carry

    def _scan(self, params: Mapping[str, Any]) -> None:
        consts, count = _scan_counts(params)
        carried = consts + count
        carry = _join(self.ins[consts:carried], self.outs[:count])
        # What is scanned over has its own axis in front, which rows must not be.
        xs = [_shifted(x, -1) for x in self.ins[carried:]]
        ys = [_shifted(y, -1) for y in self.outs[count:]]
        ins, outs = self._body(
            params["jaxpr"], [*self.ins[:consts], *carry, *xs], [*carry, *ys]
        )
        carry = _join(ins[consts:carried], outs[:count])
        xs = [_shifted(x, 1) for x in ins[carried:]]
        self.ins = [*ins[:consts], *carry, *xs]
        self.outs = [*carry, *(_shifted(y, 1) for y in outs[count:])]

    def _body(
        self,
        closed: jex.ClosedJaxpr,
        ins: Sequence[int | None],
        outs: Sequence[int | None],
    ) -> tuple[list[int | None], list[int | None]]:
        axes = _body_axes(closed.jaxpr, ins, outs, self._rows)
        return (
            [_axis_of(v, axes) for v in closed.jaxpr.invars],
            [_axis_of(a, axes) for a in closed.jaxpr.outvars],
        )


def _join(a: Sequence[int | None], b: Sequence[int | None]) -> list[int | None]:
    return [y if x is None else x for x, y in zip(a, b, strict=True)]


def _shifted(axis: int | None, by: int) -> int | None:
    if axis is None:
        return None
    if axis + by < 0:
        raise NotRowLocalError("scan")
    return axis + by


def _body_axes(
    jaxpr: jex.Jaxpr,
    ins: Sequence[int | None],
    outs: Sequence[int | None],
    rows: int,
) -> dict[jex.Var, int]:
    """The variables of a body that have rows, given what is known from outside."""
    producers = {v: (i, e) for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    known = {v: x for v, x in zip(jaxpr.invars, ins, strict=True) if x is not None}
    while True:
        analysis = _Analysis(rows, producers, follow_all=True)
        for v, axis in known.items():
            analysis.mark(v, axis)
        for e in jaxpr.eqns:
            analysis.visit(e)
        for a, axis in zip(jaxpr.outvars, outs, strict=True):
            if axis is not None:
                analysis.demand(a, axis)
        if len(analysis.axes) == len(known):
            return analysis.axes
        # What was found on the way back may have been passed by on the way there.
        known = analysis.axes


def _resized(
    equations: Sequence[jex.JaxprEqn],
    inputs: Sequence[jex.Var],
    outputs: Sequence[Atom],
    axes: Mapping[jex.Var, int],
    rows: int,
    debug_info: Any,
) -> jex.Jaxpr:
    renamed: dict[jex.Var, jex.Var] = {}

    def small(a: Atom) -> Atom:
        if isinstance(a, jex.Literal) or a not in axes:
            return a
        if a not in renamed:
            renamed[a] = jex.Var(a.aval.update(shape=_sized(_shape(a), axes[a], rows)))
        return renamed[a]

    resized = [
        e.replace(
            invars=[small(a) for a in e.invars],
            outvars=[small(v) for v in e.outvars],
            params=e.params | _resized_params(e, axes, rows),
        )
        for e in equations
    ]
    return jex.Jaxpr(
        constvars=(),
        invars=[small(v) for v in inputs],
        outvars=[small(a) for a in outputs],
        eqns=resized,
        debug_info=debug_info,
    )


def _sized(sizes: Sequence[int], axis: int, rows: int) -> tuple[int, ...]:
    return (*sizes[:axis], rows, *sizes[axis + 1 :])


def _resized_params(
    e: jex.JaxprEqn, axes: Mapping[jex.Var, int], rows: int
) -> dict[str, Any]:
    """Those parameters of an equation that say how many rows there are."""
    ins = [_axis_of(a, axes) for a in e.invars]
    outs = [axes.get(v) for v in e.outvars]
    if all(axis is None for axis in (*ins, *outs)):
        return {}
    name, params = e.primitive.name, e.params
    sizes = {
        "broadcast_in_dim": "shape",
        "reshape": "new_sizes",
        "slice": "limit_indices",
    }
    if name in sizes and outs[0] is not None:
        return {sizes[name]: _sized(params[sizes[name]], outs[0], rows)}

    def body(closed: jex.ClosedJaxpr, ins: Any, outs: Any) -> jex.ClosedJaxpr:
        jaxpr = closed.jaxpr
        inner = _body_axes(jaxpr, ins, outs, known_rows)
        small = _resized(
            jaxpr.eqns, jaxpr.invars, jaxpr.outvars, inner, rows, jaxpr.debug_info
        )
        return jex.ClosedJaxpr(small.replace(constvars=jaxpr.constvars), closed.consts)

    known_rows = next(
        _shape(a)[axes[a]]
        for a in (*e.invars, *e.outvars)
        if not isinstance(a, jex.Literal) and a in axes
    )
    if name in ("jit", "pjit"):
        return {"jaxpr": body(params["jaxpr"], ins, outs)}
    if name == "cond":
        branches = params["branches"]
        return {"branches": tuple(body(b, ins[1:], outs) for b in branches)}
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        for_cond = [*ins[:of_cond], *ins[of_cond + of_body :]]
        return {
            "cond_jaxpr": body(params["cond_jaxpr"], for_cond, [None]),
            "body_jaxpr": body(params["body_jaxpr"], ins[of_cond:], outs),
        }
    if name == "scan":
        consts, count = _scan_counts(params)
        carried = consts + count
        xs = [_shifted(axis, -1) for axis in ins[carried:]]
        ys = [_shifted(axis, -1) for axis in outs[count:]]
        jaxpr = body(params["jaxpr"], [*ins[:carried], *xs], [*outs[:count], *ys])
        return {"jaxpr": jaxpr}
    return {}
