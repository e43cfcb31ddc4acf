"""Loops and branches whose body is planned as a step of its own.

The user's loop over steps, as `lax.scan`, `lax.fori_loop` or `lax.while_loop`, and a
`lax.cond` that skips a step; and a scan over microbatches, whose turn adds its
gradients, or their rows, to sums. What a turn carries are its arguments, at rest where
they are carried so, and what it hands on are its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from jax.extend import core as jex

from optax_offload._program import (
    AtRest,
    Body,
    Step,
    entered,
    has_scan,
    has_update,
    in_equations,
    is_microbatch,
)
from optax_offload._schedule.fused_step import NAMES, FusedStep, Inside


def inside(step: Step, plan: Callable[[Step], FusedStep]) -> Mapping[int, Inside]:
    """The equations with updates whose bodies are steps of their own, by position.

    Those only of which something is fused or streamed, or might have been.

    Args:
      step: The step that they are equations of.
      plan: Plans a step.
    """
    found: dict[int, Inside] = {}
    for i in sorted(step.live):
        e = step.program.equations[i]
        if e.primitive.name in NAMES and has_update(e):
            planned = _inside(step, e, plan)
            if any(x.is_told for x in planned.plans):
                found[i] = planned
    return found


def microbatches(
    step: Step, scans: Iterable[int], plan: Callable[[Step], FusedStep]
) -> Mapping[int, Inside]:
    """The scans whose turns add their gradients, or rows of these, to sums.

    By position; those whose layers are scanned, or cut into turns.

    Args:
      step: The step that they are equations of.
      scans: The scans that are searched, as positions.
      plan: Plans a step.
    """
    found: dict[int, Inside] = {}
    for i in scans:
        e = step.program.equations[i]
        of_layers = any(map(is_microbatch, entered(e)))
        if (has_scan(e) or of_layers) and not has_update(e):
            planned = _inside(step, e, plan)
            if any(x.is_fused_backward or x.chain for x in planned.plans):
                found[i] = planned
    return found


def _inside(step: Step, e: jex.JaxprEqn, plan: Callable[[Step], FusedStep]) -> Inside:
    return Inside(e, tuple(plan(_step(x, step.at_rest)) for x in entered(e)))


def _step(body: Body, around: AtRest | None) -> Step:
    """The body of an equation as a step.

    What is at rest in it is said of the step around it, once.
    """
    at_rest = None
    if around is not None:
        positions = around.positions if _moves(body.jaxpr) else "none"
        at_rest = dataclasses.replace(
            around, arguments=(), residual_bytes=0, made_bytes=0, positions=positions
        )
    return in_equations(body.closed, (), at_rest)


def _moves(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether scans in it move rows of what rests on the host."""
    bodies = [body for e in jaxpr.eqns for body in entered(e)]
    return any(x.loads or x.stores or _moves(x.jaxpr) for x in bodies)
