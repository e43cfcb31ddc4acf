"""Loops: their slices, the order of what they do, and how long that takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._ground.units import MIB
from optax_offload._host.link import LINK
from optax_offload._program import Program
from optax_offload._schedule.updates import window
from optax_offload._schedule.updates.group import Group

# Two slices have to fit into the window, so that one can be loaded while another is
# stored. Beyond these bytes slices need not grow, and more of them fit: they take 0.3
# ms each way by the link's model, thirty times its latency.
MOST_SLICE_BYTES = 16 * MIB
# The time in which a loop begins and ends, when nothing crosses the link.
LOOP_SECONDS = 40e-6
# One iteration of a loop and the next do not overlap: of n updates, each in two parts,
# the link is busy for 2 n parts in 2 n + 1. More cost compile time.
UPDATES_IN_AN_ITERATION = 32
# Of all loops of an update together. With more, iterations are halved until they have
# so many: a GPU's compiler takes a time that grows with their square (F84).
UPDATES_OF_A_STEP = 512
# State is made once, and its encoding takes long to compile.
MADE_IN_AN_ITERATION = 4
# However many fit the window: of more a TPU's compiler loads as many as fit, and only
# then stores them. What cannot be sliced, such as Muon's products, computes with more
# memory than it loads (F12).
MOST_AT_ONCE = 3
MOST_UNSLICED_AT_ONCE = 2


class SliceStep(NamedTuple):
    """A part of one slice, or of a whole leaf: loaded, computed and stored.

    Attributes:
      slice: The slice of the iteration that it is of, counted from 0.
      group: Position of its group in the loop.
      part: Position of the part in its group.
      load_after: The outputs that have to be stored before it is loaded, as positions.
      store_after: The outputs that have to be stored before its own are.
    """

    slice: int
    group: int
    part: int
    load_after: tuple[int, ...]
    store_after: tuple[int, ...]


class Remainder(NamedTuple):
    """A last slice, of the rows that are left when a loop ends.

    Attributes:
      group: Position of its group in the loop.
      rows: The number of rows that are left.
      first: The first of them.
    """

    group: int
    rows: int
    first: int


class Member(NamedTuple):
    """A group in a loop.

    Attributes:
      group: The group.
      rows: The number of rows in a slice of it; None where its leaves are whole.
      nbytes: The bytes of a slice, or of all of it, on each device.
    """

    group: Group
    rows: int | None
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """Groups that are updated together: slice by slice, or whole.

    Attributes:
      groups: The groups, in the order in which a slice of each is updated.
      slices: The number of slices that each leaf has in the loop.
      rows: The rows in a slice of each group. Rows that do not fill a slice are a last
        one, outside the loop. () where leaves are whole.
      unroll: The number of slices of each leaf that one iteration updates.
      waits: The number of updates, counted from the first of an iteration, that must
        have been stored before each of its updates is loaded.
    """

    groups: tuple[Group, ...]
    slices: int
    rows: tuple[int, ...]
    unroll: int
    waits: tuple[int, ...]

    @property
    def trip_count(self) -> int:
        """The number of iterations."""
        return self.slices // self.unroll

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """The bytes of a slice of each group, or of all of it, on each device."""
        return tuple(m.nbytes for m in self.members)

    @functools.cached_property
    def members(self) -> tuple[Member, ...]:
        """The groups, each with its slices."""
        return _members(self.groups, self.rows)

    @property
    def steps(self) -> tuple[SliceStep, ...]:
        """Steps of an iteration, in order."""
        return tuple(self._steps())

    @property
    def remainders(self) -> tuple[Remainder, ...]:
        """Groups that are updated when the loop has ended."""
        return tuple(
            Remainder(at, group.rows - self.slices * rows, self.slices * rows)
            for at, (group, rows, _) in enumerate(self.members)
            if rows is not None and group.rows > self.slices * rows
        )

    @functools.cached_property
    def cost(self) -> float:
        """The time that it takes, in bytes that the link could move in one direction.

        Costs are whole numbers, so that of loops that take equally long every machine
        chooses the same.

        A part is loaded while the one before is stored, which takes as long as the
        larger of them. Exceptions are the first and the last of an iteration, and those
        of a group in one part, which is loaded again only when it has been stored.
        Nothing runs beside the rows that remain when a loop has ended.
        """
        updates = [
            (m.group, m.nbytes + LINK.latency_bytes * len(m.group.loads))
            for m in self.members
        ]
        parts = [u / len(g.parts) for g, u in updates for _ in g.parts] * self.unroll
        iteration = parts[0] + sum(map(max, parts, parts[1:])) + parts[-1]
        total = self.trip_count * iteration + LINK.bytes_in(LOOP_SECONDS)
        in_turn = (u for g, u in updates if not g.parts[1:])
        left = sum(updates[rest.group][1] for rest in self.remainders)
        return max(total, 2 * self.slices * max(in_turn, default=0)) + 2 * left

    def over(self, groups: Sequence[Group]) -> Loop:
        """The loop for other groups, of which each measures as much as its own."""
        return dataclasses.replace(self, groups=tuple(_in_order(groups)))

    def inputs(self, program: Program) -> list[jex.Var]:
        """The variables that it takes to run the loop."""
        return list(dict.fromkeys(v for g in self.groups for v in g.reads(program)))

    def signature(self, program: Program) -> Hashable:
        """Equal for loops that only the names of their variables tell apart."""
        inputs = {v: i for i, v in enumerate(self.inputs(program))}
        groups = tuple(group.signature(program, inputs) for group in self.groups)
        return groups, self.slices, self.rows, self.unroll, self.waits

    def _steps(self) -> Iterator[SliceStep]:
        updates = [
            (i, at) for i in range(self.unroll) for at in range(len(self.groups))
        ]
        stored: list[tuple[int, ...]] = []
        passed = 0
        for (number, at), wait in zip(updates, self.waits, strict=True):
            group = self.groups[at]
            # The two parts of a group that is alone alternate, so that one is loaded
            # while the other is stored. Of several groups each follows its like (F13).
            lag = len(group.parts) if len(self.groups) > 1 else 1
            for n, part in enumerate(group.parts):
                earlier = (self.groups[x] for _, x in updates[passed:wait])
                load_after = (k for g in earlier for k in _before(group, g, n))
                # With slices only: else an H100's compiler stores them late, and keeps
                # them (F04).
                previous = stored[-lag] if len(stored) >= lag and self.rows else ()
                if set(previous) <= set(part.outputs):
                    previous = ()
                yield SliceStep(number, at, n, tuple(load_after), previous)
                stored.append(part.outputs)
            passed = max(passed, wait)


def _before(group: Group, earlier: Group, n: int) -> tuple[int, ...]:
    """The outputs of an earlier group that the n-th part of a group comes after."""
    if group is earlier and not (group.sums or group.makes):
        return ()  # It reads what that has written anyway.
    like = len(earlier.parts) == len(group.parts)
    return earlier.parts[n].outputs if like else earlier.outputs


def fastest(groups: Sequence[Group], window_bytes: int) -> Loop | None:
    """The fastest loop of which two slices, or leaves, fit into the window.

    Then one can be loaded while the one before is stored. Slices of a single group are
    loaded and stored one after the other, so that one may fill the window. None if
    there is no such loop.
    """
    groups = _in_order(groups)
    several = len(groups) > 1
    half = window_bytes / 2
    bound = min(half, MOST_SLICE_BYTES) if several else window_bytes
    # A leaf is whole where two would fit, also alone: else all of it is there at the
    # peak (F63).
    largest = max(g.nbytes for g in groups)
    fits = largest <= min(bound, half) and not any(g.makes for g in groups)
    whole = compat.LOOPS_RUN_ONCE and fits
    loops = [_loop_of(groups, 1, (), window_bytes)] if whole else []
    if all(g.row_local is not None for g in groups):
        loops += _slice_loops(groups, window_bytes, bound)
    elif not several and not whole:
        return _loop_of(groups, 1, (), window_bytes)
    return min(loops, key=lambda loop: loop.cost, default=None)


def _in_order(groups: Sequence[Group]) -> Sequence[Group]:
    """Groups in the order in which a loop updates them.

    If sizes differ, the smallest come first and last, where nothing is stored or loaded
    beside them, and the largest come between, beside each other.
    """
    sizes = [group.nbytes for group in groups]
    if max(sizes) <= 2 * min(sizes):
        return groups
    ascending = sorted(groups, key=lambda group: group.nbytes)
    return ascending[0::2] + ascending[1::2][::-1]


def _slice_loops(
    groups: Sequence[Group], window_bytes: int, bound: float
) -> list[Loop]:
    """Loops over slices of at most so many bytes, if the groups have any like slices.

    Several groups have to be cut into the same number of slices, each of like size.
    """
    least = max(2, math.ceil(max(g.nbytes for g in groups) / bound))
    common = math.gcd(*(g.rows // g.row_multiple for g in groups))
    in_slices: list[list[int]] = []
    if all(g.rows % g.row_multiple == 0 for g in groups):
        most = min(8 * least - 1, common)
        divisors = [d for d in range(least, most + 1) if common % d == 0]
        # A number of slices that divides is within twice of what is needed, or not
        # used.
        if divisors and divisors[0] < 2 * least:
            in_slices = [[g.rows // d for g in groups] for d in divisors]
    if not in_slices and len(groups) == 1:
        counts = range(least, min(2 * least, least + UPDATES_IN_AN_ITERATION))
        units = dict.fromkeys(max(1, common // count) for count in counts)
        in_slices = [[n * groups[0].row_multiple] for n in units]
    return [
        loop for rows in in_slices for loop in _loops_of(groups, rows, window_bytes)
    ]


def _loops_of(
    groups: Sequence[Group], rows: Sequence[int], window_bytes: int
) -> list[Loop]:
    """One or two loops over slices of so many rows; the cheaper one is chosen later.

    The first loop takes all full slices. If they are all of the rows, a second loop
    leaves the last slice for after the loop: a prime number of slices, such as those of
    61 layers, cannot be divided into equal iterations, and one fewer can.
    """
    slices, rest = divmod(groups[0].rows, rows[0])
    least = slices if rest else max(2, slices - 1)
    numbers = range(slices, least - 1, -1)
    return [_loop_of(groups, n, rows, window_bytes) for n in numbers]


def in_short_iterations(
    stages: Sequence[Group | Loop], window_bytes: int
) -> list[Group | Loop]:
    """Stages with fewer updates in each iteration, where all have too many (F84)."""
    most, found = UPDATES_IN_AN_ITERATION, list(stages)
    while most > 2 and _updates_in(found) > UPDATES_OF_A_STEP:
        most //= 2
        found = [
            _loop_of(x.groups, x.slices, x.rows, window_bytes, most)
            if isinstance(x, Loop) and x.unroll > max(1, most // len(x.groups))
            else x
            for x in found
        ]
    return found


def _updates_in(stages: Sequence[Group | Loop]) -> int:
    return sum(x.unroll * len(x.groups) for x in stages if isinstance(x, Loop))


def _loop_of(
    groups: Sequence[Group],
    slices: int,
    rows: Sequence[int],
    window_bytes: int,
    at_most: int = UPDATES_IN_AN_ITERATION,
) -> Loop:
    # Two iterations at least: a GPU's copy engines take only slices whose position
    # follows from the counter of a loop, and of a loop of one it has none (F14).
    makes = any(group.makes for group in groups)
    updates = min(at_most, MADE_IN_AN_ITERATION) if makes else at_most
    most = min(updates // len(groups), slices // 2)
    unroll = next((n for n in range(most, 1, -1) if slices % n == 0), 1)
    sizes = [m.nbytes for m in _members(groups, rows)]
    waits = window.waits(sizes * unroll, window_bytes)
    if len(groups) > 1:
        # A group's next slice waits for the one before anyway.
        sliceable = all(group.row_local is not None for group in groups)
        at_once = MOST_AT_ONCE if sliceable else MOST_UNSLICED_AT_ONCE
        at_once = min(at_once, len(groups))
        waits = tuple(max(wait, k + 1 - at_once) for k, wait in enumerate(waits))
        if all(len(group.parts) > 1 for group in groups[-2:]):
            # Else a v5e's compiler loads the last two at once, and stores them late
            # (F07).
            waits = (*waits[:-1], len(waits) - 1)
    return Loop(tuple(groups), slices, tuple(rows), unroll, waits)


def _members(groups: Sequence[Group], rows: Sequence[int]) -> tuple[Member, ...]:
    """Groups in slices of so many rows, or whole where these are ()."""
    if not rows:
        return tuple(Member(g, None, g.nbytes) for g in groups)
    return tuple(
        Member(g, n, math.ceil(g.nbytes * n / g.rows))
        for g, n in zip(groups, rows, strict=True)
    )
