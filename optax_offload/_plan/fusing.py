"""A step with its updates in the backward pass, where any can be there."""

from __future__ import annotations

from typing import NamedTuple

import jax

from optax_offload import aot
from optax_offload._backward import fuse_backward, plan_of
from optax_offload._plan.step import Step


class Fused(NamedTuple):
    """A step under `fuse_backward`, and what that means on each device.

    Attributes:
      step: The step; None where nothing of it can be fused.
      gradient_bytes: The bytes of gradients that never exist.
      stored_bytes: Of these, the bytes that wait in host memory.
      flops_again: The operations of backward passes that run a second time.
      outside: Why gradients are left outside.
      state_at_once_bytes: The bytes of state that is loaded at once, as something joins
        it.
    """

    step: Step | None
    gradient_bytes: int
    stored_bytes: int
    flops_again: float
    outside: tuple[str, ...]
    state_at_once_bytes: int


def fused(step: Step, target: aot.Target) -> Fused | None:
    """The step as `fuse_backward` makes it.

    None for a jitted step, which is compiled as it is: one of `jit` is fused already.
    """
    if hasattr(step.fn, "trace"):
        return None
    with jax.sharding.use_abstract_mesh(aot.mesh_of(step.args, target)):
        found = plan_of(jax.make_jaxpr(step.fn)(*step.args), "auto")
    return Fused(
        step._replace(fn=fuse_backward(step.fn)) if found.scans else None,
        found.gradient_bytes,
        found.stored_bytes,
        found.flops_again,
        found.reasons(),
        found.state_at_once_bytes,
    )


def state_at_once(step: Step, target: aot.Target) -> int:
    """The bytes of state that a step loads at once, as it is: see `Fused`."""
    with jax.sharding.use_abstract_mesh(aot.mesh_of(step.args, target)):
        its_own = getattr(step.fn, "schedule", None)
        if its_own is not None:
            return its_own(*step.args).state_at_once_bytes
        return plan_of(jax.make_jaxpr(step.fn)(*step.args), False).state_at_once_bytes
