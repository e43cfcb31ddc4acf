"""Choosing how to train a step within a memory budget."""

from optax_offload._plan.alternatives import HEADERS, Alternative, Alternatives
from optax_offload._plan.budget import checked_budget, default_budget_bytes
from optax_offload._plan.candidates import (
    Asked,
    Budget,
    CompiledCandidate,
    Progress,
)
from optax_offload._plan.forms import allowed
from optax_offload._plan.picture import check_can_plot, save_plot
from optax_offload._plan.planner import Planner, plan
from optax_offload._plan.recording import record
from optax_offload._plan.result import NothingFitsError, Plan
from optax_offload._plan.step import Step, StepFactory, compile_step

__all__ = [
    "HEADERS",
    "Alternative",
    "Alternatives",
    "Asked",
    "Budget",
    "CompiledCandidate",
    "NothingFitsError",
    "Plan",
    "Planner",
    "Progress",
    "Step",
    "StepFactory",
    "allowed",
    "check_can_plot",
    "checked_budget",
    "compile_step",
    "default_budget_bytes",
    "plan",
    "record",
    "save_plot",
]
