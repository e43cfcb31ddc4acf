"""Follows the gradients that a scan stacks: their uses row by row, and all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core as jex

from optax_offload._program import (
    Body,
    Components,
    Program,
    Step,
    called,
    entered,
    facts,
    handed_on,
    has_update,
    variables,
)
from optax_offload._rows import (
    Analysis,
    NotRowLocalError,
    RowCount,
    RowLocal,
    Sum,
    summed,
)


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan of a step.

    Attributes:
      position: The position of its equation.
      equation: The equation.
      is_backward: Whether it is the backward pass of another.
    """

    position: int
    equation: jex.JaxprEqn
    is_backward: bool = True

    @property
    def length(self) -> int:
        """The number of its iterations."""
        return self.equation.params["length"]

    @property
    def body(self) -> Body:
        """Its body, of which each iteration is a turn."""
        (body,) = entered(self.equation)
        return body

    @property
    def loaded(self) -> list[jex.Var]:
        """The operands at rest whose rows are loaded for it alone, and used."""
        body = self.body.jaxpr
        used = {v for e in body.eqns for v in variables(e.invars)}
        used.update(variables(body.outvars))
        taken = (x.stack for x in self.body.loads if x.row in used)
        others = variables(x.stack for x in self.body.rows_taken if not x.rests)
        return [v for v in dict.fromkeys(variables(taken)) if v not in others]


def candidates(step: Step) -> list[int]:
    """The scans of a step that have rows, as positions."""
    equations = step.program.equations
    return [
        i
        for i in sorted(step.live)
        if equations[i].primitive.name == "scan" and equations[i].params["length"] > 1
    ]


def over_rows(scan: Scan) -> Scan:
    """A scan of as many rows that computes nothing of its own.

    In it rows of what waits are loaded, with those of its state, and summed up.
    """
    closed = jax.make_jaxpr(
        lambda: lax.scan(lambda _, __: (0, None), 0, None, length=scan.length)
    )()
    (e,) = closed.jaxpr.eqns
    return Scan(scan.position, e)


def is_transposed(e: jex.JaxprEqn) -> bool:
    """Returns whether JAX says that an equation is of a backward pass.

    It names what it transposes; within a jit or a checkpoint it names that.
    """
    return "transpose(" in str(e.source_info.name_stack)


def is_transposed_last(e: jex.JaxprEqn) -> bool:
    """Returns whether JAX says so, and that it is not derived again after that."""
    before, name, _ = str(e.source_info.name_stack).partition("transpose(")
    return bool(name) and "jvp(" not in before


def is_derived_first(e: jex.JaxprEqn) -> bool:
    """Returns whether JAX says that an equation is of a forward pass with another."""
    name = str(e.source_info.name_stack)
    return "jvp(" in name and "transpose(" not in name


def is_backward(program: Program, scan: Scan) -> bool:
    """Returns whether a scan is a backward pass, and not one that stacks means.

    Where JAX doesn't say so, a backward pass runs against the scan that stacked what it
    takes.
    """
    if is_transposed(scan.equation):
        return True
    direction = scan.equation.params["reverse"]
    waiting = variables(scan.body.xs)
    while waiting:
        v = waiting.pop()
        if v not in program.producers:
            continue
        e = program.equations[program.producers[v]]
        if e.primitive.name == "scan" and e.params["reverse"] != direction:
            return True
        waiting += [a for a, b in handed_on(e) if b is v]
    return False


@dataclasses.dataclass(frozen=True)
class Component:
    """Gradients that some equation joins, and what follows from them row by row.

    Attributes:
      gradients: The gradients.
      results: The results of the step that have rows.
      sums: The values that are reduced over the rows.
      late_sums: The sums that depend on values that are known only after the scan.
      waits: Whether results, or sums, depend on such values.
    """

    gradients: tuple[jex.Var, ...]
    results: tuple[jex.Var, ...]
    sums: tuple[Sum, ...]
    late_sums: tuple[Sum, ...]
    waits: bool

    @property
    def ends(self) -> list[jex.Var]:
        """Equations that have to be evaluated for every row."""
        summed = [v for s in self.sums for v in s.operands]
        return list(dict.fromkeys([*self.results, *summed]))


class Unfused(NamedTuple):
    """A gradient that is computed whole.

    Attributes:
      gradient: The gradient.
      reason: The reason.
      waits: The results whose update would have had to wait for it, if there are any.
    """

    gradient: jex.Var
    reason: str
    waits: tuple[jex.Var, ...] = ()


@dataclasses.dataclass(frozen=True)
class RowUses:
    """The uses of a scan's gradients.

    Attributes:
      rows: The equations that treat every row alone.
      components: The gradients, grouped by the equations that join them.
      late: The variables that depend on the scan otherwise than row by row, or on such
        variables.
      unfused: The gradients of which an equation needs all rows at once.
    """

    rows: RowLocal
    components: tuple[Component, ...]
    late: frozenset[jex.Var]
    unfused: tuple[Unfused, ...]


def follow(
    step: Step, scan: Scan, gradients: Sequence[jex.Var], later: Collection[int]
) -> RowUses:
    """Follows gradients of a scan to the results of a step.

    Args:
      step: The step.
      scan: The scan.
      gradients: The stacked results of it that are followed.
      later: Scans that cannot be computed before this one, as positions.
    """
    unfused: list[Unfused] = []
    while True:
        walk = _Walk(step, scan, gradients, later)
        mixed = walk.mixed()
        if not mixed:
            return walk.found(unfused)
        # Without these others may be followed further, or less far.
        unfused += mixed
        gradients = without(gradients, mixed)


def without(gradients: Iterable[jex.Var], unfused: Iterable[Unfused]) -> list[jex.Var]:
    """The gradients that are not among those that are computed whole."""
    whole = {o.gradient for o in unfused}
    return [v for v in gradients if v not in whole]


class _Walk:
    """Follows gradients from equation to equation.

    Attributes:
      of: For each variable with rows that depends on a gradient, one of its component.
      late: See `RowUses`.
    """

    def __init__(
        self,
        step: Step,
        scan: Scan,
        gradients: Sequence[jex.Var],
        later: Collection[int],
    ):
        program = step.program
        self._step, self._scan, self._later = step, scan, later
        self._gradients = tuple(gradients)
        self._analysis = Analysis(
            RowCount(scan.length), program.equations, program.producers
        )
        self._analysis.whole = set(variables(program.outvars))
        # What decodes state: else it would be decoded whole, before a scan.
        self._analysis.follow = lambda e: facts(e).layout
        for v in gradients:
            self._analysis.mark(v, 0)
        self.of: dict[jex.Var, jex.Var] = {v: v for v in gradients}
        self._joined = Components[jex.Var]()
        self.late = set(step.defines(scan.position)).difference(gradients)
        self._sums: list[Sum] = []

    def _root(self, v: jex.Var) -> jex.Var:
        """A gradient of the component that a variable with rows is of."""
        return self._joined.of(self.of[v])

    def mixed(self) -> list[Unfused]:
        """Follows the gradients, and returns the first that an equation mixes."""
        for i in range(self._scan.position + 1, len(self._step.program.equations)):
            mixed = self._visit(i) if i in self._step.live else []
            if mixed:
                return mixed
        mixes = self._analysis.conflict()
        if mixes is None:
            return []
        beside = [*mixes.outvars, *variables(mixes.invars)]
        roots = {self._root(v) for v in beside if v in self.of}
        every = set(map(self._root, self._gradients))
        return self._all_at_once(roots or every, mixes.primitive.name)

    def _visit(self, i: int) -> list[Unfused]:
        """Goes on with an equation, and returns the gradients that it mixes."""
        e = self._step.program.equations[i]
        operands = self._step.reads(i)
        late = i in self._later or not self.late.isdisjoint(operands)
        touched = [v for v in operands if v in self.of]
        mixed = self._visit_rows(i, e, touched) if touched else []
        if late:
            self.late.update(self._step.defines(i))
        return mixed

    def _visit_rows(
        self, i: int, e: jex.JaxprEqn, touched: list[jex.Var]
    ) -> list[Unfused]:
        roots = list(dict.fromkeys(map(self._root, touched)))
        operands = summed(e, self._analysis.axes)
        if operands:
            self._sums.append(Sum(i, tuple(operands)))
            self.late.update(e.outvars)
            return []
        if called(e):
            return self._unfused(roots, _STATE_ON_DEVICE)
        if has_update(e):
            return self._unfused(roots, f"the update is in a {e.primitive.name}")
        try:
            self._analysis.visit(e)
        except NotRowLocalError as error:
            return self._all_at_once(roots, str(error))
        if any(v not in self._analysis.axes for v in e.outvars):
            return self._all_at_once(roots, e.primitive.name)
        self._analysis.positions.add(i)
        self._joined.join(roots)
        self.of.update((v, roots[0]) for v in e.outvars)
        return []

    def _all_at_once(self, roots: Collection[jex.Var], what: str) -> list[Unfused]:
        return self._unfused(roots, f"{what} needs all of it at once")

    def _unfused(self, roots: Collection[jex.Var], reason: str) -> list[Unfused]:
        found = (v for v in self._gradients if self._root(v) in roots)
        return [Unfused(v, reason) for v in found]

    def found(self, unfused: Sequence[Unfused]) -> RowUses:
        """Returns the result of the search, with what was left before."""
        outvars = dict.fromkeys(variables(self._step.program.outvars))
        results = [v for v in outvars if v in self.of]
        components: list[Component] = []
        for root in dict.fromkeys(map(self._root, self._gradients)):
            of_root = {v for v in self.of if self._root(v) is root}
            mine = [v for v in results if v in of_root]
            sums = [s for s in self._sums if not of_root.isdisjoint(s.operands)]
            late = [s for s in sums if not self.late.isdisjoint(s.operands)]
            components.append(
                Component(
                    tuple(v for v in self._gradients if self._root(v) is root),
                    tuple(mine),
                    tuple(sums),
                    tuple(late),
                    waits=bool(late) or not self.late.isdisjoint(mine),
                )
            )
        summed = [v for s in self._sums for v in s.operands]
        rows = self._analysis.row_local(self._gradients, [*results, *summed])
        return RowUses(rows, tuple(components), frozenset(self.late), tuple(unfused))


_STATE_ON_DEVICE = "the state of its update is typed as on the device"
