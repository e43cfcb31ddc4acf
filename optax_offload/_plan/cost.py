"""What moving costs by a model, and the memory that a step may take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from optax_offload import _flops, _host_memory, aot
from optax_offload._plan.search import CompiledCandidate
from optax_offload._plan.step import StepFactory
from optax_offload._units import size_text
from optax_offload.aot import GPUS_PER_HOST, Target

# The share of a device's memory that a program cannot have. A GPU's: CUDA's context,
# modules, NCCL's buffers, fragmentation, batches on their way. A TPU's: batches and
# what else the process keeps; `memory_bytes` is less the compiler's own reserve.
RESERVES = {"gpu": 0.10, "tpu": 0.02}
# The share of a GPU's memory that JAX takes unless it is told otherwise
# (docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_DEFAULT_FRACTION = 0.75
# The share that is asked for above the peak: an allocator finds no perfect fit.
GPU_FRACTION_MARGIN = 0.02
# More of a GPU than this cannot be asked for: CUDA's own context has to fit beside it.
GPU_LARGEST_FRACTION = 0.97


def default_budget_bytes(target: Target) -> int:
    """The memory of each device less the reserve."""
    return int(target.memory_bytes * (1 - RESERVES[target.platform]))


def checked_budget_bytes(budget_bytes: int | None, target: Target) -> int:
    """The budget of a user, or the default one where there is none.

    Raises:
      ValueError: the budget is not positive, or more than the target has.
    """
    if budget_bytes is None:
        return default_budget_bytes(target)
    if not 0 < budget_bytes <= target.memory_bytes:
        raise ValueError(
            f"budget_bytes is {budget_bytes}; it must be at least 1 and at most what "
            f"{target.name!r} has, {target.memory_bytes} "
            f"({size_text(target.memory_bytes)})"
        )
    return budget_bytes


def environment(target: Target, used_bytes: int, moved_bytes: int) -> dict[str, str]:
    """The variables to set for a process that trains on GPUs; none for TPUs.

    Args:
      target: The chips that it trains on.
      used_bytes: The peak on each device.
      moved_bytes: The state of each device that is in host memory.
    """
    if target.platform != "gpu":
        return {}
    found = {}
    share = used_bytes / target.memory_bytes
    if share > GPU_DEFAULT_FRACTION - GPU_FRACTION_MARGIN:
        fraction = min(
            math.ceil(share * 100) / 100 + GPU_FRACTION_MARGIN, GPU_LARGEST_FRACTION
        )
        found["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:.2f}"
    devices = min(target.device_count, GPUS_PER_HOST)
    return found | _host_memory.gpu_plugin_settings(moved_bytes * devices)


# The share of the link that a step's transfers use: 0.86 to 0.94 on an H100 by the
# model of `benchmarks/link/census.py` (BUILD_NOTES.md, "Link efficiency"), and somewhat
# less where other transfers share the link.
LINK_UTILIZATION = 0.8
# The share of the peak that whole training steps are reported to reach: Llama 3 had 38
# to 43 % on H100s (arXiv:2407.21783, table 4).
COMPUTE_UTILIZATION = 0.4
# The batches that a table of the cost goes through: from as given to so large that
# transfers are a few percent of most steps.
TABLE_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time that a step takes longer for its transfers, and from what that follows.

    Attributes:
      bytes_each_way: The bytes that each device loads in a step, and stores again.
      link_bytes_per_second: The bandwidth of a device's link to its host, each way;
        loads and stores run at once.
      link_source: Where that number is from.
      flops: The operations of matrix products in a step, on each device.
      flops_per_second: The peak of a device.
      flops_source: Where that number is from.
      tokens: The number of tokens in a step, on all devices; None if it was not told.
      link_utilization: The share of the link's bandwidth that is reached.
      compute_utilization: The share of the device's peak that is reached (assumed).
      flops_again: The operations of backward passes that run a second time.
      fused: Whether updates, and their transfers, are in the backward pass.
    """

    bytes_each_way: int
    link_bytes_per_second: float
    link_source: str
    flops: float
    flops_per_second: float
    flops_source: str
    tokens: int | None = None
    link_utilization: float = LINK_UTILIZATION
    compute_utilization: float = COMPUTE_UTILIZATION
    flops_again: float = 0.0
    fused: bool = False

    @property
    def link_seconds(self) -> float:
        """The time of all loads, in seconds; the stores run beside them."""
        return self.bytes_each_way / self.link_bytes_per_second / self.link_utilization

    @property
    def compute_seconds(self) -> float:
        """The time of a step without transfers, in seconds."""
        return self.flops / self.flops_per_second / self.compute_utilization

    @property
    def again_seconds(self) -> float:
        """The time of the backward passes that run a second time, in seconds."""
        return self.flops_again / self.flops_per_second / self.compute_utilization

    def slowdown(self, batches: float = 1.0) -> float:
        """How many times as long a step takes whose transfers come after all else.

        Args:
          batches: The size of a step's batch, in batches of the step that was counted.
        """
        compute = self.compute_seconds * batches
        again = self.again_seconds * batches
        return _ratio(compute + again + self.link_seconds, compute)

    def slowdown_if_hidden(self, batches: float = 1.0) -> float:
        """How many times as long it would take if the computation hid all transfers.

        Args:
          batches: The size of a step's batch, in batches of the step that was counted.
        """
        compute = self.compute_seconds * batches
        again = self.again_seconds * batches
        return _ratio(max(compute + again, self.link_seconds), compute)

    def table(self) -> list[tuple[float, float, float]]:
        """Rows of (batches, slowdown, slowdown if hidden)."""
        return [
            (x, self.slowdown(x), self.slowdown_if_hidden(x)) for x in TABLE_BATCHES
        ]

    def lines(self) -> list[str]:
        """The arithmetic, each line with its inputs."""
        if not self.bytes_each_way:
            return ["nothing is moved: the step takes as long as without"]
        computed = f"{self.compute_seconds:.3f}"
        again = []
        if self.flops_again:
            computed += f" + {self.again_seconds:.3f}"
            again = [
                f"backward passes that run twice: {self.flops_again / 1e12:.1f} TFLOP "
                f"more: {self.again_seconds:.3f} s"
            ]
        when = "at most" if self.fused else "now"
        where = "if none is hidden by" if self.fused else "after"
        return [
            f"link: {size_text(self.bytes_each_way)} each way on each device"
            f" / ({self.link_bytes_per_second / 1e9:.0f} GB/s each way"
            f" x {self.link_utilization:.2f}) = {self.link_seconds:.3f} s"
            f", loads and stores at once ({self.link_source})",
            f"compute: {self.flops / 1e12:.1f} TFLOP on each device"
            f" / ({self.flops_per_second / 1e12:.0f} TFLOP/s"
            f" x {self.compute_utilization:.2f}, assumed)"
            f" = {self.compute_seconds:.3f} s ({self.flops_source})",
            *again,
            f"step {when}: ({computed} + {self.link_seconds:.3f}) s, the "
            f"transfers {where} the backward pass: "
            f"{self.slowdown():.2f} times as long as without",
            f"if all were hidden: max({computed}, "
            f"{self.link_seconds:.3f}) s: {self.slowdown_if_hidden():.2f} times",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The cost as plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {
            "link_seconds": self.link_seconds,
            "compute_seconds": self.compute_seconds,
            "slowdown": self.slowdown(),
            "slowdown_if_hidden": self.slowdown_if_hidden(),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


def cost_of_step(
    factory: StepFactory,
    compiled: CompiledCandidate,
    link_bytes_per_second: float | None,
) -> Cost:
    """Counts the matrix products of a step, and takes the rest from its target's chip.

    Args:
      factory: Makes the step.
      compiled: The step as it is to be trained.
      link_bytes_per_second: The measured bandwidth of the link, each way; None to take
        what is documented.
    """
    target = factory.target
    step = factory.plain_step()
    with jax.sharding.use_abstract_mesh(aot.mesh_of(step.args, target)):
        flops = _flops.count(step.fn, *step.args) / target.device_count
    documented = target.chip
    measured = link_bytes_per_second is not None
    return Cost(
        bytes_each_way=compiled.moved_bytes + compiled.stored_bytes,
        link_bytes_per_second=(
            link_bytes_per_second if measured else documented.link.bytes_per_second
        ),
        link_source="measured" if measured else documented.link_source,
        link_utilization=1.0 if measured else LINK_UTILIZATION,
        flops=flops,
        flops_per_second=documented.flops_per_second,
        flops_source=documented.flops_source,
        tokens=step.tokens,
        flops_again=compiled.flops_again,
        fused=compiled.fused,
    )


def _ratio(a: float, b: float) -> float:
    # A step without matrix products is all link.
    return a / b if b else float("inf") if a else 1.0
