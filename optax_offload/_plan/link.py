"""Measuring the link between an attached device and its host."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp


def measure_link(nbytes: int = 2**30, *, chunks: int = 16, rounds: int = 5) -> float:
    """How fast loads and stores are when both run, on the first device of this process.

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
