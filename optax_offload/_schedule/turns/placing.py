"""What is left of updates, placed between the turns of a chain, or in one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Components,
    Step,
    Update,
    dependents,
    find_branches,
    flops_of,
    nbytes,
    shape,
    variables,
)
from optax_offload._schedule import late
from optax_offload._schedule.chosen_state import is_reduced
from optax_offload._schedule.rest import Outer, RemainingUpdate
from optax_offload._schedule.turns.segments import Chain, Link, Segment

# A moment of a chain: a link, and before its equations, among them, or after them.
_Moment = tuple[int, int]
_BEFORE, _AMONG, _AFTER = range(3)


class Room(NamedTuple):
    """What there is room for in turns.

    Attributes:
      turn_bytes: The most that the turn before loads for the updates of a turn; 0 for
        updates that are all between turns.
      alive: The most bytes that are alive in each link, but for gradients.
    """

    turn_bytes: int
    alive: Sequence[int]


class Placing:
    """What is left of updates, each in the turn after the one that completes it.

    What takes a large part of the memory waits for the turn in which least is alive.
    What would make that the fullest one, what takes more than a turn has products for,
    what moves its state in some steps only, and what is reduced over state, is between
    the turns.
    """

    def __init__(
        self,
        step: Step,
        links: Sequence[Link],
        made: Mapping[jex.Var, int],
        *,
        room: Room,
        on_host: Collection[jex.Var],
    ):
        """A chain whose updates have no place yet.

        Args:
          step: The step.
          links: Its links, with their equations alone.
          made: The link that makes each variable.
          room: What there is room for in each.
          on_host: The gradients that are on the host where they wait for others.
        """
        self._step, self._links, self._turn_bytes = step, list(links), room.turn_bytes
        self._on_host, self._alive = on_host, [*room.alive]
        part = int(limits.now.least_freed_part * max(room.alive))
        self._much = max(limits.now.least_freed_bytes, part)
        self._known = {v: (n, _AMONG) for v, n in made.items()}
        # Gradients that wait, and where they do.
        self._waiting: dict[jex.Var, jex.Var] = {}
        # What is replaced is read no more.
        self._read: dict[jex.Var, _Moment] = {}
        for n, link in enumerate(links):
            if isinstance(link, Segment):
                self._read |= dict.fromkeys(link.loads, (n, _AMONG))
        self._last_link = len(self._links) - 1
        self._segments = [n for n, x in enumerate(links) if isinstance(x, Segment)]
        self._inside: dict[int, list[Outer]] = {}
        self._after: dict[int, list[Outer]] = {}
        # The bytes that updates of a turn load, for each of them.
        self._taken: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}

    def place(self, node: Outer) -> None:
        """Places what is left of an update in pieces, or what follows from updates."""
        if node.left is not None:
            self._place_pieces(node, node.left)
            return
        at = max((self._known.get(v, _FIRST) for v in node.reads), default=_FIRST)
        self._put(node, self._following(node, at))

    def _place_pieces(self, node: Outer, left: RemainingUpdate) -> None:
        """Places parts of an update that others have no array in common with.

        Those of a turn are one, so that what they have in common is computed once.
        """
        asked = left.inlined.what.caller.window_bytes
        in_turns = self._turn_bytes and find_branches(left.update) is None
        pieces: dict[_Moment, list[int]] = {}
        waiting: dict[int, jex.Var] = {}
        for each, at in self._complete(left):
            taken = variables(left.operands[i] for i in each.inputs)
            resting = [v for v in dict.fromkeys(taken) if memory.on_host(v.aval)]
            wait = [i for i in each.inputs if self._waits(left.operands[i], at)]
            made = nbytes(left.results[k] for k in each.outputs)
            at = (
                self._turn(at, nbytes(resting), made, asked)
                if in_turns and not wait and any(map(shape, resting))
                else (at[0], _AFTER)
            )
            pieces.setdefault(at, []).extend(each.outputs)
            path = left.update.paths[each.outputs[0]]
            for i in wait:
                (v,) = variables([left.operands[i]])
                if v in self._on_host:
                    waiting[i] = self._stored(node, left, v, path)
        if waiting:
            update, operands = left.update, left.operands
            left = left._replace(
                update=update.with_inputs_on_host({*update.loads, *waiting}),
                operands=tuple(waiting.get(i, a) for i, a in enumerate(operands)),
            )
            node = Outer.update(node.position, left)
        for at, outputs in sorted(pieces.items()):
            if at == (self._last_link, _AFTER):
                # What the last turn has loaded is updated before.
                at = len(self._links) - 1, _AFTER
            piece = node if len(pieces) == 1 else _piece(node, left, sorted(outputs))
            self._put(piece, at)

    def _complete(self, left: RemainingUpdate) -> list[tuple[Independent, _Moment]]:
        """Parts of an update, each with the moment when all that it takes is there."""
        program = left.update.program
        at: dict[jex.Var, _Moment] = {}
        for v, a in zip(program.invars, left.operands, strict=True):
            at[v] = self._last(a) if isinstance(a, jex.Var) else _FIRST

        def last(some: Iterable[Atom]) -> _Moment:
            return max((at.get(v, _FIRST) for v in variables(some)), default=_FIRST)

        for e in program.equations:
            at |= dict.fromkeys(e.outvars, last(e.invars))
        found: list[tuple[Independent, _Moment]] = []
        for each in independent(left.update):
            made = last(program.outvars[k] for k in each.outputs)
            found.append(
                (each, max(made, last(program.invars[i] for i in each.inputs)))
            )
        return found

    def _waits(self, a: Atom, at: _Moment) -> bool:
        """Returns whether what a turn makes is updated later than in the next."""
        if not isinstance(a, jex.Var) or a not in self._known or not shape(a):
            return False
        return at[0] > self._next(self._known[a])

    def _stored(
        self, node: Outer, left: RemainingUpdate, v: jex.Var, path: str
    ) -> jex.Var:
        """Where a gradient waits, which the turn after the one that makes it stores."""
        if v not in self._waiting:
            result = self._waiting[v] = jex.Var(memory.host_type(v.aval))
            update = late.stored(left.update, v, path)
            store = RemainingUpdate(left.inlined, (result,), update, (v,))
            at = self._known[v]
            at = self._turn(at) if self._turn_bytes else (at[0], _AFTER)
            self._put(Outer.update(node.position, store), at)
        return self._waiting[v]

    def _last(self, v: jex.Var) -> _Moment:
        """When a variable is known, and what it replaces is read no more."""
        return max(self._known.get(v, _FIRST), self._read.get(v, _FIRST))

    def links(self, wanted: Collection[jex.Var]) -> list[Link]:
        """The links, with all that was placed.

        Args:
          wanted: What is taken after the chain, too.
        """
        found: list[Link] = []
        for n, link in enumerate(self._links):
            inside = self._inside.get(n)
            if isinstance(link, Segment) and inside:
                link = self._with_updates(link, inside, wanted)
            found.append(link)
            if n in self._after:
                found.append(tuple(self._after[n]))
        return found

    def _put(self, node: Outer, at: _Moment) -> None:
        where = self._inside if at[1] == _BEFORE else self._after
        where.setdefault(at[0], []).append(node)
        self._known |= dict.fromkeys(node.defines, at)

    def _turn(
        self, at: _Moment, size: int = 0, made: int = 0, asked: int | None = None
    ) -> _Moment:
        """The moment at which what is complete is updated.

        Args:
          at: When all that it takes is there.
          size: The bytes that it loads.
          made: The bytes that it makes.
          asked: The most that are loaded for the updates of a turn, if that was asked.
        """
        n = self._next(at)
        if n == self._segments[0]:  # Nothing has loaded for it.
            return at[0], _AFTER
        if asked is None:
            n = self._emptiest(n, size, made)
        full = asked is None and self._is_too_much(n, size, made)
        if full or not self._has_room(n, size, asked):
            return at[0], _AFTER
        if n == len(self._links):
            self._links.append(Segment((), {}))
            self._segments.append(n)
            self._alive.append(0)
        self._taken.setdefault(n, []).append(size)
        self._alive[n] += size + made
        return n, _BEFORE

    def _next(self, at: _Moment) -> int:
        """The turn that updates, or stores, what is there at a moment."""
        n, when = at
        if when == _BEFORE:
            return n
        later = [m for m in self._segments if m > n] or [len(self._links)]
        return next((m for m in later if self._products(m)), later[0])

    def _has_room(self, n: int, size: int, asked: int | None) -> bool:
        """Whether the turn before loads so much more, or a product is beside it."""
        taken = self._taken.get(n, [])
        full = sum(taken) + size > (asked or self._turn_bytes)
        return not full or (asked is None and len(taken) + 1 < self._products(n))

    def _emptiest(self, n: int, size: int, made: int) -> int:
        """The turn in which least is alive, if that is less by what is large."""
        if size + made <= self._much or n == len(self._links):
            return n
        later = (m for m in self._segments if m > n and self._products(m))
        roomy = (m for m in later if self._has_room(m, size, None))
        m = min(roomy, key=self._alive.__getitem__, default=n)
        return m if self._alive[m] + size + made <= self._alive[n] else n

    def _is_too_much(self, n: int, size: int, made: int) -> bool:
        """Whether a turn would be the one in which most is alive, by what is large.

        Between turns it takes slices of it.
        """
        more = size + made
        alive = self._alive[n] if n < len(self._alive) else 0
        return more > self._much and alive + more > max(self._alive)

    def _products(self, n: int) -> int:
        """How many products a link has; none if it is not there yet."""
        if n not in self._counts:
            link = self._links[n] if n < len(self._links) else ()
            positions = link.positions if isinstance(link, Segment) else ()
            equations = self._step.program.equations
            self._counts[n] = sum(1 for i in positions if flops_of(equations[i]))
        return self._counts[n]

    def _following(self, node: Outer, at: _Moment) -> _Moment:
        """The moment at which an equation is evaluated that follows from updates.

        It is beside the update. What it reduces of one that is between turns is free
        after the next of them.

        Args:
          node: The equation.
          at: When all that it takes is there.
        """
        e = self._step.program.equations[node.position]
        if node.at_rest or node.in_turns or self._step.tokens(node.position):
            return at[0], _AFTER
        if at[1] == _BEFORE:
            return at
        after = [n for n in self._segments if n > at[0]]
        arrays = any(map(shape, e.invars))
        if after and arrays and is_reduced(self._step.program, node.position):
            return after[0], _BEFORE
        return at[0], _AFTER

    def _with_updates(
        self, segment: Segment, inside: Sequence[Outer], wanted: Collection[jex.Var]
    ) -> Segment:
        """A segment that updates before it evaluates its own equations."""
        taken = {v: v for node in inside for v in _resting(node)}
        made = [v for node in inside for v in node.defines]
        elsewhere = {*wanted}
        for nodes in (*self._inside.values(), *self._after.values()):
            if nodes is not inside:
                elsewhere.update(v for node in nodes for v in node.reads)
        results = [v for v in made if v in elsewhere]
        return dataclasses.replace(
            segment,
            names={**taken, **segment.names},
            results=(*results, *segment.results),
            updates=tuple(inside),
        )


_FIRST: _Moment = (0, _AFTER)


def _resting(piece: Outer) -> list[jex.Var]:
    """What an update takes that rests on the host."""
    if piece.left is None:
        return []
    taken = dict.fromkeys(variables(piece.left.operands))
    return [v for v in taken if memory.on_host(v.aval)]


def _piece(node: Outer, left: RemainingUpdate, outputs: Sequence[int]) -> Outer:
    """What is left of an update for some of its outputs."""
    update, kept = left.update.restricted(outputs)
    operands = tuple(left.operands[i] for i in kept)
    results = tuple(left.results[k] for k in outputs)
    piece = RemainingUpdate(left.inlined, results, update, operands, at_once=True)
    return Outer.update(node.position, piece)


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


def of_waiting(chain: Chain) -> dict[jex.Var, list[jex.Var]]:
    """What is updated with each gradient that waits, of its shape.

    Args:
      chain: The chain.
    """
    waiting, found = {*chain.waiting}, dict[jex.Var, list[jex.Var]]()
    for left in (node.left for node in chain.nodes if node.left):
        for each in independent(left.update):
            taken = variables(left.operands[i] for i in each.inputs)
            for g in waiting.intersection(taken):
                found[g] = [v for v in taken if v is not g and shape(v) == shape(g)]
    return found
