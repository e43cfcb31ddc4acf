"""What moving state costs in time: arithmetic that a person can follow."""

from __future__ import annotations

import dataclasses
from typing import Any

from optax_offload._units import size_text

# The share of the link that a step's transfers use: 0.86 to 0.94 on an H100 by the
# model of `benchmarks/census.py` (BUILD_NOTES.md, "Link efficiency"), and somewhat less
# where other transfers share the link.
LINK_UTILIZATION = 0.8
# The share of the peak that whole training steps are reported to reach: Llama 3 had 38
# to 43 % on H100s (arXiv:2407.21783, table 4).
COMPUTE_UTILIZATION = 0.4


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time that a step takes longer for its transfers, and from what that follows.

    Attributes:
      bytes_each_way: loaded to each device in a step, and stored again.
      link_bytes_per_second: of a device, each way; loads and stores run at once.
      link_source: where that figure is from.
      link_utilization: the share of it that is reached.
      flops: matrix products of a step, on each device.
      flops_per_second: the peak of a device.
      flops_source: where that figure is from.
      compute_utilization: the share of it that is reached (assumed).
      tokens: in a step, on all devices; None if it was not told.
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

    @property
    def link_seconds(self) -> float:
        """All loads; the stores run beside them."""
        return self.bytes_each_way / self.link_bytes_per_second / self.link_utilization

    @property
    def compute_seconds(self) -> float:
        """The step without transfers."""
        return self.flops / self.flops_per_second / self.compute_utilization

    def slowdown(self, batches: float = 1.0) -> float:
        """The step over one without transfers: they are at its end, and none is hidden.

        Args:
          batches: of a step with so many times the tokens.
        """
        compute = self.compute_seconds * batches
        return _ratio(compute + self.link_seconds, compute)

    def slowdown_if_hidden(self, batches: float = 1.0) -> float:
        """The same, if all transfers could run beside the computation."""
        compute = self.compute_seconds * batches
        return _ratio(max(compute, self.link_seconds), compute)

    def table(self) -> list[tuple[float, float, float]]:
        """Rows of (times the tokens, slowdown, slowdown if hidden)."""
        scales = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        return [(x, self.slowdown(x), self.slowdown_if_hidden(x)) for x in scales]

    def lines(self) -> list[str]:
        """The arithmetic, each line with its inputs."""
        if not self.bytes_each_way:
            return ["nothing is moved: the step takes as long as without"]
        return [
            f"link: {size_text(self.bytes_each_way)} each way on each device"
            f" / ({self.link_bytes_per_second / 1e9:.0f} GB/s each way"
            f" x {self.link_utilization:.2f}) = {self.link_seconds:.3f} s"
            f", loads and stores at once ({self.link_source})",
            f"compute: {self.flops / 1e12:.1f} TFLOP on each device"
            f" / ({self.flops_per_second / 1e12:.0f} TFLOP/s"
            f" x {self.compute_utilization:.2f}, assumed)"
            f" = {self.compute_seconds:.3f} s ({self.flops_source})",
            f"step now: ({self.compute_seconds:.3f} + {self.link_seconds:.3f}) s, the "
            "transfers after the backward pass: "
            f"{self.slowdown():.2f} times as long as without",
            f"if all were hidden: max({self.compute_seconds:.3f}, "
            f"{self.link_seconds:.3f}) s: {self.slowdown_if_hidden():.2f} times",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self) | {
            "link_seconds": self.link_seconds,
            "compute_seconds": self.compute_seconds,
            "slowdown": self.slowdown(),
            "slowdown_if_hidden": self.slowdown_if_hidden(),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _ratio(a: float, b: float) -> float:
    # A step without matrix products is all link.
    return a / b if b else float("inf") if a else 1.0
