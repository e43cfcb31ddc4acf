"""Chooses the cheaper way to have gradients wait, by a model of its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from optax_offload._schedule.follow import Scan
from optax_offload._schedule.fused import Fused
from optax_offload._schedule.order import FLOPS_PER_BYTE, Passes, flops


def cheaper(
    scan: Scan, late: Sequence[Fused], passes: Passes
) -> Literal["host", "recompute"]:
    """Returns whether gradients had better be stored, or computed again.

    Stored, they cross the link beside the backward pass, and with their state in every
    pass after it, when nothing is computed. Computed again, the state crosses it beside
    a further backward pass.

    Args:
      scan: The backward pass.
      late: The updates that have to wait.
      passes: The passes that sum up over the rows first.
    """
    backward = flops(scan) / FLOPS_PER_BYTE
    gradients = sum(f.gradient_bytes for f in late)
    state = sum(f.loaded_bytes for f in late)
    stored = max(backward, gradients) + passes.stored(late) * (gradients + state)
    again = backward + passes.twice(late) * max(backward, state)
    return "host" if stored < again else "recompute"
