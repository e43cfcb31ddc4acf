"""A step in segments, as a value: what each takes, makes, and does for the next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._ground.units import size_text
from optax_offload._places import memory, tpu_layout
from optax_offload._program import nbytes, shape
from optax_offload._schedule.rest import Outer


class Product(NamedTuple):
    """An equation that loads and stores are ordered by.

    Attributes:
      position: Its position.
      operand: What it takes, and is waited for by what begins before it.
      work: The work from it to the next one, in floating point operations.
      before: The results of earlier products that its operand does not need. Nothing
        else would keep a compiler from computing gradients of parameters last.
      large: Whether it makes far more than these, and so has to wait for them.
    """

    position: int
    operand: jex.Var
    work: int
    before: tuple[jex.Var, ...] = ()
    large: bool = False


class Move(NamedTuple):
    """What crosses the link at a moment of its own.

    Attributes:
      result: What is there after it: what is loaded, or what an update makes.
      nbytes: The bytes that cross it, on each device.
      gradients: What such an update is made of, if this is the first of its results.
    """

    result: jex.Var
    nbytes: int
    gradients: tuple[jex.Var, ...] = ()


class Stored(NamedTuple):
    """What an update stores.

    Attributes:
      stores: Its results on the host.
      gradients: What is there that they are made of.
      loads: What else they are made of, if that is loaded in the same turn.
    """

    stores: tuple[Move, ...]
    gradients: tuple[jex.Var, ...] = ()
    loads: tuple[Move, ...] = ()

    @property
    def moves(self) -> list[Move]:
        """The stores, the first of which waits for the gradients."""
        first, *others = self.stores
        return [first._replace(gradients=self.gradients), *others]


class Tie(NamedTuple):
    """A moment of a turn: all before a product is computed, and it has not begun.

    Attributes:
      product: The product.
      loads: What is loaded from then on.
      updates: What is updated and stored from then on.
      landed: What is there by then.
    """

    product: Product
    loads: tuple[Move, ...]
    updates: tuple[Move, ...]
    landed: tuple[jex.Var, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Updates and equations that are evaluated in a turn of their own.

    Attributes:
      positions: The equations, as positions.
      names: What rests on the host, by the variable that it is taken as.
      own: What it loads itself, first or as ties say.
      ahead: What it loads for the next segment, or has for it.
      stores: The variables that rest on the host from here on, until they are used.
      results: The variables that others take.
      updates: What is left of updates whose gradients earlier turns have completed, and
        what follows from these. They come before its equations.
      ties: When its loads begin, and when they are there.
      alone: Whether it loads nothing for the next segment.
    """

    positions: tuple[int, ...]
    names: Mapping[jex.Var, jex.Var]
    own: tuple[jex.Var, ...] = ()
    ahead: tuple[jex.Var, ...] = ()
    stores: tuple[jex.Var, ...] = ()
    results: tuple[jex.Var, ...] = ()
    updates: tuple[Outer, ...] = ()
    ties: tuple[Tie, ...] = ()
    alone: bool = False

    @property
    def loads(self) -> tuple[jex.Var, ...]:
        """What rests on the host and is taken."""
        return tuple(dict.fromkeys(self.names.values()))

    @property
    def loaded_itself(self) -> set[jex.Var]:
        """What it loads for its own updates, beside its products."""
        tied = {move.result for tie in self.ties for move in tie.loads}
        return tied.intersection(self.own)

    @property
    def replaced(self) -> dict[jex.Var, jex.Var | None]:
        """The argument that each result of its updates on the host replaces."""
        return {v: x for v, x in self._in_place() if memory.on_host(v.aval)}

    @property
    def rewritten(self) -> dict[jex.Var, jex.Var]:
        """What each result on the device is written in the place of, if anything."""
        in_place = ((v, x) for v, x in self._in_place() if x is not None)
        return {v: x for v, x in in_place if not memory.on_host(v.aval) and shape(v)}

    def _in_place(self) -> Iterator[tuple[jex.Var, jex.Var | None]]:
        for left in (node.left for node in self.updates if node.left):
            for k, v in enumerate(left.results):
                alias = left.update.in_place(k)
                before = None if alias is None else left.operands[alias]
                yield v, before if isinstance(before, jex.Var) else None


# A segment, or what is evaluated between two.
Link: TypeAlias = Segment | tuple[Outer, ...]


class StackRow(NamedTuple):
    """A residual's place in a stack on the host.

    Attributes:
      stack: The first of those that the stack has.
      row: Which of them it is.
      rows: How many it has.
    """

    stack: jex.Var
    row: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Chain:
    """A step as a chain.

    Attributes:
      links: Segments, and what is evaluated between them.
      codes: The arguments on the device that hold codes, which segments decode.
      rows: Residuals that rest in stacks, and not in a buffer of their own (F87).
    """

    links: tuple[Link, ...]
    codes: tuple[jex.Var, ...] = ()
    rows: Mapping[jex.Var, StackRow] = dataclasses.field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The segments, in order."""
        return [link for link in self.links if isinstance(link, Segment)]

    @property
    def between(self) -> list[Outer]:
        """What is evaluated between segments."""
        links = (link for link in self.links if not isinstance(link, Segment))
        return [node for link in links for node in link]

    @property
    def nodes(self) -> list[Outer]:
        """What is evaluated between segments, and the updates in them, in order."""
        updates = (x.updates if isinstance(x, Segment) else x for x in self.links)
        return [node for some in updates for node in some]

    @property
    def waiting(self) -> list[jex.Var]:
        """The gradients that rest on the host until all of them are there."""
        lefts = (node.left for node in self.nodes if node.left)
        return [v for x in lefts if x.update.only_stores for v in x.results]

    @property
    def residuals(self) -> list[jex.Var]:
        """The values that rest on the host from one segment to another."""
        return [v for s in self.segments for v in s.stores]

    @property
    def gradients(self) -> set[jex.Var]:
        """What a segment makes, and another one's update uses up."""
        made = {v for s in self.segments for v in s.results if shape(v)}
        nodes = (node for s in self.segments for node in s.updates if node.left)
        return made.intersection(v for node in nodes for v in node.reads)

    @property
    def most_kept(self) -> int:
        """The most bytes at once of what follows from updates, and waits to be used.

        What is between segments is evaluated as soon as all that it takes is there.
        """
        at: dict[jex.Var, int] = {}
        follows: set[jex.Var] = set()
        until: dict[jex.Var, int] = {}
        for n, link in enumerate(self.links):
            inside = isinstance(link, Segment)
            at |= dict.fromkeys(link.results if inside else (), n)
            for node in link.updates if inside else link:
                there = [at.get(v, 0) for v in node.reads]
                now = n if inside else max(there, default=0)
                kept = [v for v in node.reads if v in follows and at[v] < now]
                until |= {v: max(now, until.get(v, 0)) for v in kept}
                if node.left or not follows.isdisjoint(node.reads):
                    follows.update(node.defines)
                at |= dict.fromkeys(node.defines, now)
        change = [0] * len(self.links)
        for v, end in until.items():
            if shape(v) and not memory.on_host(v.aval):
                change[at[v]] += nbytes([v])
                change[end] -= nbytes([v])
        return max(itertools.accumulate(change))

    @property
    def moves_much(self) -> bool:
        """Whether many copies in flight are worth their memory."""
        loads = [s.loads for s in self.segments]
        in_all = nbytes({v for some in loads for v in some})
        now, most = limits.now, max(map(nbytes, loads))
        return in_all >= now.much_in_all_bytes or most >= now.much_in_a_turn_bytes

    def smaller_than(self, size: int) -> set[jex.Var]:
        """What segments load that has at most so many bytes, on each device."""
        return {v for s in self.segments for v in s.loads if nbytes([v]) <= size}

    def lines(self) -> Iterable[str]:
        """Lines on how a step was cut."""
        most = max(nbytes(s.loads) for s in self.segments)
        loaded = (
            f": {size_text(most)} of what rests on the host at most in one, loaded by "
            "the turn before"
        )
        itself = max(nbytes(s.loaded_itself) for s in self.segments)
        if itself:
            loaded += (
                f", or by itself beside its products ({size_text(itself)} at most)"
            )
        alone = sum(s.alone for s in self.segments)
        if alone:
            loaded += f", but after {alone} in which the most is in memory"
        yield (
            f"{len(self.segments)} turns of layers that no scan runs, each a loop that "
            "runs once" + loaded * bool(most)
        )
        if self.codes:
            yield (
                f"{size_text(nbytes(self.codes))} of codes on the device: each turn "
                "decodes those that it takes"
            )
        waiting = self.waiting
        made = {v for s in self.segments for v in s.replaced}
        updated = made.difference(waiting)
        if updated:
            yield (
                f"{size_text(nbytes(updated))} of state and parameters are updated by "
                "the turn after the one that completes their gradient (on a TPU "
                "between turns)"
            )
        if waiting:
            yield (
                f"{size_text(nbytes(waiting))} of gradients, whose update needs all of "
                "them first, are stored to host memory by the turn after, and loaded "
                "with their state"
            )
        if kept := self.most_kept:
            yield (
                f"{size_text(kept)} of what updates make is on the device "
                "until the step has used it, as new parameters that it evaluates"
            )
        if self.residuals:
            yield (
                f"{size_text(nbytes(self.residuals))} of residuals rest on the host "
                "between the turns that make and take them"
            )


def in_stacks(segments: Sequence[Segment]) -> dict[jex.Var, StackRow]:
    """The residuals that a TPU stores as rows of stacks.

    A buffer for all of a value is filled over the link where no type says how it is
    sharded, and is there twice (F87). In a stack that is read already no row is stored,
    or all of it is copied on the host. In a loop a compiler takes one for row-major.

    Args:
      segments: Those of a chain, in order.
    """
    growing: dict[Any, list[jex.Var]] = {}
    found: list[list[jex.Var]] = []
    for n, s in enumerate(segments):
        # A turn begins to load what the next one takes.
        taken = {v for x in segments[n : n + 2] for v in x.loads}
        for of, some in [*growing.items()]:
            if not taken.isdisjoint(some):
                found.append(growing.pop(of))
        for v in s.stores:
            if memory.explicit_sharding(v.aval) is None and len(shape(v)) > 1:
                growing.setdefault(memory.stack_type(v.aval, 1), []).append(v)
    stacks = filter(_may_be_a_stack, (*found, *growing.values()))
    return {
        v: StackRow(some[0], k, len(some))
        for some in stacks
        for k, v in enumerate(some)
    }


def _may_be_a_stack(some: Sequence[jex.Var]) -> bool:
    of = memory.stack_type(some[0].aval, len(some))
    axes = tpu_layout.order(of)
    return len(some) > 1 and axes == tuple(range(len(axes)))
