"""What a step adds to arguments at rest itself, as an update that is offloaded.

A step may compute new parameters by its own equations, as plain descent does, and as an
average of parameters is made. Layers in a Python loop would keep all of their gradients
until the end, where these equations are. So those that treat each number alone become
an update, which a turn carries out as it does any other. Scans have such equations in
their iterations anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program import (
    Caller,
    Output,
    Program,
    called,
    dependents,
    flatten,
    is_transfer,
    ordered,
    shape,
    variables,
)
from optax_offload._schedule.chosen_state import (
    is_reduced,
    of_arguments,
    of_each_number,
)
from optax_offload._schedule.grown import Grown


class _Made(NamedTuple):
    """A result that replaces an argument at rest.

    Attributes:
      result: The result.
      argument: The argument.
      positions: The equations that lead to it, as positions.
      again: Those that make numbers for these of arguments alone, as of a count of
        steps. They are evaluated in the update too.
      takes: The variables that all of these take.
    """

    result: jex.Var
    argument: jex.Var
    positions: frozenset[int]
    again: frozenset[int]
    takes: tuple[jex.Var, ...]


def with_own_updates(
    closed: jex.ClosedJaxpr, returns: Mapping[int, int]
) -> tuple[jex.ClosedJaxpr, Mapping[int, int]]:
    """A step in which one update makes what its own equations make of what rests.

    Args:
      closed: A step that was traced as if all were on the device.
      returns: The argument at rest that each result replaces, as positions.

    Returns:
      The step, and those that it still returns itself.
    """
    if not (compat.SEGMENTS_ARE_FREED and returns):
        return closed, returns
    program = flatten(closed)
    made = _Search(program, returns).made()
    if not made:
        return closed, returns
    update, kept = _update_of(program, made)
    results = {*update.outvars}
    others = (
        e.replace(
            invars=[kept.get(a, a) if isinstance(a, jex.Var) else a for a in e.invars],
            outvars=[jex.Var(v.aval) if v in results else v for v in e.outvars],
        )
        for e in program.equations
    )
    found = dataclasses.replace(program, equations=ordered(program, [*others, update]))
    updated = {x.argument for x in made}
    left = {k: i for k, i in returns.items() if program.invars[i] not in updated}
    return found.closed(closed), left


class _Search:
    """Finds the results of a program that its own equations make of what rests."""

    def __init__(self, program: Program, returns: Mapping[int, int]):
        self._program, self._returns = program, returns
        self._arguments = {*program.invars}
        # What loops make, or updates.
        self._apart: set[jex.Var] = set()
        for e in program.equations:
            if called(e) or e.primitive.name in ("scan", "while"):
                self._apart.update(e.outvars)

    def made(self) -> list[_Made]:
        """The results, of whose equations nothing else takes anything but to reduce it.

        What follows from that is no part of what they are made of.
        """
        program = self._program
        found = [x for k, i in self._returns.items() for x in self._made(k, i)]
        while True:
            outside = _outside(program, found)
            reducing = {i for some in outside.values() for i in some}
            made = [v for i in reducing for v in program.equations[i].outvars]
            after = dependents(program, made)
            some = [
                x
                for x in found
                if after.isdisjoint(x.takes) and self._is_reduced(x, outside)
            ]
            if len(some) == len(found):
                return found
            found = some

    def _made(self, k: int, i: int) -> Iterator[_Made]:
        """The result at a position, if its numbers are made of those of others."""
        program = self._program
        a, argument = program.outvars[k], program.invars[i]
        if not isinstance(a, jex.Var) or not shape(a) or a not in program.producers:
            return
        positions, taken = program.made_of(
            [a], lambda e, v: bool(shape(v)) and self._may_move(e, shape(a))
        )
        arrays = [v for v in taken if shape(v) and v not in self._arguments]
        if not positions or len(arrays) > 1 or not self._apart.isdisjoint(arrays):
            return
        again: set[int] = set()
        takes: dict[jex.Var, None] = {}
        for v in taken:
            number = None if shape(v) else of_arguments(program, v)
            again.update(number.positions if number else ())
            takes |= dict.fromkeys(number.takes if number else [v])
        yield _Made(a, argument, frozenset(positions), frozenset(again), tuple(takes))

    def _may_move(self, e: jex.JaxprEqn, sizes: tuple[int, ...]) -> bool:
        """Returns whether an update may evaluate an equation.

        Gradients of microbatches are summed where they are made.
        """
        return of_each_number(e, sizes) and not is_transfer(e) and not self._sums(e)

    def _sums(self, e: jex.JaxprEqn) -> bool:
        """Returns whether an equation adds up what others than arithmetic make."""
        return e.primitive.name in ("add", "add_any") and all(
            isinstance(a, jex.Var) and shape(a) and self._is_gradient(a)
            for a in e.invars
        )

    def _is_gradient(self, v: jex.Var) -> bool:
        i = self._program.producers.get(v)
        if i is None:
            return False
        e = self._program.equations[i]
        return not of_each_number(e, shape(v)) or self._sums(e)

    def _is_reduced(
        self, made: _Made, outside: Mapping[jex.Var, Sequence[int]]
    ) -> bool:
        """Returns whether what else takes of its equations is reduced."""
        outvars = (self._program.equations[i].outvars for i in made.positions)
        return all(
            is_reduced(self._program, i) for (v,) in outvars for i in outside.get(v, ())
        )


def _outside(program: Program, made: Sequence[_Made]) -> dict[jex.Var, list[int]]:
    """What equations of results make that others take, and these, as positions."""
    inside = {i for x in made for i in x.positions}
    found = {
        v: [k for k in program.users.get(v, ()) if k not in inside]
        for i in sorted(inside)
        for v in program.equations[i].outvars
    }
    return {v: some for v, some in found.items() if some}


def _update_of(
    program: Program, made: Sequence[_Made]
) -> tuple[jex.JaxprEqn, Mapping[jex.Var, jex.Var]]:
    """An update that makes results, and what else of its equations is one.

    And what it makes on the device, for what reduces it.
    """
    positions = sorted({i for x in made for i in x.positions})
    takes = dict.fromkeys(v for x in made for v in x.takes)
    inside = {v for i in positions for v in program.equations[i].outvars}
    again = {i for x in made for i in x.again}
    grown = Grown.of(program, sorted(again.union(positions)), takes)
    argument = {x.result: x.argument for x in made}
    results = [v for v in dict.fromkeys(variables(program.outvars)) if v in inside]
    left = {*program.invars}.intersection(takes).difference(argument.values())
    for v in results:
        of = argument.get(v) or _nearest(program, v, left)
        left.discard(of)
        alias = None if of is None else grown.input(of)
        kind = "pinned_host" if v in argument else "device"
        path = f"result {program.outvars.index(v)}"
        grown.outvars += grown.read_all([v])
        grown.outputs.append(Output(path, kind, alias, is_update=False))
    kept = {v: jex.Var(v.aval) for v in _outside(program, made)}
    for v in kept:
        grown.outvars += grown.read_all([v])
        grown.outputs.append(Output("kept", "device", None, is_update=False))
    grown.load({*argument.values()})
    caller = Caller(None, lambda *_: None, None)
    last = program.equations[positions[-1]]
    return grown.equation(caller, (), last, [*results, *kept.values()]), kept


def _nearest(program: Program, v: jex.Var, some: Set[Any]) -> jex.Var | None:
    """The argument of its type, of some, to which a variable is the nearest."""
    front, seen = [v], {v}
    while front:
        found = next((x for x in front if x in some and x.aval == v.aval), None)
        if found is not None:
            return found
        made_by = (program.producers[x] for x in front if x in program.producers)
        taken = [x for i in made_by for x in variables(program.equations[i].invars)]
        front = [x for x in dict.fromkeys(taken) if shape(x) and x not in seen]
        seen.update(front)
    return None
