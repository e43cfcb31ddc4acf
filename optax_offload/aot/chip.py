"""The figures of a chip: what is known of each, and its unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from optax_offload._host.link import Link


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """The figures of one device of a chip, as JAX counts devices.

    Attributes:
      platform: JAX's name of it, `"tpu"` or `"gpu"`.
      name: The name that a target gives it, such as `"v5e"`.
      memory_bytes: Device memory that a program can use.
      memory_source: The source of that figure.
      link: The link to the host's memory, each way. Loads and stores run at once.
      link_source: The source of its bandwidth; "assumed" where none documents it. The
        latency is assumed too, that of `_host/link.py`, unless both were measured.
      flops_per_second: Dense matrix products in bfloat16.
      float32_flops_per_second: Dense matrix products of float32 at JAX's default
        precision: in TF32 on a GPU, in one pass of bfloat16 on a TPU.
      flops_source: The source of both.
      memory_bytes_per_second: Bandwidth of device memory.
      memory_bandwidth_source: The source of that figure.
    """

    platform: ClassVar[str]

    name: str
    memory_bytes: int
    memory_source: str
    link: Link
    link_source: str
    flops_per_second: float
    float32_flops_per_second: float
    flops_source: str
    memory_bytes_per_second: float
    memory_bandwidth_source: str

    @property
    def overlaps(self) -> bool:
        """Whether its compiler overlaps transfers with computation unasked."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Chip):
    """A generation of TPUs, and how its slices are named.

    Attributes:
      dimensions: Axes of the grid that the chips of a slice are.
      devices_per_chip: JAX's devices on each chip.
      topology_options: The options that libtpu needs beside the name of a slice.
      one_host_chips: The chips of the largest slice that has one host
        (cloud.google.com/tpu/docs: machine types).
    """

    platform: ClassVar[str] = "tpu"

    dimensions: int
    devices_per_chip: int = 1
    topology_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    one_host_chips: int = 4


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The figures that all GPUs of a compute capability have in common.

    Attributes:
      capability: The compute capability, major and minor.
      fpus_per_core: Float32 units of a multiprocessor.
      threads_per_core: Threads that may be resident on a multiprocessor.
      shared_memory_per_core_bytes: Shared memory of a multiprocessor.
    """

    capability: tuple[int, int]
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Chip):
    """A GPU, and the figures that XLA's compiler needs of it.

    Attributes:
      description: NVIDIA's name of it, which is JAX's `device_kind`.
      architecture: The figures that it shares with others of its compute capability.
      core_count: Multiprocessors.
      l2_cache_bytes: The cache before device memory.
      clock_ghz: The boost clock.
    """

    platform: ClassVar[str] = "gpu"

    description: str
    architecture: Architecture
    core_count: int
    l2_cache_bytes: int
    clock_ghz: float

    @property
    def overlaps(self) -> bool:
        """Whether its compiler overlaps transfers unasked: from Hopper on (F83)."""
        return self.architecture.capability >= (9, 0)
