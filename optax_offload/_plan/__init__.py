"""Choosing how to train a step within a memory budget."""

from optax_offload._plan.allowed import allowed
from optax_offload._plan.alternatives import (
    HEADERS,
    Alternative,
    Alternatives,
    NothingFitsError,
)
from optax_offload._plan.budget import (
    Budget,
    PlanRequest,
    checked_budget,
    default_budget_bytes,
)
from optax_offload._plan.candidates import CompiledCandidate, Progress
from optax_offload._plan.frozen import parameters_of
from optax_offload._plan.planner import Planner, plan
from optax_offload._plan.result import Plan, check_can_plot, filling, save_plot
from optax_offload._plan.step import (
    Step,
    StepFactory,
    check_factory,
    record,
)

__all__ = [
    "HEADERS",
    "Alternative",
    "Alternatives",
    "Budget",
    "CompiledCandidate",
    "NothingFitsError",
    "Plan",
    "PlanRequest",
    "Planner",
    "Progress",
    "Step",
    "StepFactory",
    "allowed",
    "check_can_plot",
    "check_factory",
    "checked_budget",
    "default_budget_bytes",
    "filling",
    "parameters_of",
    "plan",
    "record",
    "save_plot",
]
