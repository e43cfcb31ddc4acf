"""Finding the largest number that fits, in few compilations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def largest(
    probe: Callable[[int], tuple[bool, int]],
    memory_bytes: int,
    first: int = 8,
    end: int = 4096,
) -> int:
    """The largest number that fits, 0 if not even 1 does; below `end`.

    Args:
      probe: Tries a number: whether it fits, and the bytes that it needs.
      memory_bytes: What there is.
      first: The number to try first.
      end: A number that is taken not to fit.
    """
    used: dict[int, int] = {}
    fitting, failing, guess = 0, end, first
    while True:
        fits, used[guess] = probe(guess)
        fitting, failing = (guess, failing) if fits else (fitting, guess)
        if failing - fitting <= 1:
            return fitting
        middle = (fitting + failing) // 2 if failing < end else 2 * fitting
        # Where peaks are not a straight line, halves end it.
        found = interpolated(used, memory_bytes) if len(used) % 3 else None
        guess = middle if found is None else found
        guess = min(max(guess, fitting + 1), failing - 1)


def interpolated(used: Mapping[int, int], memory_bytes: int) -> int | None:
    """The number whose peak would be all there is, by the two nearest to it."""
    near = sorted(used, key=lambda n: abs(used[n] - memory_bytes))[:2]
    a, b = min(near), max(near)
    if used[b] <= used[a]:
        return None
    return a + math.floor((memory_bytes - used[a]) * (b - a) / (used[b] - used[a]))
