"""Choosing rules for a memory budget."""

from optax_offload._plan.budget import default_budget_bytes
from optax_offload._plan.candidates import CompiledCandidate, Progress
from optax_offload._plan.link import measure_link
from optax_offload._plan.planner import plan
from optax_offload._plan.plot import check_can_plot, save_plot
from optax_offload._plan.recording import record
from optax_offload._plan.result import Plan
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
    "measure_link",
    "plan",
    "record",
    "save_plot",
]
