"""The window: the bytes of state that may be loaded or being stored at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optax_offload._ground.units import MIB

# A window that nobody chose is a sixteenth of the state, between these two. With two
# slices in it, each of two leaves, its transfers have 4 to 8 MiB, which take 80 to 170
# us by the model. More costs memory and gains little.
DEFAULT_SHARE = 16
LEAST_WINDOW_BYTES = 16 * MIB
MOST_WINDOW_BYTES = 64 * MIB


@dataclasses.dataclass(frozen=True)
class Window:
    """The bytes of state that may be loaded or being stored at once.

    Attributes:
      nbytes: Bytes on each device.
      reason: The reason for that number.
    """

    nbytes: int
    reason: str


def window(asked: int | None, state_bytes: int) -> Window:
    """The window that was asked for, or one for so much state on each device."""
    if asked is not None:
        return Window(asked, "as asked")
    share = state_bytes // DEFAULT_SHARE
    return Window(
        min(max(share, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES),
        "a sixteenth of the state, at least 16 and at most 64 MiB",
    )


def waits(sizes: Sequence[int], window_bytes: int) -> tuple[int, ...]:
    """The number of items, from the first, that must be gone for each to fit."""
    found: list[int] = []
    first, inside = 0, 0
    for k, nbytes in enumerate(sizes):
        inside += nbytes
        while inside > window_bytes and first < k:
            inside -= sizes[first]
            first += 1
        found.append(first)
    return tuple(found)
