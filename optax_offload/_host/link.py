"""The link between host and device: as a model, and measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from optax_offload._ground.units import MIB


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


def measure_link(nbytes: int = 2**30, *, chunks: int = 16, rounds: int = 5) -> float:
    """Measures how fast loads and stores are when both run, on the first device.

    Args:
      nbytes: The bytes to move each way, in each round.
      chunks: The number of arrays that they are in.
      rounds: The number of rounds, of which the median counts; one more comes before.

    Returns:
      The bytes per second each way, for `plan`'s ``link_bytes_per_second``.

    Raises:
      ValueError: the device has no host memory apart from its own, as a CPU.

    Example:
      >>> import optax_offload as oo
      >>> oo.measure_link()  # doctest: +SKIP
      52817330245.3
    """
    (first, *_) = jax.local_devices()
    if first.platform == "cpu":
        raise ValueError(
            "measure_link needs an attached GPU or TPU; the first device of this "
            f"process is {first}. Leave the link out to plan with the documented one"
        )
    return _bytes_per_second(first, nbytes, chunks, rounds)


def _bytes_per_second(device: Any, nbytes: int, chunks: int, rounds: int) -> float:
    on_device = jax.sharding.SingleDeviceSharding(device)
    on_host = on_device.with_memory_kind("pinned_host")
    size = max(1, nbytes // chunks // 4)
    make = jax.jit(lambda: jnp.ones(size, jnp.float32), out_shardings=on_device)
    to_store = [make() for _ in range(chunks)]
    to_load = jax.block_until_ready(jax.device_put(to_store, on_host))
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        pairs = zip(to_load, to_store, strict=True)
        moved = [
            (jax.device_put(a, on_device), jax.device_put(b, on_host)) for a, b in pairs
        ]
        jax.block_until_ready(moved)
        seconds.append(time.perf_counter() - started)
    # The first round allocates the memory.
    return 4 * size * chunks / statistics.median(seconds[1:])
