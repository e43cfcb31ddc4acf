"""A schedule: all that is decided of an update, as a value to print and test.

Nothing is traced here, and what carries a schedule out decides nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optax_offload._ground.units import Printed, size_text
from optax_offload._places import memory
from optax_offload._program import Branches, Update, described, find_branches
from optax_offload._schedule.updates import groups, sharing, window
from optax_offload._schedule.updates.group import Group
from optax_offload._schedule.updates.loops import Loop
from optax_offload._schedule.updates.passes import reading_passes
from optax_offload._schedule.updates.window import MOST_WINDOW_BYTES, Window


class Schedule(Printed):
    """What `Offloaded.schedule` returns: what an update moves when, and why so.

    Print it to read it: its window, its loops and their slices, and what is updated
    whole. It is of one of three types: an update straight through (`Straight`), one
    with passes that read its state first (`Phased`), or one that may keep its state
    (`Branched`).
    """


@dataclasses.dataclass(frozen=True)
class Alone:
    """A group in no loop.

    Attributes:
      group: The group.
      after: The groups, counted among those in no loop, that have to be updated before
        it is loaded, and that none before it waits for.
    """

    group: Group
    after: tuple[int, ...]


class OverWindow(NamedTuple):
    """State that is on the device at once although the window is smaller.

    Attributes:
      nbytes: Its bytes on each device.
      outputs: The outputs of its group, as positions.
      reason: The reason.
      joined: The inputs that tie it to the state of other parameters, as positions; ()
        where none does, or where all do.
    """

    nbytes: int
    outputs: tuple[int, ...]
    reason: str
    joined: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Straight(Schedule):
    """An update as an ordered list of stages.

    Attributes:
      stages: In the order in which they run: loops, and the groups that cannot be in
        one.
      scalars: The inputs that are loaded before all groups, as positions.
      shared: The equations that are evaluated whole before all groups, as positions.
      window: The bytes that may be on each device at once.
      why_nothing_moves: The reason why the rules move nothing; "" if they do.
    """

    stages: tuple[Alone | Loop, ...]
    scalars: tuple[int, ...]
    shared: tuple[int, ...]
    window: Window
    why_nothing_moves: str = ""

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The stages that are loops."""
        return tuple(s for s in self.stages if isinstance(s, Loop))

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, in the order in which they run."""
        stages = (s.groups if isinstance(s, Loop) else (s.group,) for s in self.stages)
        return tuple(group for found in stages for group in found)

    @property
    def whole(self) -> tuple[Group, ...]:
        """The groups that cannot be updated in slices."""
        return tuple(group for group in self.groups if group.row_local is None)

    def straights(self) -> tuple[Straight, ...]:
        """This one: see `Branched`."""
        return (self,)

    def updates(self, update: Update) -> tuple[tuple[Update, Straight], ...]:
        """All that is carried out of an update, each with its schedule."""
        return ((update, self),)

    def over_window(self, asked: int | None) -> Iterator[OverWindow]:
        """Yields groups and slices that exceed the window, given the one asked for."""
        for group in self.whole:
            if not group.loads or group.makes:
                continue  # New state is made once.
            if group.tied_by and group.nbytes > (asked or MOST_WINDOW_BYTES):
                joints = ", ".join(map(described, group.tied_by))
                why = (
                    f"{joints} takes the state of several parameters at once, so that "
                    "all of it has to be on the device together"
                )
            elif asked is not None and group.nbytes > asked:
                why = f"it cannot be updated in slices ({group.whole_reason})"
            else:
                continue
            joined = group.joined if len(group.joined) < len(group.loads) else ()
            yield OverWindow(group.nbytes, group.outputs, why, joined)
        for loop in self.loops:
            for group, _, nbytes in loop.members:
                sliced = group.row_local is not None and not group.makes
                if asked is not None and nbytes > asked and sliced:
                    yield OverWindow(
                        nbytes, group.outputs, "there are no smaller slices"
                    )

    def __str__(self) -> str:
        if self.why_nothing_moves:
            return self.why_nothing_moves
        sizes = [group.nbytes for group in self.groups]
        lines = [
            f"{_groups(len(sizes))} of {size_text(sum(sizes))} in all, the largest of "
            f"{size_text(max(sizes, default=0))}",
            *self._in_few_bits(),
            f"window of {size_text(self.window.nbytes)}: {self.window.reason}",
        ]
        alike = collections.Counter(map(_line, self.loops))
        lines += [f"{n} times: {line}" if n > 1 else line for line, n in alike.items()]
        if any(loop.rows for loop in self.loops) and memory.moved_by_kernels():
            lines.append(memory.moved_by_kernels())
        whole = (group.whole_reason for group in self.whole)
        reasons = collections.Counter(reason for reason in whole if reason)
        lines += [f"{_groups(n)} whole: {reason}" for reason, n in reasons.items()]
        return "\n".join(lines)

    def _in_few_bits(self) -> Iterator[str]:
        """A line on the bytes that cross the link, if codes make them fewer."""
        coded = [g for g in self.groups if 0 < g.moved_bytes < g.nbytes]
        if coded:
            decoded = size_text(sum(g.nbytes for g in coded))
            moved = size_text(sum(g.moved_bytes for g in coded))
            yield (
                f"{decoded} of these are decoded on the device; {moved} are at rest, "
                "and cross the link, in codes of 8 bits"
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Branched(Schedule):
    """An update that moves its state or keeps it, by a predicate.

    Attributes:
      branches: The predicate, and the update for each of its values.
      schedules: A schedule for each.
    """

    branches: Branches
    schedules: tuple[AnySchedule, AnySchedule]

    @property
    def cases(self) -> tuple[tuple[Update, AnySchedule], ...]:
        """The update if the predicate is 0, and if it is 1, each with its schedule."""
        return tuple(zip(self.branches.versions, self.schedules, strict=True))

    def straights(self) -> tuple[Straight, ...]:
        """The schedules of all versions."""
        return tuple(s for each in self.schedules for s in each.straights())

    def updates(self, update: Update) -> tuple[tuple[Update, Straight], ...]:
        """All versions, each with its schedule."""
        return tuple(x for version, each in self.cases for x in each.updates(version))

    def __str__(self) -> str:
        lines = []
        for label, each in zip(self._labels(), self.schedules, strict=True):
            lines += [label, *(f"  {line}" for line in str(each).splitlines())]
        return "\n".join(lines)

    def _headline(self) -> str:
        return "a schedule for steps that update the state, and one for those that keep"

    def _labels(self) -> tuple[str, str]:
        keep, update = "in a step that keeps its state:", "in a step that updates it:"
        zero, one = (
            sum(g.nbytes for s in each.straights() for g in s.groups)
            for each in self.schedules
        )
        return (keep, update) if zero <= one else (update, keep)


@dataclasses.dataclass(frozen=True, repr=False)
class Phased(Schedule):
    """An update that first reads its state for what is reduced over all of it.

    Attributes:
      passes: Updates whose outputs are what is reduced, with a schedule for each.
      update: The update, for which these are known.
      schedule: Its schedule.
    """

    passes: tuple[tuple[Update, Straight], ...]
    update: Update
    schedule: Straight

    def straights(self) -> tuple[Straight, ...]:
        """The schedules of all passes."""
        return (*(each for _, each in self.passes), self.schedule)

    def updates(self, update: Update) -> tuple[tuple[Update, Straight], ...]:
        """All passes, each with its schedule."""
        return (*self.passes, (self.update, self.schedule))

    def __str__(self) -> str:
        lines: list[str] = []
        for update, each in self.passes:
            count = len(update.outputs)
            lines += [f"a pass that reads state for {count} sums over all rows:"]
            lines += [f"  {line}" for line in str(each).splitlines()]
        lines += ["then, with these known:"]
        lines += [f"  {line}" for line in str(self.schedule).splitlines()]
        return "\n".join(lines)

    def _headline(self) -> str:
        return f"{len(self.passes)} passes that read state, and a schedule"


AnySchedule = Straight | Phased | Branched


def schedule(
    update: Update, window_bytes: int | None = None, *, at_once: bool = False
) -> AnySchedule:
    """Splits an update into groups and puts them in order.

    State that an equation joins, as a norm of all of it, is read first, in passes of
    their own, if it is more than the window.

    Groups are put into loops, up to 32 in each, in slices if they can be and need to
    be. Where a loop may start before all gradients are there, each group has its own if
    that uses the link about as well.

    Args:
      update: The update.
      window_bytes: The bytes that may be on each device at once. None: a sixteenth of
        the state, but at least 16 and at most 64 MiB.
      at_once: Whether all gradients are there before it, as for a version of an update.
    """
    found = find_branches(update)
    if found is not None:
        zero, one = (schedule(v, window_bytes, at_once=True) for v in found.versions)
        return Branched(found, (zero, one))
    most_bytes = window_bytes or MOST_WINDOW_BYTES
    passes, rest, grouping = reading_passes(update, most_bytes)
    last = _straight(grouping, window_bytes, at_once)
    if not passes:
        return last
    planned = tuple((x, _straight(groups.group(x), window_bytes, True)) for x in passes)
    return Phased(planned, rest, last)


def _straight(
    grouping: groups.Grouping, window_bytes: int | None, at_once: bool
) -> Straight:
    chosen = window.window(window_bytes, sum(g.nbytes for g in grouping.groups))
    at_once = at_once or grouping.joined
    stages = sharing.stages(grouping.groups, chosen.nbytes, at_once)
    apart = [stage.nbytes for stage in stages if isinstance(stage, Group)]
    waits = iter(window.waits(apart, chosen.nbytes))
    passed = 0
    ordered: list[Alone | Loop] = []
    for stage in stages:
        if isinstance(stage, Loop):
            ordered.append(stage)
            continue
        wait = next(waits)
        ordered.append(Alone(stage, tuple(range(passed, wait))))
        passed = max(passed, wait)
    return Straight(tuple(ordered), grouping.scalars, grouping.shared, chosen)


def _line(loop: Loop) -> str:
    groups, sizes = _groups(len(loop.groups)), _range(loop.slice_bytes)
    if not loop.rows:
        each = "updated whole" if len(loop.groups) == 1 else "each updated whole"
        return f"{groups}, {each}, of {sizes}"
    return (
        f"loop over {groups}, in {loop.slices} slices of {sizes}, "
        f"{loop.unroll} to an iteration"
    )


def _groups(count: int) -> str:
    return f"{count} group" + "s" * (count != 1)


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    if least == most:
        return size_text(most)
    return f"{size_text(least)} to {size_text(most)}"
