"""Groups put into loops: which share one, and which have their own."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from optax_offload._ground.units import MIB
from optax_offload._schedule.updates.group import Group
from optax_offload._schedule.updates.loops import (
    UPDATES_IN_AN_ITERATION,
    Loop,
    fastest,
    in_short_iterations,
)

# Loops of one group each may start when its gradient is there, those that need two or
# more no compiler starts as early (F63). They may take so many times as long: 1.25
# times where that is worth it (`unequal` on a v5e), 1.34 where it is not (16 leaves on
# an H100).
MOST_TIMES_APART = 1.3
# The gradients of a loop wait for the last of them: it is full with so many groups that
# are so large. Half as many take 2.7 % longer (16 leaves on an H100).
LEAST_SHARING = 4
MOST_SHARED_BYTES = 256 * MIB
# Of models with leaves of several shapes, whose layers alternate.
MOST_UNFILLED_LOOPS = 4


def stages(
    groups: Sequence[Group], window_bytes: int, at_once: bool = False
) -> list[Group | Loop]:
    """Puts the groups that have buffers to be written into into loops.

    Each has a loop of its own, so that its gradient need not be kept until others are
    there, unless all of them are there anyway or the link is used much better if they
    share loops.

    Args:
      groups: The groups, in the order in which their gradients come.
      window_bytes: The bytes that may be on each device at once.
      at_once: Whether all gradients have to be there before the first loop.
    """
    found = _in_shared_loops(groups, window_bytes, math.inf)
    if not at_once:
        loops = _Loops(window_bytes)
        apart = [loops.alone(g) if g.in_place else g for g in groups]
        if _cost_of(apart) <= MOST_TIMES_APART * _cost_of(found):
            found = apart
        else:
            found = _in_shared_loops(groups, window_bytes, MOST_SHARED_BYTES)
    return in_short_iterations(found, window_bytes)


def _cost_of(stages: Sequence[Group | Loop]) -> float:
    return sum(stage.cost for stage in stages if isinstance(stage, Loop))


def _in_shared_loops(
    groups: Sequence[Group], window_bytes: int, most: float
) -> list[Group | Loop]:
    """A group joins the last loop that it makes no slower, of those that are not full.

    Few may be unfilled at a time.

    Args:
      groups: The groups, in the order in which their gradients come.
      window_bytes: The bytes that may be on each device at once.
      most: The bytes of all groups with which a loop is full.
    """
    found: list[Group | Loop] = []
    unfilled: list[Loop] = []
    loops = _Loops(window_bytes)
    for group in groups:
        if not group.in_place:
            found.append(group)
            continue
        alone = loops.alone(group)
        for at in reversed(range(len(unfilled))):
            joined = loops.fastest([*unfilled[at].groups, group])
            apart = unfilled[at].cost + alone.cost
            if joined and joined.cost <= apart:
                unfilled[at] = joined
                break
        else:
            at = len(unfilled)
            unfilled.append(alone)
        count = len(unfilled[at].groups)
        much = sum(g.nbytes for g in unfilled[at].groups) >= most
        if (much and count >= LEAST_SHARING) or count == UPDATES_IN_AN_ITERATION:
            found.append(unfilled.pop(at))
        elif len(unfilled) > MOST_UNFILLED_LOOPS:
            found.append(unfilled.pop(0))
    return found + unfilled


class _Loops:
    """Loops over groups, looked for once for groups that measure as much."""

    def __init__(self, window_bytes: int):
        self._window_bytes = window_bytes
        self._found: dict[Hashable, Loop | None] = {}

    def fastest(self, groups: Sequence[Group]) -> Loop | None:
        """The fastest loop over groups, if there is one."""
        measures = tuple(group.measures for group in groups)
        if measures not in self._found:
            self._found[measures] = fastest(groups, self._window_bytes)
        found = self._found[measures]
        return None if found is None else found.over(groups)

    def alone(self, group: Group) -> Loop:
        """The fastest loop over one group."""
        found = self.fastest([group])
        assert found is not None, "any group can be in a loop of its own"
        return found
