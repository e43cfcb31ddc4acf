"""What was asked for by name and cannot be had, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import get_args

from jax.extend import core as jex

from optax_offload._ground import trees
from optax_offload._schedule.fused_step import FusedStep, Way
from optax_offload._schedule.step import plan
from optax_offload._schedule.unfused import Unfused, gradients

_NO_SCAN = (
    "no scan stacks at least 64 KiB that only a later scan takes rows of, as the "
    "forward pass of scanned layers does for the backward pass"
)
_NO_TURN = (
    "of the turns that layers in a Python loop are cut into, none leaves 1 MiB or more "
    "that is in memory where the most is, and is taken after the next turn"
)


def refusals(found: FusedStep, paths: Sequence[str]) -> Iterator[str]:
    """Warnings about options that were asked for by name and cannot be had.

    Args:
      found: The plan of the step.
      paths: The path of each result of the step.
    """
    rest = found.step.at_rest
    chains = [x.chain for x in found.steps if x.chain is not None]
    kept = (rest and rest.residual_bytes) or any(x.residuals for x in chains)
    if found.asked.residuals == "host" and not kept:
        why = _NO_TURN if chains else "; ".join(filter(None, (_NO_SCAN, found.uncut)))
        yield f"residuals='host' was asked for, and nothing is kept there: {why}"
    yield from _not_waiting(found, paths)


def _not_waiting(found: FusedStep, paths: Sequence[str]) -> Iterator[str]:
    """Warnings about gradients that do not wait as they were asked to."""
    # The new values of refs, which have no path, come last.
    outvars = zip(found.step.program.outvars, paths, strict=False)
    named = [(a, path) for a, path in outvars if isinstance(a, jex.Var)]
    path_of = dict(named)
    for each in found.inside.values():
        e = each.equation
        unnamed = f"a result of a {e.primitive.name}"
        of_body = [path_of.get(v, unnamed) for v in e.outvars]
        for x in each.plans:
            yield from _not_waiting(x, of_body)
    refused, asked = found.refused(), found.asked.late_gradients
    waits = found.chain is not None and found.reduced and found.reduced.sums
    if waits and asked == "recompute":
        yield (
            "late_gradients='recompute' was asked for, and cannot be had for layers "
            "that no scan runs, as no turn of theirs runs twice. 'host' can"
        )
    if found.chain and not found.scans:
        return
    if not refused:
        steps = any(x.holds_update for x in found.inside.values())
        nothing = () if found.scans or steps else found.reasons()
        wanted = asked in get_args(Way) and gradients(found.step, found.unfused)
        for line in nothing if wanted else ():
            yield f"late_gradients={asked!r} was asked for, and nothing waits: {line}"
        return
    other: Way = "recompute" if asked == "host" else "host"
    still = {
        o.gradient
        for o in plan(
            found.step, dataclasses.replace(found.asked, late_gradients=other)
        ).refused()
    }
    by_reason: dict[str, list[Unfused]] = {}
    for o in refused:
        by_reason.setdefault(o.reason, []).append(o)
    for reason, some in by_reason.items():
        results = {v for o in some for v in o.waits}
        leaves = [path for v, path in named if v in results]
        can = f" late_gradients={other!r} can." * still.isdisjoint(
            o.gradient for o in some
        )
        yield (
            f"late_gradients={asked!r} was asked for, and cannot be had for the "
            f"gradients that the results {trees.listed(leaves)} are updated with, "
            f"which are on the device whole: {reason}.{can}"
        )
