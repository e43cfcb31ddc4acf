"""Finds the equations that treat each row alone, and rewrites them for some rows.

A row is an index along one axis, such as the layer axis of a stacked leaf. A value has
rows along an axis, or it is the same for all of them. That is carried from equation to
equation as `jax.vmap` carries its batch axes. An equation that mixes rows is not
row-local.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._program import Atom, Builder, needed, shape, signature, variables
from optax_offload._rows.rules.registry import (
    Axes,
    NotRowLocalError,
    is_arithmetic,
    rule_of,
)


@dataclasses.dataclass(frozen=True)
class RowLocal:
    """Equations that can be evaluated for some of the rows.

    Attributes:
      equations: The equations, in their order.
      rows: The number of rows in all.
      axes: The variables that have rows, and along which axis.
      inputs: The variables that the equations take and do not define.
      outputs: The variables that they are evaluated for, each with rows.
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
        whole = jex.Jaxpr(
            constvars=(),
            invars=self.inputs,
            outvars=self.outputs,
            eqns=self.equations,
            debug_info=debug_info,
        )
        return RowCount(self.rows).resized_jaxpr(whole, self.axes, rows)

    def split(
        self,
        early: Collection[jex.Var],
        outputs: Sequence[jex.Var],
        last: Sequence[jex.Var],
    ) -> tuple[RowLocal, RowLocal]:
        """Splits the equations: for some of the outputs, and for the last ones besides.

        The first has as further outputs the values that depend on the early inputs
        and are inputs of the other. Values that do not depend on them are computed by
        both.
        """
        first, inputs = self.needed(outputs, ())
        depends = set(early)
        for e in first:
            if not depends.isdisjoint(variables(e.invars)):
                depends.update(e.outvars)
        depends &= {*inputs, *(v for e in first for v in e.outvars)}
        rest, needed = self.needed(last, depends)
        handed = tuple(v for v in needed if v in depends)
        return (
            dataclasses.replace(
                self, equations=first, inputs=inputs, outputs=(*outputs, *handed)
            ),
            dataclasses.replace(self, equations=rest, inputs=needed, outputs=(*last,)),
        )

    def needed(
        self, outputs: Sequence[jex.Var], known: Collection[jex.Var]
    ) -> tuple[tuple[jex.JaxprEqn, ...], tuple[jex.Var, ...]]:
        """The equations that outputs need, and the variables that these take."""
        positions = needed(self.equations, outputs, known)
        equations = tuple(self.equations[i] for i in positions)
        taken = {*outputs, *(v for e in equations for v in variables(e.invars))}
        taken -= {v for e in equations for v in e.outvars}.difference(known)
        candidates = (*self.inputs, *(v for e in self.equations for v in e.outvars))
        return equations, tuple(v for v in candidates if v in taken)

    def restricted(self, outputs: Sequence[jex.Var]) -> RowLocal:
        """Returns the equations and operands of these variables, which have rows."""
        equations, inputs = self.needed(outputs, ())
        return dataclasses.replace(
            self, equations=equations, inputs=inputs, outputs=tuple(outputs)
        )

    def signature(self) -> Hashable:
        """Equal for equations that only the names of their variables tell apart."""
        axes = tuple(self.axes.get(v) for v in (*self.inputs, *self.outputs))
        return axes, signature(self.equations, self.inputs, self.outputs)


class Analysis:
    """Carries batch axes through equations: forward, and back where they are needed.

    Attributes:
      axes: The batch axis of each variable that has one.
      positions: The equations that are evaluated for slices.
      whole: Variables that are not followed back, since they are computed anyway.
      follow_all: Whether all equations are followed back, and not arithmetic alone.
      follow: Whether another equation is followed back where that can be done.
    """

    def __init__(
        self,
        rows: RowCount,
        equations: Sequence[jex.JaxprEqn],
        producers: Mapping[jex.Var, int],
    ):
        self.axes: dict[jex.Var, int] = {}
        self.positions: set[int] = set()
        self.whole: Collection[jex.Var] = ()
        self.follow_all = False
        self.follow: Callable[[jex.JaxprEqn], bool] = lambda _: False
        # What is whole to an equation for a slice, of its operands and results.
        self._whole_to: dict[int, list[jex.Var]] = {}
        self._rows = rows
        self._equations = equations
        self._producers = producers

    def mark(self, v: jex.Var, axis: int) -> None:
        """Counts a variable's rows along an axis."""
        aval: Any = v.aval
        if self.axes.setdefault(v, axis) != axis:
            raise NotRowLocalError("a value with rows along two axes")
        if axis >= len(aval.shape) or aval.shape[axis] != self._rows.count:
            raise NotRowLocalError(f"a value of shape {aval.shape}")
        if aval.sharding.spec[axis] is not None:
            raise NotRowLocalError(f"a value that is sharded along axis {axis}")

    def demand(self, a: Atom, axis: int) -> None:
        """Counts a value in rows that was taken for whole before."""
        wanted = [(a, axis)]
        while wanted:
            a, axis = wanted.pop()
            if isinstance(a, jex.Literal):
                raise NotRowLocalError("a constant array")
            known = a in self.axes
            self.mark(a, axis)
            if known or a in self.whole or a not in self._producers:
                continue
            position = self._producers[a]
            e = self._equations[position]
            if not (is_arithmetic(e) or self.follow_all):
                if self.follow(e):
                    self._demand_operands(e, position, axis)
                continue
            outs = [axis if v is a else None for v in e.outvars]
            ins = rule_of(e).backward(e, outs, self._rows)
            self.positions.add(position)
            self._note_whole(e, ins, ())
            wanted += [
                (x, i) for x, i in zip(e.invars, ins, strict=True) if i is not None
            ]

    def _demand_operands(self, e: jex.JaxprEqn, position: int, axis: int) -> None:
        """Counts the operands of an equation in rows, if that can be."""
        more = self._copy()
        try:
            ins = rule_of(e).backward(e, [axis], self._rows)
            more._demand_all(e, ins)
        except NotRowLocalError:
            return
        self.axes, self.positions = more.axes, {*more.positions, position}
        self._whole_to = more._whole_to

    def _demand_all(self, e: jex.JaxprEqn, axes: Sequence[int | None]) -> None:
        """Counts the operands of an equation in rows, those that have an axis."""
        self._note_whole(e, axes, ())
        for a, axis in zip(e.invars, axes, strict=True):
            if axis is not None:
                self.demand(a, axis)

    def _copy(self) -> Analysis:
        """Returns a copy that can be carried further than this."""
        more = copy.copy(self)
        more.axes, more.positions = dict(self.axes), set(self.positions)
        more._whole_to = dict(self._whole_to)
        return more

    def _note_whole(
        self, e: jex.JaxprEqn, axes: Sequence[int | None], results: Sequence[jex.Var]
    ) -> None:
        operands = zip(e.invars, axes, strict=True)
        whole = variables(a for a, axis in operands if axis is None)
        self._whole_to[id(e)] = [*whole, *results]

    def conflict(self) -> jex.JaxprEqn | None:
        """An equation for a slice to which something is whole that has rows."""
        for position in sorted(self.positions):
            e = self._equations[position]
            if any(v in self.axes for v in self._whole_to.get(id(e), ())):
                return e
        return None

    def with_result(self, v: jex.Var, like: jex.Var) -> Analysis | None:
        """With another result, which has its rows where an input has; if it can be."""
        if v not in self._producers:
            return None
        position = self._producers[v]
        e = self._equations[position]
        if not is_arithmetic(e):
            return None
        more = self._copy()
        axis = self.axes[like]
        try:
            more.mark(v, axis)
            ins = rule_of(e).backward(e, [axis], self._rows)
            if all(x is None for x in ins):
                return None  # The same for all rows.
            more._demand_all(e, ins)
        except NotRowLocalError:
            return None
        more.positions.add(position)
        return more

    def row_local(
        self, loads: Iterable[jex.Var], outputs: Sequence[jex.Var]
    ) -> RowLocal:
        """The equations that were found; loads are inputs, needed or not."""
        ordered = tuple(self._equations[i] for i in sorted(self.positions))
        defined = {v for e in ordered for v in e.outvars}
        used = (v for e in ordered for v in variables(e.invars))
        free = dict.fromkeys(v for v in (*loads, *used, *outputs) if v not in defined)
        rows = self._rows.count
        return RowLocal(ordered, rows, self.axes, tuple(free), tuple(outputs))

    def visit(self, e: jex.JaxprEqn) -> None:
        """Finds the rows of an equation's results from those of its operands."""
        known = [_axis_of(a, self.axes) for a in e.invars]
        if all(axis is None for axis in known):
            self._note_whole(e, known, e.outvars)
            return
        ins, outs = rule_of(e).forward(e, known, self._rows)
        self._note_whole(e, ins, ())
        for a, before, axis in zip(e.invars, known, ins, strict=True):
            if before is None and axis is not None:
                self.demand(a, axis)
        for v, axis in zip(e.outvars, outs, strict=True):
            if axis is not None:
                self.mark(v, axis)


def _axis_of(a: Atom, axes: Mapping[jex.Var, int]) -> int | None:
    return None if isinstance(a, jex.Literal) else axes.get(a)


@dataclasses.dataclass(frozen=True)
class RowCount:
    """Follows a number of rows through the bodies of equations.

    Attributes:
      count: The number of rows in all.
    """

    count: int

    def through(self, body: jex.ClosedJaxpr, axes: Axes) -> Axes:
        """The batch axes of a body's arguments and results, from those known."""
        found = self._inside(body.jaxpr, axes)
        return Axes(
            [_axis_of(v, found) for v in body.jaxpr.invars],
            [_axis_of(a, found) for a in body.jaxpr.outvars],
        )

    def resized(self, body: jex.ClosedJaxpr, axes: Axes, size: int) -> jex.ClosedJaxpr:
        """A body for so many rows."""
        jaxpr = body.jaxpr
        small = self.resized_jaxpr(jaxpr, self._inside(jaxpr, axes), size)
        return jex.ClosedJaxpr(small.replace(constvars=jaxpr.constvars), body.consts)

    def _inside(self, jaxpr: jex.Jaxpr, axes: Axes) -> dict[jex.Var, int]:
        """The variables of a body that have rows."""
        producers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        arguments = zip(jaxpr.invars, axes.ins, strict=True)
        known = {v: axis for v, axis in arguments if axis is not None}
        while True:
            analysis = Analysis(self, jaxpr.eqns, producers)
            analysis.follow_all = True
            for v, axis in known.items():
                analysis.mark(v, axis)
            for e in jaxpr.eqns:
                analysis.visit(e)
            for a, axis in zip(jaxpr.outvars, axes.outs, strict=True):
                if axis is not None:
                    analysis.demand(a, axis)
            if len(analysis.axes) == len(known):
                return analysis.axes
            # What was found on the way back may have been passed by on the way there.
            known = analysis.axes

    def resized_jaxpr(
        self, jaxpr: jex.Jaxpr, axes: Mapping[jex.Var, int], size: int
    ) -> jex.Jaxpr:
        """A jaxpr, given the batch axes of its variables, for so many rows."""
        builder = Builder()

        def small(v: jex.Var) -> jex.Var:
            if v not in axes:
                return v
            aval: Any = v.aval
            sizes = (*shape(v)[: axes[v]], size, *shape(v)[axes[v] + 1 :])
            return jex.Var(aval.update(shape=sizes))

        invars = [small(v) for v in jaxpr.invars]
        builder.rename(jaxpr.invars, invars)
        for e in jaxpr.eqns:
            found = Axes(
                [_axis_of(a, axes) for a in e.invars], [axes.get(v) for v in e.outvars]
            )
            changed: dict[str, Any] = {}
            if any(axis is not None for axis in (*found.ins, *found.outs)):
                changed = rule_of(e).resize(e, found, self, size)
            builder.add(e, [small(v) for v in e.outvars], changed)
        return jex.Jaxpr(
            constvars=(),
            invars=invars,
            outvars=builder.read_all(jaxpr.outvars),
            eqns=builder.equations,
            debug_info=jaxpr.debug_info,
        )
