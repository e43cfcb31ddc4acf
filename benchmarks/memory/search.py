"""Finding the largest number that fits, in few compilations."""

from __future__ import annotations

import math
from collections.abc import Callable

END = 4096


def largest(
    probe: Callable[[int], tuple[bool, int]],
    memory_bytes: int,
    first: int = 8,
    end: int = END,
) -> int:
    """The largest number that fits, 0 if not even 1 does; below `end`.

    Args:
      probe: Tries a number: whether it fits, and the bytes that it needs.
      memory_bytes: What there is.
      first: The number to try first.
      end: A number that is taken not to fit.
    """
    fitting: dict[int, int] = {}
    failing: dict[int, int] = {}
    guess, turn = first, 0
    while True:
        fits, used_bytes = probe(guess)
        (fitting if fits else failing)[guess] = used_bytes
        low, high = max(fitting, default=0), min(failing, default=end)
        if high - low <= 1:
            return low
        turn += 1
        guess = _interpolate(fitting | failing, memory_bytes)
        if guess is None or (turn % 3 == 0 and failing):
            guess = (low + high) // 2 if failing else 2 * low
        if fits and guess >= high:
            guess = high - 1
        guess = min(max(guess, low + 1), high - 1)


def _interpolate(used: dict[int, int], memory_bytes: int) -> int | None:
    """The number whose peak would be all there is, by the two nearest to it."""
    if len(used) < 2:
        return None
    near = sorted(used, key=lambda n: abs(used[n] - memory_bytes))[:2]
    a, b = sorted(near)
    slope = (used[b] - used[a]) / (b - a)
    if slope <= 0:
        return None
    return a + math.floor((memory_bytes - used[a]) / slope)
