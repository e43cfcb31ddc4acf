"""A step whose layers no scan runs, cut into segments: a chain of turns.

Each segment is a loop that runs once, in whose body the arguments at rest that the next
segment takes are loaded. So no transfer is between the operations of a step (F01), and
one segment's arguments are on the device, and those of the next. What is left of an
update goes where the gradients that it takes are complete.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._program import (
    Components,
    Step,
    Update,
    dependents,
    facts,
    is_transfer,
    shape,
    variables,
)
from optax_offload._schedule.rest import Outer, RemainingUpdate
from optax_offload._units import MIB, size_text

# Fewer segments leave too little out to be worth their loops, and the time that these
# take to compile.
LEAST_SEGMENTS = 8
# So much of what rests is taken in one segment, or what one equation takes: a few
# milliseconds of a link.
SEGMENT_BYTES = 64 * MIB
# Less is not worth a transfer of its own.
LEAST_RESIDUAL_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations that are evaluated in a turn of their own.

    Attributes:
      positions: The equations, as positions.
      names: What rests on the host, by the variable that its equations take it as.
      own: What it loads itself.
      ahead: What it loads for the next segment.
      stores: The variables that rest on the host from here on, until they are used.
      results: The variables that others take.
    """

    positions: tuple[int, ...]
    names: Mapping[jex.Var, jex.Var]
    own: tuple[jex.Var, ...] = ()
    ahead: tuple[jex.Var, ...] = ()
    stores: tuple[jex.Var, ...] = ()
    results: tuple[jex.Var, ...] = ()

    @property
    def loads(self) -> tuple[jex.Var, ...]:
        """What rests on the host and is taken."""
        return tuple(dict.fromkeys(self.names.values()))


@dataclasses.dataclass(frozen=True)
class Chain:
    """A step as a chain.

    Attributes:
      links: Segments, and what is evaluated between them.
    """

    links: tuple[Segment | tuple[Outer, ...], ...]

    @property
    def segments(self) -> list[Segment]:
        """The segments, in order."""
        return [link for link in self.links if isinstance(link, Segment)]

    @property
    def residuals(self) -> list[jex.Var]:
        """The values that rest on the host from one segment to another."""
        return [v for s in self.segments for v in s.stores]

    def lines(self) -> Iterable[str]:
        """Lines on how a step was cut."""
        most = max(_nbytes(s.loads) for s in self.segments)
        yield (
            f"{len(self.segments)} turns of layers that no scan runs, each a loop that "
            f"runs once: {size_text(most)} of what rests on the host at most in one, "
            "loaded by the turn before"
        )
        if self.residuals:
            yield (
                f"{size_text(_nbytes(self.residuals))} of residuals rest on the host "
                "between the turns that make and take them"
            )


def chain(step: Step, nodes: Sequence[Outer], residuals: bool) -> Chain | None:
    """Cuts a step without scans; None where little would be left out at a time.

    Args:
      step: The step.
      nodes: The equations and updates of it, in order.
      residuals: Whether what one segment makes for a later one rests on the host.
    """
    found = _Cut(step, nodes)
    if len(found.segments) < LEAST_SEGMENTS:
        return None
    return found.chain(residuals)


class _Cut:
    """The equations of a step, in segments and between them."""

    def __init__(self, step: Step, nodes: Sequence[Outer]):
        self._step, self._program = step, step.program
        given = {*self._program.invars, *self._program.constants}
        self._arguments = {v for v in given if _memory.on_host(v.aval)}
        self._given = given - self._arguments
        # What is taken of what rests, and what is made of that alone.
        self._source: dict[jex.Var, jex.Var] = {}
        self._again: dict[jex.Var, int] = {}
        # Updates, and what follows from them, effects that come after theirs too.
        self._updating: list[Outer] = []
        following: set[jex.Var] = set()
        ordinary: list[Outer] = []
        for node in nodes:
            if node.left or not following.isdisjoint(node.reads):
                self._updating.append(node)
                made = node.left.results if node.left else step.defines(node.position)
                following.update(made)
            elif not self._is_source(node):
                ordinary.append(node)
        self._links = list(self._cut(ordinary))

    @functools.cached_property
    def segments(self) -> list[int]:
        """The links that are segments, as positions."""
        links = enumerate(self._links)
        return [n for n, (taken, _) in links if taken]

    def _is_source(self, node: Outer) -> bool:
        """Returns whether an equation loads, or is evaluated wherever it is taken."""
        e = self._program.equations[node.position]
        if self._step.tokens(node.position) or len(e.outvars) != 1:
            return False
        (v,) = e.outvars
        taken = variables(e.invars)
        if is_transfer(e) and not _memory.on_host(v.aval):
            if self._arguments.issuperset(taken):
                (self._source[v],) = taken
                return True
            return False
        made = [x for x in taken if x in self._source or x in self._again]
        others = {*taken}.difference(made)
        if made and facts(e).again and self._given.issuperset(others):
            self._again[v] = node.position
            return all(v is not a for a in self._program.outvars)
        return False

    def _made_of(self, taken: Iterable[jex.Var]) -> tuple[set[int], set[jex.Var]]:
        """The equations that make variables of what rests, and what they load."""
        positions: set[int] = set()
        loaded: set[jex.Var] = set()
        waiting = list(taken)
        while waiting:
            v = waiting.pop()
            if v in self._source:
                loaded.add(v)
            elif v in self._again and self._again[v] not in positions:
                positions.add(self._again[v])
                waiting += variables(self._program.equations[self._again[v]].invars)
        return positions, loaded

    def _cut(
        self, nodes: Sequence[Outer]
    ) -> Iterable[tuple[dict[jex.Var, jex.Var], list[Outer]]]:
        """Yields what each segment loads, with its equations; nothing between them."""
        loads: dict[jex.Var, jex.Var] = {}
        inside: list[Outer] = []
        gap: list[Outer] = []
        for node in nodes:
            more = {v: self._source[v] for v in self._made_of(node.reads)[1]}
            before, taken = set(loads.values()), set(more.values())
            fits = taken <= before or _nbytes(before | taken) <= SEGMENT_BYTES
            apart = self._touches_host(node)
            if before and (apart or (more and not fits)):
                yield loads, inside + gap
                loads, inside, gap = {}, [], []
            if apart or not more:
                gap.append(node)
                continue
            if not loads and gap:
                yield {}, gap
                gap = []
            loads |= more
            inside += [*gap, node]
            gap = []
        if loads:
            yield loads, inside
        if gap:
            yield {}, gap

    def _touches_host(self, node: Outer) -> bool:
        """Returns whether an equation takes or leaves values where they rest."""
        e = self._program.equations[node.position]
        atoms = (*variables(e.invars), *e.outvars)
        return any(_memory.on_host(v.aval) for v in atoms)

    def chain(self, residuals: bool) -> Chain:
        """The chain."""
        equations = self._program.equations
        made: dict[jex.Var, int] = {}
        used: dict[jex.Var, set[int]] = {}
        for n, (_, nodes) in enumerate(self._links):
            for node in nodes:
                made |= dict.fromkeys(self._step.defines(node.position), n)
                for v in node.reads:
                    used.setdefault(v, set()).add(n)
        kept = {*variables(self._program.outvars)}
        kept.update(v for node in self._updating for v in node.reads)
        stored = self._stored(made, used, kept) if residuals else {}
        links: list[Segment | tuple[Outer, ...]] = []
        for n, (loads, nodes) in enumerate(self._links):
            if not loads:
                links.append(tuple(nodes))
                continue
            taken = [v for node in nodes for v in node.reads]
            again, loaded = self._made_of(taken)
            own = [node.position for node in nodes]
            names = {v: self._source[v] for v in loaded}
            far = [v for v in dict.fromkeys(taken) if n in stored.get(v, {})]
            names |= {v: v for v in far}
            defined = [v for i in own for v in equations[i].outvars]
            results = [v for v in defined if v in kept or _is_taken(v, n, used, stored)]
            stores = [v for v in stored if self._store_at(made[v]) == n]
            links.append(
                Segment(
                    tuple(sorted((*again, *own))),
                    names,
                    stores=tuple(stores),
                    results=tuple(results),
                )
            )
        ahead = self._with_ahead(links)
        return Chain(tuple(self._with_updates(ahead, made)))

    def _segment_after(self, n: int) -> int | None:
        return next((m for m in self.segments if m > n), None)

    def _store_at(self, n: int) -> int:
        """The segment that stores what a link makes."""
        return next(m for m in self.segments if m >= n)

    def _stored(
        self,
        made: Mapping[jex.Var, int],
        used: Mapping[jex.Var, set[int]],
        kept: set[jex.Var],
    ) -> dict[jex.Var, set[int]]:
        """The values that rest until later segments take them, and these."""
        segments = self.segments
        found: dict[jex.Var, set[int]] = {}
        for v, n in made.items():
            if v in kept or n > segments[-1] or not shape(v):
                continue
            if (_memory.movable_nbytes(v.aval) or 0) < LEAST_RESIDUAL_BYTES:
                continue
            at = self._store_at(n)
            near = self._segment_after(at)
            if near is None:
                continue
            far = {m for m in used.get(v, ()) if m > near}
            if far and far.issubset(segments):
                found[v] = far
        return found

    def _with_ahead(
        self, links: Sequence[Segment | tuple[Outer, ...]]
    ) -> list[Segment | tuple[Outer, ...]]:
        """Links in which each segment loads what the next one takes."""
        found = list(links)
        before: int | None = None
        for n, link in enumerate(links):
            if not isinstance(link, Segment):
                continue
            if before is None:
                found[n] = dataclasses.replace(link, own=link.loads)
            else:
                last = found[before]
                assert isinstance(last, Segment)
                found[before] = dataclasses.replace(last, ahead=link.loads)
            before = n
        return found

    def _with_updates(
        self,
        links: Sequence[Segment | tuple[Outer, ...]],
        made: Mapping[jex.Var, int],
    ) -> Iterable[Segment | tuple[Outer, ...]]:
        """Links, with what is left of updates where it can be computed."""
        known = dict(made)
        # What is replaced is read no more.
        read: dict[jex.Var, int] = {}
        for n, link in enumerate(links):
            if isinstance(link, Segment):
                read |= dict.fromkeys(link.loads, n)
        after: dict[int, list[Outer]] = {}
        for node in self._updating:
            if node.left is None:
                n = max((known.get(v, 0) for v in node.reads), default=0)
                known |= dict.fromkeys(self._step.defines(node.position), n)
                after.setdefault(n, []).append(node)
                continue
            for n, piece in _pieces(node, known, read):
                assert piece.left is not None
                known |= dict.fromkeys(piece.left.results, n)
                after.setdefault(n, []).append(piece)
        for n, link in enumerate(links):
            yield link
            if n in after:
                yield tuple(after[n])


def _pieces(
    node: Outer, known: Mapping[jex.Var, int], read: Mapping[jex.Var, int]
) -> Iterable[tuple[int, Outer]]:
    """What is left of an update in pieces, each with the link that it comes after.

    Args:
      node: What is left of an update.
      known: The link after which a variable is known.
      read: The last link that reads an argument at rest.
    """
    left = node.left
    assert left is not None
    outputs: dict[int, list[int]] = {}
    numbers = [a for a in left.operands if not shape(a)]
    for each in independent(left.update):
        taken = variables([*numbers, *(left.operands[i] for i in each.inputs)])
        n = max((max(known.get(v, 0), read.get(v, 0)) for v in taken), default=0)
        outputs.setdefault(n, []).extend(each.outputs)
    for n, some in sorted(outputs.items()):
        if len(outputs) == 1:
            yield n, node
            return
        update, kept = left.update.restricted(sorted(some))
        operands = tuple(left.operands[i] for i in kept)
        results = tuple(left.results[k] for k in sorted(some))
        piece = RemainingUpdate(left.inlined, results, update, operands, at_once=True)
        yield n, Outer(node.position, tuple(variables(operands)), piece)


class Independent(NamedTuple):
    """Outputs of an update that others have no array in common with.

    Attributes:
      outputs: The outputs, as positions.
      inputs: The arrays that they depend on, as positions of inputs.
    """

    outputs: list[int]
    inputs: list[int]


def independent(update: Update) -> list[Independent]:
    """The outputs of an update, apart where no equation of arrays joins them.

    Those that depend on numbers alone, such as a count of steps, are together.
    """
    program = update.program
    arrays = dependents(program, {v for v in program.invars if shape(v)})
    joined = Components[jex.Var]()
    for e in program.equations:
        some = [v for v in (*variables(e.invars), *e.outvars) if v in arrays]
        if some:
            joined.join(some)
    found: dict[jex.Var | None, Independent] = {}
    for k, a in enumerate(program.outvars):
        root = joined.of(a) if isinstance(a, jex.Var) and a in arrays else None
        found.setdefault(root, Independent([], [])).outputs.append(k)
    for i, v in enumerate(program.invars):
        root = joined.of(v) if v in arrays else None
        if root is not None and root in found:
            found[root].inputs.append(i)
    return list(found.values())


def _is_taken(
    v: jex.Var,
    n: int,
    used: Mapping[jex.Var, set[int]],
    stored: Mapping[jex.Var, set[int]],
) -> bool:
    """Returns whether a later link takes a variable on the device."""
    return any(m > n for m in used.get(v, set()) - stored.get(v, set()))


def _nbytes(some: Iterable[jex.Var]) -> int:
    return sum(_memory.nbytes_on_each_device(v.aval) for v in some)
