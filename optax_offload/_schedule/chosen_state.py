"""State that a step makes of new state, as a choice between the old and the new.

A step may return `jnp.where(ok, new, old)` of the state of an offloaded update, or a
mean of both. Evaluated by itself, that would load all of the state and leave it on the
device. So equations that treat each number alone become a part of the update that makes
the new state: it loads a row of the old, and stores the row that was chosen. Others
become an update of their own, which loads what they take group by group, and stores
what they make where the state rests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._ground import compat, limits, trees
from optax_offload._places import memory
from optax_offload._program import (
    MadeOf,
    Program,
    apart,
    bound,
    called,
    dependents,
    described,
    dtype,
    entered,
    flatten,
    handed_on,
    has_update,
    in_pairs,
    needed,
    ordered,
    selections,
    shape,
    variables,
    with_bodies,
)
from optax_offload._rows import is_elementwise
from optax_offload._schedule.grown import Grown, GrownCall
from optax_offload._schedule.new_state import made_in, returned, stays, taken_as_state


@dataclasses.dataclass(frozen=True)
class ChosenState:
    """What a step makes of new state, where that is no part of the update.

    Attributes:
      returned: The results that are new state, as positions.
      again: The paths of state that is loaded again after its update, each with the
        equation for which it is.
      lost: The paths of state that cannot be brought back to where it rests, each with
        the equation that keeps it from that.
    """

    returned: tuple[int, ...] = ()
    again: tuple[tuple[str, str], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()

    def lines(self) -> Iterator[str]:
        """Lines on state that is loaded once more, after its update."""
        by_equation: dict[str, list[str]] = {}
        for path, equation in self.again:
            by_equation.setdefault(equation, []).append(path)
        for equation, paths in by_equation.items():
            yield (
                f"loaded again after its update, for {equation}, and stored where it "
                f"rested: {trees.listed(paths)}"
            )


def with_chosen_state(
    closed: jex.ClosedJaxpr,
) -> tuple[jex.ClosedJaxpr, ChosenState]:
    """A step in which updates make the state that it returns.

    Args:
      closed: A step that was traced as if all were on the device.

    Returns:
      The step, which is as it was if it returns new state as the updates give it; and a
      description of what is made of state beside them.
    """
    again: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    closed = _rewritten(closed, again, lost)
    jaxpr = closed.jaxpr
    made = set(made_in(jaxpr.eqns))
    for e in jaxpr.eqns:
        made.update(v for a, v in handed_on(e) if a in made and stays(e))
    outvars = enumerate(jaxpr.outvars)
    results = tuple(k for k, a in outvars if isinstance(a, jex.Var) and a in made)
    return closed, ChosenState(results, tuple(again), tuple(lost))


def _makes_more(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether new state is not only returned."""
    if not any(map(has_update, jaxpr.eqns)):
        return False
    kept = returned(jaxpr.eqns, jaxpr.outvars)
    return not kept.issuperset(made_in(jaxpr.eqns)) or any(
        _makes_more(body.closed.jaxpr) for e in jaxpr.eqns for body in entered(e)
    )


def _rewritten(
    closed: jex.ClosedJaxpr,
    again: list[tuple[str, str]],
    lost: list[tuple[str, str]],
) -> jex.ClosedJaxpr:
    if not _makes_more(closed.jaxpr):
        return closed
    program = flatten(closed)
    equations = [_with_bodies(e, again, lost) for e in program.equations]
    program = dataclasses.replace(program, equations=_apart(equations))
    search = _Search(program)
    found = search.run()
    again += search.again
    lost += search.lost
    return found.closed(closed)


def _with_bodies(
    e: jex.JaxprEqn,
    again: list[tuple[str, str]],
    lost: list[tuple[str, str]],
) -> jex.JaxprEqn:
    """An equation, in whose bodies updates make the state that these return."""
    if called(e) is not None or not has_update(e):
        return e
    return with_bodies(e, lambda body: _rewritten(body, again, lost))


def _apart(equations: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Equations in which those over many leaves of new state are one for each leaf.

    Conditionals that only choose between their operands are selections.
    """
    made = made_in(equations)
    touched: set[jex.Var] = set()
    producers = {v: e for e in equations for v in e.outvars}
    found: list[jex.JaxprEqn] = []
    for e in equations:
        touched.update(v for v in e.outvars if v in made)
        if touched.isdisjoint(variables(e.invars)) or has_update(e):
            found.append(e)
            continue
        touched.update(v for v in e.outvars if shape(v))
        if e.primitive.name == "optimization_barrier":
            found += [e.replace(invars=[a], outvars=[v]) for a, v in in_pairs(e)]
        elif e.primitive.name == "cond":
            found += selections(e, producers)
        else:
            found += apart(e)
    return found


class _Found(NamedTuple):
    """A result that is made of new state.

    Attributes:
      result: The result.
      source: The new state whose place it takes.
      positions: The equations that lead to it, as positions.
      takes: The variables that these take.
    """

    result: jex.Var
    source: jex.Var
    positions: frozenset[int]
    takes: tuple[jex.Var, ...]


class _Search:
    """Finds what is made of new state in a program, and has updates make it."""

    def __init__(self, program: Program):
        self._program = program
        self.again: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []
        equations = program.equations
        self._made = made_in(equations)
        self._dependents: dict[int, set[jex.Var]] = {}
        # What is made of new state, number by number or not, but for numbers alone.
        self._touched = set(self._made)
        for e in equations:
            if not self._touched.isdisjoint(variables(e.invars)) and not has_update(e):
                self._touched.update(v for v in e.outvars if shape(v))

    def run(self) -> Program:
        """The program in which updates make the state that is returned."""
        own: dict[int, list[_Found]] = {}
        apart: list[_Found] = []
        for each in self._results():
            refused = self._refused(each)
            if refused is not None and memory.on_host(each.result.aval):
                continue  # The step itself puts it back.
            if refused is not None:
                path = self._made[each.source].output.path
                self.lost.append((path, described(refused)))
                continue
            at = self._update_for(each)
            if at is None:
                apart.append(each)
            else:
                own.setdefault(at, []).append(each)
        if not own and not apart:
            return self._program
        equations: list[jex.JaxprEqn] = list(self._program.equations)
        grown = {at: self._grown(at, some) for at, some in own.items()}
        beside = self._beside(apart)
        # What an update makes now, nothing else does.
        results = {
            each.result for each in (*apart, *(x for f in own.values() for x in f))
        }
        for i in {self._position(v) for v in results}:
            e = equations[i]
            outvars = [jex.Var(v.aval) if v in results else v for v in e.outvars]
            equations[i] = e.replace(outvars=outvars)
        for at, update in grown.items():
            equations[at] = update.equation(())
        kept = ordered(self._program, [*equations, *beside])
        taken = {v for e in kept for v in variables(e.invars)}
        for at, update in grown.items():
            missing = [v for v in update.replaced if v in taken]
            if missing:
                equations[at] = update.equation(missing)
        kept = ordered(self._program, [*equations, *beside])
        return dataclasses.replace(self._program, equations=kept)

    def _results(self) -> list[_Found]:
        """What takes the place of new state: results, and state of later updates."""
        equations = self._program.equations
        some = [*variables(self._program.outvars), *taken_as_state(equations)]
        results = {v: k for k, v in enumerate(some)}
        kept = returned(equations, some)
        found = [
            (distance, results[r], v, r)
            for v in self._made
            if v not in kept
            for r, distance in self._leads_to(v, results)
        ]
        taken: dict[jex.Var, jex.Var] = {}
        for _, _, v, r in sorted(found, key=lambda x: x[:2]):
            if v not in taken and r not in taken.values():
                taken[v] = r
        return [self._between(v, r) for v, r in taken.items()]

    def _leads_to(
        self, start: jex.Var, results: Mapping[Any, int]
    ) -> Iterator[tuple[jex.Var, int]]:
        """The results that are made of new state, with the count of equations."""
        front, seen, distance = [start], {start}, 0
        while front:
            distance += 1
            after = dict.fromkeys(
                x
                for v in front
                for i in self._program.users.get(v, ())
                for x in self._follow(i, v)
                if x not in seen and (shape(x) or not shape(start))
            )
            seen.update(after)
            front = list(after)
            yield from (
                (v, distance) for v in front if v in results and _alike(v, start)
            )

    def _follow(self, i: int, v: jex.Var) -> Sequence[jex.Var]:
        """The results of an equation in which a variable goes on."""
        e = self._program.equations[i]
        if has_update(e):  # That takes it, and gives new state of its own.
            return ()
        if e.primitive.name == "device_put":  # Where the step itself puts it.
            return [x for a, x in handed_on(e) if a is v and memory.on_host(x.aval)]
        return e.outvars

    def _between(self, source: jex.Var, result: jex.Var) -> _Found:
        """The equations from new state to a result. Numbers are taken as they are."""
        made = self._program.made_of(
            [result],
            lambda _, v: v is result or (v in self._touched and v not in self._made),
        )
        return _Found(result, source, frozenset(made.positions), tuple(made.takes))

    def _refused(self, each: _Found) -> jex.JaxprEqn | None:
        """An equation that cannot be part of an update."""
        some = (self._program.equations[i] for i in sorted(each.positions))
        return next(filter(compat.has_effects, some), None)

    def _update_for(self, each: _Found) -> int | None:
        """The position of the update that can make a result, if there is one."""
        program = self._program
        sizes = shape(each.result)
        made = [v for v in each.takes if v in self._made]
        if not made:  # A number that is made of others of new state.
            return None
        at = max(self._position(v) for v in made)
        what = called(program.equations[at])
        if what is None or not any(
            each.source is v for v in program.equations[at].outvars
        ):
            return None
        if not all(of_each_number(program.equations[i], sizes) for i in each.positions):
            return None
        others = [v for v in each.takes if v not in program.equations[at].outvars]
        if not self._depends(at).isdisjoint(others):
            return None
        moved = (i for i in needed(program.equations, others) if i > at)
        if any(compat.has_effects(program.equations[i]) for i in moved):
            return None
        return at

    def _depends(self, at: int) -> set[jex.Var]:
        """What depends on an update, or on one that comes later."""
        if at not in self._dependents:
            updates = filter(called, self._program.equations[at:])
            made = {v for e in updates for v in e.outvars}
            self._dependents[at] = dependents(self._program, made)
        return self._dependents[at]

    def _position(self, v: jex.Var) -> int:
        return self._program.producers[v]

    def _grown(self, at: int, some: Sequence[_Found]) -> GrownCall:
        """An update that makes some results."""
        program = self._program
        e = program.equations[at]
        what = called(e)
        assert what is not None
        grown = Grown(what.update, e.invars)
        given = bound(e.outvars, what.update.program.outvars)
        replaced: dict[jex.Var, jex.Var] = {}
        positions: set[int] = set()
        takes: dict[jex.Var, None] = {}
        for each in some:
            replaced[each.source] = each.result
            positions |= each.positions
            takes |= dict.fromkeys(v for v in each.takes if v not in given)
            for v in [v for v in takes if shape(v) and v not in grown.operands]:
                made = of_arguments(program, v)
                if made is not None:
                    del takes[v]
                    positions.update(made.positions)
                    takes |= dict.fromkeys(made.takes)
        equations = (program.equations[i] for i in sorted(positions))
        grown.follow(equations, given, list(takes))
        for each in some:
            k = e.outvars.index(each.source)
            (grown.outvars[k],) = grown.read_all([each.result])
        return GrownCall(e, what, grown, replaced)

    def _beside(self, some: Sequence[_Found]) -> list[jex.JaxprEqn]:
        """Updates that make results of new state which has been made."""
        for each in some:
            path = self._made[each.source].output.path
            last = self._program.equations[self._program.producers[each.result]]
            self.again.append((path, described(last)))
        found: list[jex.JaxprEqn] = []
        for caller in dict.fromkeys(self._made[each.source].caller for each in some):
            mine = [x for x in some if self._made[x.source].caller is caller]
            after = dependents(self._program, {each.result for each in mine})
            taken = {v for each in mine for v in each.takes}
            together = after.isdisjoint(taken)
            groups = [mine] if together else [[each] for each in mine]
            found += map(self._update_of, groups)
        return found

    def _update_of(self, some: Sequence[_Found]) -> jex.JaxprEqn:
        """An update that makes results of new state, and nothing else."""
        program = self._program
        some = sorted(some, key=lambda each: self._made[each.source].output.path)
        positions = sorted({i for each in some for i in each.positions})
        takes = dict.fromkeys(each.source for each in some)
        takes |= dict.fromkeys(v for each in some for v in each.takes)
        grown = Grown.of(program, positions, takes)
        for k, each in enumerate(some):
            before = self._made[each.source].output
            grown.outvars += grown.read_all([each.result])
            grown.outputs.append(dataclasses.replace(before, alias=k, like=None))
        grown.load(self._made)
        caller = self._made[some[0].source].caller
        caller = dataclasses.replace(caller, check=lambda *_: None, planned={})
        paths = [self._made[each.source].output.path for each in some]
        last = program.equations[positions[-1]]
        return grown.equation(caller, paths, last, [each.result for each in some])


def _alike(v: jex.Var, of: jex.Var) -> bool:
    """Returns whether one may take the place of the other, maybe in another dtype."""
    new, old = (dtype(x) for x in (v, of))
    floats = all(jnp.issubdtype(x, jnp.inexact) for x in (new, old))
    return shape(v) == shape(of) and (new == old or floats)


def of_arguments(program: Program, v: jex.Var) -> MadeOf | None:
    """What makes a variable number by number; None if more than that is needed.

    An array is made of arguments and numbers, a number of numbers that are arguments.
    """

    def known(x: jex.Var) -> bool:
        return x not in program.producers or (bool(shape(v)) and not shape(x))

    made = program.made_of(
        [v], lambda e, x: not known(x) and of_each_number(e, shape(v))
    )
    return made if all(map(known, made.takes)) else None


def is_reduced(program: Program, i: int) -> bool:
    """Returns whether of what an equation makes something small is all that is left.

    As of squares that are summed: these are gone before what they are made of is.

    Args:
      program: The program.
      i: The position of the equation.
    """
    waiting, seen = [i], {i}
    while waiting:
        e = program.equations[waiting.pop()]
        if compat.has_effects(e) or has_update(e):
            return False
        if all(memory.nbytes(v.aval) <= limits.now.reduced_bytes for v in e.outvars):
            continue
        if not of_each_number(e, shape(e.outvars[0])):
            return False
        (v,) = e.outvars
        if v in program.results:
            return False
        users = {*program.users.get(v, ())} - seen
        waiting += users
        seen |= users
    return True


def of_each_number(e: jex.JaxprEqn, sizes: tuple[int, ...]) -> bool:
    """Returns whether an equation computes each number from one, or hands it on."""
    if len(e.outvars) != 1 or shape(e.outvars[0]) != sizes:
        return False
    if any(shape(a) not in ((), sizes) for a in e.invars):
        return False
    if e.primitive.name == "cond":
        bodies = map(flatten, e.params["branches"])
        return not compat.has_effects(e) and all(
            of_each_number(inner, shape(inner.outvars[0]))
            and shape(inner.outvars[0]) in ((), sizes)
            for body in bodies
            for inner in body.equations
        )
    return is_elementwise(e)
