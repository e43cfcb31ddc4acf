"""Gradients that are computed whole, and why."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._program import (
    Body,
    Step,
    called,
    entered,
    has_scan,
    has_update,
    shape,
    variables,
)
from optax_offload._schedule.follow import Unfused


def gradients(step: Step, unfused: Iterable[Unfused]) -> list[Unfused]:
    """The values that may be gradients: residuals, which are not, are stacked too."""
    sizes = {math.prod(shape(v)) for v in step.program.invars}
    equations = (step.program.equations[i] for i in step.live)
    bodies = [body for e in equations for body in entered(e)]
    residuals = {v for body in bodies for v in variables(body.xs)}
    return [
        o
        for o in unfused
        if math.prod(shape(o.gradient)) in sizes and o.gradient not in residuals
    ]


def updates_inside(step: Step, planned: Collection[int]) -> list[str]:
    """Finds updates inside of other equations, which are not planned as steps."""
    live = sorted(step.live.difference(planned))
    equations = (step.program.equations[i] for i in live)
    others = (e for e in equations if called(e) is None)
    names = [e.primitive.name for e in others if has_update(e)]
    return [f"the update is in a {name}" for name in dict.fromkeys(names)]


def in_bodies(
    step: Step, steps: Collection[int], microbatches: Collection[int]
) -> Iterator[Unfused]:
    """Possible gradients of scans that are not searched: in bodies, or carried.

    Args:
      step: The step.
      steps: The equations whose bodies are steps of their own, as positions.
      microbatches: The scans that only the sums of gradients leave.
    """
    program = step.program
    shapes = {shape(v) for v in program.invars if _is_inexact(v)}
    returned = set(variables(program.outvars))
    for i in sorted(step.live.difference(steps)):
        e = program.equations[i]
        name = e.primitive.name
        nested = has_scan(e)
        # Of what other loops carry, nothing says what is a gradient.
        if name in ("while", "cond") or not (nested or name == "scan"):
            continue
        why = "its scan sums it up over all iterations"
        if nested and i not in microbatches:
            why = f"its backward scan is inside of another equation ({name})"
        of_scan = itertools.chain.from_iterable(map(_sums, entered(e)))
        for v in of_scan if name == "scan" else e.outvars:
            if _is_inexact(v) and shape(v) in shapes and v not in returned:
                yield Unfused(v, why)


def _sums(body: Body) -> Iterator[jex.Var]:
    """Results that a scan carries only as sums, to which every iteration adds."""
    equations = body.jaxpr.eqns
    before = body.split(body.jaxpr.invars).carry
    after = body.given(body.jaxpr.outvars).carried
    uses = collections.Counter(v for e in equations for v in variables(e.invars))
    added = {
        e.outvars[0]: e.invars
        for e in equations
        if e.primitive.name in ("add", "add_any")
    }
    for v, inner, outer in zip(before, after, body.carried, strict=True):
        if uses[v] == 1 and isinstance(inner, jex.Var) and v in added.get(inner, ()):
            yield outer


def _is_inexact(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
