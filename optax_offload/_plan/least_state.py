"""The least state that has to move for a step to fit. Pure: it knows sums only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from optax_offload._plan.state import Selection

# All sums of so few are listed: some n^3 / 6 of n patterns, which are a few hundred at
# most. Of four there would be too many.
MOST_STAND_INS = 3
# Each attempt is a compilation. The second knows by how much the first was short.
STAND_IN_ATTEMPTS = 2


def smallest_that_fits(
    sizes: Sequence[int],
    used_bytes: Callable[[Selection], int],
    budget_bytes: int,
    attempts: int | None = None,
) -> Selection | None:
    """Returns the patterns to move so that a step fits, as few bytes as it finds.

    It takes patterns in order of preference until the step fits: how many are needed is
    found by interpolation and bisection. Then it tries to replace the last of them by
    smaller ones.

    Args:
      sizes: The bytes that each takes from the peak at most, in order of preference.
      used_bytes: Returns the peak with a selection moved, which is expensive. It is
        asked for no selection twice.
      budget_bytes: The bytes that may be used.
      attempts: The most selections to try between nothing and all; then the best one
        found is taken, and no pattern is replaced. None sets no limit.

    Returns:
      The positions in ``sizes`` of the patterns to move: an empty set if the step fits
      with none of them moved, None if it does not fit with all of them moved.
    """
    known: dict[Selection, int] = {}

    def ask(selection: Selection) -> int:
        if selection not in known:
            known[selection] = used_bytes(selection)
        return known[selection]

    if ask(_first(0)) <= budget_bytes:
        return _first(0)
    if ask(_first(len(sizes))) > budget_bytes:
        return None
    shortest = _shortest_sequence(sizes, ask, budget_bytes, attempts)
    if attempts is not None:
        return _first(shortest)
    return _with_stand_ins(sizes, ask, budget_bytes, shortest) or _first(shortest)


def _first(n: int) -> Selection:
    return frozenset(range(n))


def _shortest_sequence(
    sizes: Sequence[int],
    ask: Callable[[Selection], int],
    budget_bytes: int,
    attempts: int | None,
) -> int:
    """The least number of items, from the first on, with which the step fits.

    With none of them it does not fit, and with all of them it does. If the attempts
    run out, the result is the least number that was found to fit, or all.
    """
    total = [0, *itertools.accumulate(sizes)]
    low, high = 0, len(sizes)
    attempt = 0
    while high - low > 1 and (attempts is None or attempt < attempts):
        attempt += 1
        guess = (low + high) // 2
        # Every third guess bisects: a peak that is no straight line cannot hold it up.
        if attempt % 3:
            # Where the straight line between the two would meet the budget.
            over, under = ask(_first(low)), ask(_first(high))
            share = (over - budget_bytes) / max(over - under, 1)
            wanted = total[low] + share * (total[high] - total[low])
            guess = next(n for n in range(high + 1) if total[n] >= wanted)
        guess = min(max(guess, low + 1), high - 1)
        if ask(_first(guess)) <= budget_bytes:
            high = guess
        else:
            low = guess
    return high


def _with_stand_ins(
    sizes: Sequence[int],
    ask: Callable[[Selection], int],
    budget_bytes: int,
    shortest: int,
) -> Selection | None:
    """All but the last of a sequence, with smaller ones for it; None if none do.

    The last one may be much larger than what is missing without it.
    """
    others = range(shortest, len(sizes))
    short = ask(_first(shortest - 1)) - budget_bytes
    for _ in range(STAND_IN_ATTEMPTS):
        stand_ins = least_sum(sizes, others, short, sizes[shortest - 1])
        if stand_ins is None:
            return None
        selection = _first(shortest - 1) | stand_ins
        over = ask(selection) - budget_bytes
        if over <= 0:
            return selection
        short = sum(sizes[i] for i in stand_ins) + over
    return None


def least_sum(
    sizes: Sequence[int], positions: Sequence[int], least: int, below: int
) -> Selection | None:
    """The few positions whose sizes have the smallest sum that is in a range."""
    selections = (
        frozenset(selection)
        for count in range(1, MOST_STAND_INS + 1)
        for selection in itertools.combinations(positions, count)
    )
    sums = ((sum(sizes[i] for i in selection), selection) for selection in selections)
    enough = (x for x in sums if least <= x[0] < below)
    return min(
        enough, key=lambda x: (x[0], len(x[1]), sorted(x[1])), default=(0, None)
    )[1]
