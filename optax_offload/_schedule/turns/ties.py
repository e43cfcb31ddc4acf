"""When a turn loads and stores: beside which of its products, that hide it."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import compat, limits
from optax_offload._places import memory
from optax_offload._program import Program, Step, facts, flops_of, variables
from optax_offload._schedule.turns import placing
from optax_offload._schedule.turns.segments import (
    Link,
    Move,
    Product,
    Segment,
    Stored,
    Tie,
    nbytes,
)

# A device multiplies so much in the time in which it writes a byte.
FLOPS_PER_BYTE = 64


def products(program: Program, s: Segment) -> list[Product]:
    """The products of a segment, with what they take that is computed.

    In it, or before: nothing else would keep what a layer computes again from being
    computed for all layers of a segment first.
    """
    equations = program.equations
    found: list[Product] = []
    given = {*program.invars, *program.constants, *s.names}
    # The products that a variable needs, and those that were waited for.
    needs: dict[jex.Var, set[int]] = {}
    waited: set[int] = set()
    for i in s.positions:
        e = equations[i]
        work = flops_of(e)
        for v in variables(e.invars) if work else ():
            if v not in given:
                needs.setdefault(v, set())
        taken = [v for v in variables(e.invars) if v in needs]
        need = {n for v in taken for n in needs[v]}
        if work and taken:
            operand = max(taken, key=lambda v: len(needs[v]))
            others = [n for n in range(len(found)) if n not in needs[operand] | waited]
            before = [v for n in others for v in equations[found[n].position].outvars]
            waited |= needs[operand].union(others)
            need.add(len(found))
            large = bool(before) and _far_more(e.outvars, before)
            found.append(Product(i, operand, work, tuple(before), large))
        elif found and not facts(e).again:
            work = FLOPS_PER_BYTE * nbytes(e.outvars)
            found[-1] = found[-1]._replace(work=found[-1].work + work)
        needs |= dict.fromkeys(e.outvars, need)
    return found


def small_first(program: Program, positions: Sequence[int]) -> tuple[int, ...]:
    """The equations of a segment, products of small results before those of large.

    Of two that take the same cotangent. Both gradients of a product of probabilities
    and values do: with that of the probabilities, which is as large as these, first,
    both of them and what they are made of again would be there for the other one.
    Each equation moves once at most, and none past one with effects.
    """
    found, moved = list(positions), set[int]()
    for n, i in enumerate(positions):
        e = program.equations[i]
        if i in moved or not flops_of(e) or compat.has_effects(e):
            continue
        taken = {*variables(e.invars)}
        made, between = {*e.outvars}, list[int]()
        for j in (j for j in positions[n + 1 :] if j not in moved):
            other = program.equations[j]
            if compat.has_effects(other):
                break
            own = variables(other.invars)
            if not made.isdisjoint(own):
                made.update(other.outvars)
            elif not flops_of(other):
                between.append(j)
            else:
                smaller = _far_more(e.outvars, other.outvars)
                if smaller and not taken.isdisjoint(own):
                    for k in (*between, j):
                        found.remove(k)
                    at = found.index(i)
                    found[at:at] = [*between, j]
                    moved.update(found[at : at + len(between) + 1])
                break
    return tuple(found)


def _far_more(some: Iterable[jex.Var], others: Iterable[jex.Var]) -> bool:
    return nbytes(some) > 4 * nbytes(others)


def stored(s: Segment) -> Iterable[Stored]:
    """What each update of a segment stores, with what that is made of."""
    for left in (node.left for node in s.updates if node.left):
        for each in placing.independent(left.update):
            taken = dict.fromkeys(variables(left.operands[i] for i in each.inputs))
            made = (left.results[k] for k in each.outputs)
            stores = _moves(v for v in made if memory.on_host(v.aval))
            if stores:
                gradients = tuple(v for v in taken if v not in s.names)
                yield Stored(
                    stores, gradients, _moves(v for v in taken if v in s.names)
                )


def _moves(some: Iterable[jex.Var]) -> tuple[Move, ...]:
    moves = (Move(v, nbytes([v])) for v in some)
    return tuple(move for move in moves if move.nbytes >= limits.now.least_tied_bytes)


def ties(
    products: Sequence[Product], loads: Sequence[Move], updates: Sequence[Stored]
) -> tuple[Tie, ...]:
    """When loads and stores begin, so that each has products to be hidden behind.

    Left to itself, a GPU's compiler has all loads at the beginning of a turn, so that
    updates wait for theirs, and all that begins later where the last of it does (F88).

    Args:
      products: In their order.
      loads: What is loaded for the next turn.
      updates: What is stored, and loaded for that in this turn.
    """
    # What an update loads is there when it is stored.
    first = int(any(x.loads for x in updates))
    in_turn = _in_turn(products[first:], [x.moves for x in updates])
    storing = {first + k: moves for k, moves in in_turn.items()}
    stored = {move.result: k for k, moves in storing.items() for move in moves}
    own = [
        (move, stored[x.stores[0].result])
        for x in updates
        for move in x.loads * bool(storing)
    ]
    loading = _beside(products, loads, own)
    landed: dict[int, list[jex.Var]] = {}
    for moves in (loading, storing):
        for k, after in itertools.pairwise(sorted(moves)):
            landed.setdefault(after, []).extend(x.result for x in moves[k])
    return tuple(
        Tie(
            x,
            tuple(loading.get(k, ())),
            tuple(storing.get(k, ())),
            tuple(landed.get(k, ())),
        )
        for k, x in enumerate(products)
    )


def together(
    products: Sequence[Product], moves: Sequence[Move], stores: Sequence[Move]
) -> list[Product]:
    """Products, of which each short one and those after it are as one.

    A compiler begins a copy with the last other one before its end (F88), so each is to
    be as long as a part of the largest, and the last as that of what is stored then.

    Args:
      products: In their order.
      moves: What crosses the link in a turn, in the direction that has more.
      stores: What begins to be stored with the last of them.
    """
    room = _bytes(moves) / max(1, sum(x.work for x in products))
    most = max((x.nbytes for x in (*moves, *stores)), default=0)
    least = most / limits.now.most_products
    found: list[Product] = []
    waiting: tuple[jex.Var, ...] = ()
    for x in products:
        if found and found[-1].work * room < least and not x.large:
            found[-1] = found[-1]._replace(work=found[-1].work + x.work)
            waiting = (*waiting, *x.before)
        else:
            found.append(x._replace(before=(*waiting, *x.before)))
            waiting = ()
    least = max((x.nbytes for x in stores), default=0) / limits.now.most_products
    if len(found) > 1 and found[-1].work * room < least:
        last = found.pop()
        found[-1] = found[-1]._replace(work=found[-1].work + last.work)
    return found


def _beside(
    products: Sequence[Product], moves: Sequence[Move], own: Sequence[tuple[Move, int]]
) -> dict[int, list[Move]]:
    """What is loaded beside each product, the largest placed first.

    Args:
      products: In their order.
      moves: What may be loaded beside any.
      own: What has to be there by a product, and no longer before than it takes.
    """
    work = sum(x.work for x in products)
    total = _bytes(moves) + sum(move.nbytes for move, _ in own)
    if not work:
        return {}
    room = [x.work * total / work for x in products]
    found: dict[int, list[Move]] = {}

    def place(move: Move, among: range) -> None:
        k = max(among, key=room.__getitem__)
        room[k] -= move.nbytes
        found.setdefault(k, []).append(move)

    for move, k in own:
        place(move, range(max(0, k - 2), k))
    for move in sorted(moves, key=lambda x: -x.nbytes):
        place(move, range(len(room)))
    return found


def _in_turn(
    products: Sequence[Product], groups: Sequence[Sequence[Move]]
) -> dict[int, list[Move]]:
    """What is moved beside each product, in proportion to its work, one by one."""
    moves = [move for group in groups for move in group]
    work = max(1, sum(x.work for x in products))
    works = (x.work * _bytes(moves) / work for x in products)
    begins = [*itertools.accumulate(works, initial=0.0)][:-1]
    found: dict[int, list[Move]] = {}
    passed = 0
    for move in moves * bool(products):
        k = bisect.bisect_right(begins, passed + move.nbytes / 2) - 1
        found.setdefault(k, []).append(move)
        passed += move.nbytes
    return found


def _bytes(moves: Sequence[Move]) -> int:
    return sum(x.nbytes for x in moves)


def in_order(step: Step, links: Sequence[Link], turn_bytes: int) -> Iterator[Link]:
    """Yields links in which each segment loads what the next one takes, and when.

    Args:
      step: The step.
      links: Segments that say what they take, and what is between them.
      turn_bytes: The most that a turn loads for the updates of the next one; 0 for a
        TPU, whose compiler finds the moments itself.
    """
    segments = [link for link in links if isinstance(link, Segment)]
    turns = [_Turn.of(step, s, turn_bytes) for s in segments]
    pairs = zip(segments, turns[1:], strict=False)
    itself = [set[jex.Var](), *(x.loads_itself({*before.loads}) for before, x in pairs)]
    loads = [[v for v in s.loads if v not in itself[n]] for n, s in enumerate(segments)]
    found: list[Segment] = []
    for n, s in enumerate(segments):
        own = loads[n] if not n or segments[n - 1].alone else []
        own = (*own, *(v for v in s.loads if v in itself[n]))
        ahead = () if s.alone else tuple([*loads, []][n + 1])
        tied = turns[n].ties((v for v in ahead if v not in s.loads), itself[n])
        found.append(dataclasses.replace(s, own=own, ahead=ahead, ties=tied))
    ordered = iter(found)
    for link in links:
        yield next(ordered) if isinstance(link, Segment) else link


class _Turn(NamedTuple):
    """A segment, its products, and what its updates store; see `in_order`."""

    step: Step
    segment: Segment
    turn_bytes: int
    products: list[Product]
    updates: list[Stored]

    @classmethod
    def of(cls, step: Step, s: Segment, turn_bytes: int) -> _Turn:
        if not turn_bytes:
            return cls(step, s, 0, [], [])
        return cls(step, s, turn_bytes, products(step.program, s), [*stored(s)])

    def loads_itself(self, before: Set[jex.Var]) -> set[jex.Var]:
        """What updates load in their own turn: what is too much to be there before.

        Args:
          before: What the turn before has loaded for itself.
        """
        loads = {move.result for x in self.updates for move in x.loads}
        few = len(self.products) <= len(self.updates)
        if few or nbytes(loads) <= self.turn_bytes:
            return set()
        names = self.segment.names
        reads = (v for i in self.segment.positions for v in self.step.reads(i))
        return loads - before - {names.get(v) for v in reads}

    def ties(self, begin: Iterable[jex.Var], itself: Set[jex.Var]) -> tuple[Tie, ...]:
        """The moments of a turn.

        Args:
          begin: What it loads for the next one.
          itself: What its updates load in it.
        """
        updates = [
            x._replace(loads=tuple(move for move in x.loads if move.result in itself))
            for x in self.updates
        ]
        loads = _moves(begin)
        own = [move for x in updates for move in x.loads]
        stores = [move for x in updates for move in x.stores]
        most = max([*loads, *own], stores, key=_bytes)
        products = together(self.products, most, _moves(self.segment.stores))
        return ties(products, loads, updates)
