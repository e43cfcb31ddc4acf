"""What it costs to have gradients wait, by a model: which of two ways is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from optax_offload import _flops
from optax_offload._backward.fused import Fused
from optax_offload._backward.rows import Scan

# Matrix products on one device while a byte crosses its link: an H100's 400e12 each
# second that a training step gets of it, over 50 GB/s. A v5e has about as many.
FLOPS_PER_BYTE = 8000


def cheaper(scan: Scan, held: Sequence[Fused]) -> Literal["store", "twice"]:
    """Whether gradients had better be stored, or computed twice.

    Stored, they cross the link beside the backward pass and once more before the
    update, when nothing is computed. Computed twice, the state crosses it beside the
    second backward pass.

    Args:
      scan: The backward pass.
      held: The updates that have to wait.
    """
    backward = flops(scan) / FLOPS_PER_BYTE
    gradients = sum(f.gradient_bytes for f in held)
    state = sum(f.loaded_bytes for f in held)
    stored = max(backward, gradients) + gradients + state
    return "store" if stored < backward + max(backward, state) else "twice"


def flops(scan: Scan) -> float:
    """The floating point operations of a scan's products, on each device."""
    aval: Any = scan.equation.outvars[0].aval
    devices = aval.sharding.mesh.size or 1
    return scan.length * _flops.of_jaxpr(scan.body.jaxpr) / devices
