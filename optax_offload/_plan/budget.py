"""The memory that a step may take, and what its process has to be told of it."""

from __future__ import annotations

import dataclasses
import math
import os

from optax_offload._ground.units import check_bytes, size_text
from optax_offload._host import host_memory
from optax_offload._plan.allowed import Codecs
from optax_offload.aot import Measured, Target

# The share of a device's memory that a program cannot have. A GPU's: CUDA's context,
# modules, NCCL's buffers, fragmentation, batches on their way. A TPU's: batches and
# what else the process keeps; `memory_bytes` is less the compiler's own reserve.
RESERVES = {"gpu": 0.10, "tpu": 0.02}
# The share of a GPU's memory that JAX takes unless it is told otherwise
# (docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_DEFAULT_FRACTION = 0.75
MEM_FRACTION = "XLA_CLIENT_MEM_FRACTION"
# The share that is asked for above the peak: an allocator finds no perfect fit.
GPU_FRACTION_MARGIN = 0.02
# More of a GPU than this cannot be asked for: CUDA's own context has to fit beside it.
GPU_LARGEST_FRACTION = 0.97


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory that a step may take.

    Attributes:
      device_bytes: Device memory, on each device.
      host_bytes: Host memory, for each device; None where it is not bounded.
    """

    device_bytes: int
    host_bytes: int | None = None

    def holds(self, used_bytes: int, host_bytes: int) -> bool:
        """Returns whether device and host memory are both within the budget."""
        on_host = self.host_bytes is None or host_bytes <= self.host_bytes
        return used_bytes <= self.device_bytes and on_host


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The request to `plan`, beside the step.

    Attributes:
      budget: The memory that a step may take.
      allow: The codecs that state and frozen parameters may be kept in; see `allowed`.
      link_bytes_per_second: Bandwidth of the link; None takes the documented one.
      folder: The folder that keeps figures of compiled programs; None keeps nothing.
      frozen: The regex of the parameters that are not trained; None for none.
      programs: The figures of the programs that were compiled for it, by digest; those
        of others are added.
    """

    budget: Budget
    allow: Codecs = ()
    link_bytes_per_second: float | None = None
    folder: str | os.PathLike[str] | None = None
    frozen: str | None = None
    programs: dict[str, Measured] = dataclasses.field(default_factory=dict)


def default_budget_bytes(target: Target) -> int:
    """The memory of each device less the reserve."""
    return int(target.memory_bytes * (1 - RESERVES[target.platform]))


def checked_budget(
    budget_bytes: int | None, host_memory_bytes: int | None, target: Target
) -> Budget:
    """The budgets of a user, or the default one of the device where there is none.

    Args:
      budget_bytes: The budget of each device; None takes the default.
      host_memory_bytes: The budget of each host; None does not bound it.
      target: The chips.

    Raises:
      ValueError: A budget is no whole number, negative, or more than the target has.
    """
    if budget_bytes is None:
        budget_bytes = default_budget_bytes(target)
    else:
        most = target.memory_bytes
        also = f" and at most what {target.name!r} has, {most} ({size_text(most)})"
        check_bytes("budget_bytes", budget_bytes, 1, most, also)
    if host_memory_bytes is None:
        return Budget(budget_bytes)
    also = ": what each host has for this, such as 64 * 2**30, or None for no bound"
    check_bytes("host_memory_bytes", host_memory_bytes, 0, also=also)
    return Budget(budget_bytes, host_memory_bytes // target.devices_per_host)


def environment(target: Target, used_bytes: int, host_bytes: int) -> dict[str, str]:
    """The variables to set for a process that trains on GPUs; none for TPUs.

    Args:
      target: The chips that it trains on.
      used_bytes: The peak on each device.
      host_bytes: The host memory that a step needs for each device.
    """
    if target.platform != "gpu":
        return {}
    found = {}
    share = used_bytes / target.memory_bytes
    if share > GPU_DEFAULT_FRACTION - GPU_FRACTION_MARGIN:
        fraction = min(
            math.ceil(share * 100) / 100 + GPU_FRACTION_MARGIN, GPU_LARGEST_FRACTION
        )
        found[MEM_FRACTION] = f"{fraction:.2f}"
    pinned_bytes = host_bytes * target.devices_per_host
    return found | host_memory.gpu_plugin_settings(pinned_bytes)
