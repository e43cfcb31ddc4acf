"""Which state to move first, and how much of it: families of leaves, and a search.

Pure: sizes go in, positions come out; what a choice needs is asked from a function.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

from optax_offload import _rules


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the optimizer's state.

    Attributes:
      path: as rules see it.
      nbytes: over all devices; None for one that cannot move.
      nbytes_per_device: of it on each device.
      slice_axis: the first axis that is not sharded; None if there is none.
      stacked: it has three dimensions or more, as layers under `nn.scan` have.
    """

    path: str
    nbytes: int | None
    nbytes_per_device: int
    slice_axis: int | None
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Family:
    r"""Leaves that differ in numbers only (``0/mu/layers_3/kernel``), moved together.

    Attributes:
      pattern: the regex that matches them, as in ``\d+/mu/layers_\d+/kernel``.
      leaves: those that are moved.
    """

    pattern: str
    leaves: tuple[Leaf, ...]

    @property
    def nbytes_per_device(self) -> int:
        """What its move takes off each device."""
        return sum(leaf.nbytes_per_device for leaf in self.leaves)

    @property
    def slice_axis(self) -> int | None:
        """The axis along which all of its leaves can be sliced."""
        axes = {leaf.slice_axis for leaf in self.leaves}
        return axes.pop() if len(axes) == 1 else None

    @property
    def stacked(self) -> bool:
        """Whether all of its leaves are."""
        return all(leaf.stacked for leaf in self.leaves)


def pattern_of(path: str) -> str:
    r"""The regex of a path's family.

    Example:
      >>> pattern_of("0/mu/layers_10/kernel")
      '\\d+/mu/layers_\\d+/kernel'
    """
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(path))


def families(
    leaves: Sequence[Leaf], min_bytes: int = _rules.DEFAULT_MIN_BYTES
) -> list[Family]:
    """Groups leaves, in the order in which they should be moved.

    What can be sliced comes first (a move takes all of it from the peak; of other
    leaves a whole one comes back for its update), stacked leaves before matrices, and
    large before small: fewer rules, in longer transfers. Leaves under ``min_bytes``
    are left out, as `Rule` does.
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.nbytes is not None and leaf.nbytes >= min_bytes:
            groups.setdefault(pattern_of(leaf.path), []).append(leaf)
    found = [Family(pattern, tuple(group)) for pattern, group in groups.items()]
    return sorted(
        found,
        key=lambda f: (
            f.slice_axis is None,
            not f.stacked,
            -f.nbytes_per_device,
            f.pattern,
        ),
    )


Choice = frozenset[int]


def fewest(
    sizes: Sequence[int], used: Callable[[Choice], int], budget_bytes: int
) -> Choice | None:
    """The choice that moves least such that what is used fits the budget.

    It is the shortest sequence of the first, second, ... that fits, found by
    interpolation and bisection; then, if some smaller ones can stand in for the last of
    them, those are taken.

    Args:
      sizes: what each takes from the peak at most, in order of preference.
      used: the peak with a choice moved, which is expensive. It is asked for no choice
        twice.
      budget_bytes: what there is.

    Returns:
      Positions in ``sizes``; None if not even all of them suffice.
    """
    known: dict[Choice, int] = {}

    def ask(choice: Choice) -> int:
        if choice not in known:
            known[choice] = used(choice)
        return known[choice]

    def first(n: int) -> Choice:
        return frozenset(range(n))

    if ask(first(0)) <= budget_bytes:
        return first(0)
    if ask(first(len(sizes))) > budget_bytes:
        return None
    total = [0, *itertools.accumulate(sizes)]
    low, high = 0, len(sizes)
    turn = 0
    while high - low > 1:
        turn += 1
        guess = (low + high) // 2
        if turn % 3:
            # Where the straight line between the two would meet the budget.
            over, under = ask(first(low)), ask(first(high))
            share = (over - budget_bytes) / max(over - under, 1)
            wanted = total[low] + share * (total[high] - total[low])
            guess = next(n for n in range(high + 1) if total[n] >= wanted)
        guess = min(max(guess, low + 1), high - 1)
        if ask(first(guess)) <= budget_bytes:
            high = guess
        else:
            low = guess
    # The last one may be much larger than what is missing without it.
    short = ask(first(low)) - budget_bytes
    for _ in range(2):
        stand_in = _least(sizes, range(high, len(sizes)), short, sizes[high - 1])
        if stand_in is None:
            break
        choice = first(low) | stand_in
        over = ask(choice) - budget_bytes
        if over <= 0:
            return choice
        short = sum(sizes[i] for i in stand_in) + over
    return first(high)


def _least(
    sizes: Sequence[int], positions: Sequence[int], least: int, below: int
) -> Choice | None:
    """The few positions whose sizes have the smallest sum that is in a range."""
    choices = (
        frozenset(choice)
        for count in (1, 2, 3)
        for choice in itertools.combinations(positions, count)
    )
    sums = ((sum(sizes[i] for i in choice), choice) for choice in choices)
    enough = (x for x in sums if least <= x[0] < below)
    return min(
        enough, key=lambda x: (x[0], len(x[1]), sorted(x[1])), default=(0, None)
    )[1]
