"""The public doors: an optimizer that is offloaded, and the step that it is part of."""

from optax_offload._step.jit import Jitted, before_jit, jit
from optax_offload._step.machine import compiling_for
from optax_offload._step.offloading import Offloaded, check_inner, offload
from optax_offload._step.placing import place
from optax_offload._step.streaming import stream, traced_at_rest

__all__ = [
    "Jitted",
    "Offloaded",
    "before_jit",
    "check_inner",
    "compiling_for",
    "jit",
    "offload",
    "place",
    "stream",
    "traced_at_rest",
]
