"""The update inside the backward pass."""

from optax_offload._backward.fuse_backward import (
    check_held,
    fuse_backward,
    plan_of,
    run,
    warn_of_refusals,
)
from optax_offload._backward.fused_step import FusedStep, Held

__all__ = [
    "FusedStep",
    "Held",
    "check_held",
    "fuse_backward",
    "plan_of",
    "run",
    "warn_of_refusals",
]
