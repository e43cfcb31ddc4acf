"""Finding the largest number of layers that fits, in few compilations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

MAX_LAYERS = 4096


@dataclasses.dataclass(frozen=True)
class Probe:
    """Whether a number of layers fits.

    Attributes:
      fits: on the target.
      used_bytes: the peak; where it does not fit, what the compiler says it needs.
      seconds: of tracing and compiling.
    """

    fits: bool
    used_bytes: int
    seconds: float


def largest(
    probe: Callable[[int], Probe], memory_bytes: int, first: int, end: int = MAX_LAYERS
) -> int:
    """The largest number that fits, 0 if not even 1 does; below `end`.

    Args:
      probe: tries a number.
      memory_bytes: what there is.
      first: the number to try first.
      end: a number that is taken not to fit.
    """
    fitting: dict[int, int] = {}
    failing: dict[int, int] = {}
    guess, turn = first, 0
    while True:
        found = probe(guess)
        (fitting if found.fits else failing)[guess] = found.used_bytes
        low, high = max(fitting, default=0), min(failing, default=end)
        if high - low <= 1:
            return low
        turn += 1
        guess = _interpolate(fitting | failing, memory_bytes)
        if guess is None or (turn % 3 == 0 and failing):
            guess = (low + high) // 2 if failing else 2 * low
        if found.fits and guess >= high:
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
