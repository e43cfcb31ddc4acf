"""The plan of a step on a TPU, which moves rows of whole tiles only (F24).

And which spreads transfers over a turn by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jax.extend import core as jex

from optax_offload._program import in_equations
from optax_offload._rows import with_whole_stacks
from optax_offload._schedule.fused_step import FusedStep
from optax_offload._schedule.step import plan as plan_step


def for_tpu(
    plan: FusedStep, given: Collection[jex.Var], known: Mapping[jex.Var, Any]
) -> FusedStep:
    """The plan, where what has smaller rows is moved whole, and a chain is as it likes.

    It is the same if there is neither.

    Args:
      plan: The plan.
      given: The variables whose values it is given: it closes over none of them.
      known: Those of them whose values are known.
    """
    if not plan.whole_on_tpu and not plan.chain:
        return plan
    step = plan.step
    consts = [known.get(v) for v in step.jaxpr.constvars]
    closed = jex.ClosedJaxpr(with_whole_stacks(step.jaxpr), consts)
    step = in_equations(closed, step.refs, step.at_rest)
    constants = {v: x for v, x in step.program.constants.items() if v not in given}
    program = dataclasses.replace(step.program, constants=constants)
    step = dataclasses.replace(step, program=program)
    return plan_step(step, plan.asked, on_tpu=True)
