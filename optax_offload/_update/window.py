"""The link between host and device, and how much state may be on it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optax_offload._units import MIB


@dataclasses.dataclass(frozen=True)
class Link:
    """A link that loads and stores at once, each at its full bandwidth.

    Attributes:
      bytes_per_second: Bandwidth of each direction.
      latency_seconds: Time that a transfer takes beyond its bytes.

    Example:
      >>> Link(50e9, 10e-6).latency_bytes
      500000
    """

    bytes_per_second: float
    latency_seconds: float

    @property
    def latency_bytes(self) -> int:
        """The bytes that could cross in the latency of one transfer."""
        return self.bytes_in(self.latency_seconds)

    def bytes_in(self, seconds: float) -> int:
        """The bytes that cross in a time, one way."""
        return round(self.bytes_per_second * seconds)

    def seconds(self, nbytes: float, transfers: int = 1) -> float:
        """The time that transfers take one after the other, of so many bytes in all."""
        return nbytes / self.bytes_per_second + transfers * self.latency_seconds


# The model by which updates are scheduled: PCIe 5.0 as it is measured, and the latency
# of a copy. Of a slower link (a TPU v5e's has 15 GB/s) fewer bytes hide the latency, so
# that what fills this one fills that.
LINK = Link(bytes_per_second=50_000 * MIB, latency_seconds=10e-6)
# A window that nobody chose is a sixteenth of the state, between these two. With two
# slices in it, each of two leaves, its transfers have 4 to 8 MiB, which take 80 to 170
# us by the model. More costs memory and gains little.
DEFAULT_SHARE = 16
LEAST_WINDOW_BYTES = 16 * MIB
MOST_WINDOW_BYTES = 64 * MIB


@dataclasses.dataclass(frozen=True)
class Window:
    """How much state may be loaded or being stored at once.

    Attributes:
      nbytes: Bytes on each device.
      because: The reason for that number.
    """

    nbytes: int
    because: str


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
    """For each of a sequence how many from the first must be gone for it to fit."""
    found: list[int] = []
    first, inside = 0, 0
    for k, nbytes in enumerate(sizes):
        inside += nbytes
        while inside > window_bytes and first < k:
            inside -= sizes[first]
            first += 1
        found.append(first)
    return tuple(found)
