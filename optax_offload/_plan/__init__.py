"""Choosing rules for a memory budget."""

from optax_offload._plan.link import measure_link
from optax_offload._plan.planner import (
    Compiled,
    Plan,
    Step,
    compile_step,
    default_budget_bytes,
    make,
    plan,
    record,
)

__all__ = [
    "Compiled",
    "Plan",
    "Step",
    "compile_step",
    "default_budget_bytes",
    "make",
    "measure_link",
    "plan",
    "record",
]
