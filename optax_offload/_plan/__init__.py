"""Choosing rules for a memory budget."""

from optax_offload._plan.cost import default_budget_bytes
from optax_offload._plan.planner import plan
from optax_offload._plan.result import Plan, check_can_plot, save_plot
from optax_offload._plan.search import CompiledCandidate, Progress
from optax_offload._plan.state import record
from optax_offload._plan.step import Step, StepFactory, compile_step

__all__ = [
    "CompiledCandidate",
    "Plan",
    "Progress",
    "Step",
    "StepFactory",
    "check_can_plot",
    "compile_step",
    "default_budget_bytes",
    "plan",
    "record",
    "save_plot",
]
