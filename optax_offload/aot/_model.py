"""The model of a device and its link on which a schedule runs, and its assumptions."""

from __future__ import annotations

import dataclasses

from optax_offload._link import LINK, Link
from optax_offload.aot._products import Flops
from optax_offload.aot.chips import CHIPS
from optax_offload.aot.targets import Target

_H100 = CHIPS["h100"]


@dataclasses.dataclass(frozen=True)
class Model:
    """The rates from which times are modelled.

    Attributes:
      link: The link to the host.
      memory_bytes_per_second: Bandwidth of device memory.
      flops_per_second: Matrix products of float32 at JAX's default precision.
      narrow_flops_per_second: Matrix products of 16 bits, such as bfloat16.
      kernels_occupy_device: Whether the device computes nothing beside a transfer that
        is done by a kernel. False pretends that copy engines did it.
    """

    link: Link = LINK
    memory_bytes_per_second: float = _H100.memory_bytes_per_second
    flops_per_second: float = _H100.float32_flops_per_second
    narrow_flops_per_second: float = _H100.flops_per_second
    kernels_occupy_device: bool = True

    def least_seconds(self, nbytes: int) -> float:
        """The time of a transfer without latency."""
        return nbytes / self.link.bytes_per_second

    def compute_seconds(self, nbytes: int, flops: Flops) -> float:
        """The time of an operation: its bytes or its products, what takes longer."""
        wide = flops.wide / self.flops_per_second
        narrow = flops.narrow / self.narrow_flops_per_second
        return max(nbytes / self.memory_bytes_per_second, wide + narrow)


def model_of(
    target: Target,
    gb_per_second: float | None = None,
    latency_us: float | None = None,
) -> Model:
    """The model of a target, by its chip.

    Args:
      target: The target that the program was compiled for.
      gb_per_second: Bandwidth of the link, instead of the documented one.
      latency_us: Latency of the link, instead of the assumed one.
    """
    chip = target.chip
    link = chip.link
    if gb_per_second is not None:
        link = dataclasses.replace(link, bytes_per_second=gb_per_second * 1e9)
    if latency_us is not None:
        link = dataclasses.replace(link, latency_seconds=latency_us / 1e6)
    return Model(
        link=link,
        memory_bytes_per_second=chip.memory_bytes_per_second,
        flops_per_second=chip.float32_flops_per_second,
        narrow_flops_per_second=chip.flops_per_second,
    )
