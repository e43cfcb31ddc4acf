"""Why a step whose layers no scan runs is not cut into turns.

What can be said without a search for turns, which takes half of a step's tracing, is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._ground.units import size_text
from optax_offload._places import memory
from optax_offload._places.step_options import Options
from optax_offload._program import Step, are_codes, nbytes, shape, variables
from optax_offload._schedule.rest import Outer

NOT_CUT = "layers that no scan runs are not cut into turns: "
UPDATED_TWICE = (
    f"{NOT_CUT}an update, or what the step itself makes of new state, takes state that "
    "another one makes. Several steps in a lax.scan are cut"
)


def is_updated_twice(nodes: Iterable[Outer]) -> bool:
    """Returns whether an update takes what rests because another one has made it."""
    made: set[jex.Var] = set()
    for left in (node.left for node in nodes if node.left):
        if not made.isdisjoint(variables(left.operands)):
            return True
        made.update(v for v in left.results if memory.on_host(v.aval))
    return False


def known_uncut(step: Step, asked: Options, elsewhere: Collection[jex.Var]) -> str:
    """Why a step is not cut, if that is known without a search for turns; else "".

    Args:
      step: The step.
      asked: The options that are asked for.
      elsewhere: What is loaded by scans that have turns of their own.
    """
    if asked.residuals == "host":
        return ""
    if _is_small(step, elsewhere):
        return too_few()
    if elsewhere or asked.late_gradients == "host":
        return ""
    most, least = _gradient_bytes(step), limits.now.least_freed_bytes
    # An update that scales its gradients may take what these are made of, too.
    if most is None or 2 * most >= least:
        return ""
    return frees_little(f"at most {size_text(most)}", least)


def _is_small(step: Step, elsewhere: Collection[jex.Var]) -> bool:
    """Whether so little rests on the host, and is not loaded elsewhere."""
    named = {v for e in step.program.equations if are_codes(e) for v in e.invars}
    inputs = (v for v in step.program.invars if v not in elsewhere)
    resting = [v for v in inputs if memory.on_host(v.aval) or v in named]
    dtypes = ((v, getattr(v.aval, "dtype", bool)) for v in resting)
    codes = [v for v, dtype in dtypes if jnp.issubdtype(dtype, jnp.integer)]
    # Each may be taken twice, by turns that end in the second half of their room, and
    # codes of four bits are decoded in 32.
    most = 4 * nbytes(resting) + 28 * nbytes(codes)
    now = limits.now
    return most < now.least_segments * now.segment_bytes / now.least_part


def _gradient_bytes(step: Step) -> int | None:
    """The bytes of what updates are given; None if more than state is at rest."""
    program = step.program
    for i in step.live.difference(step.inlined_at):
        e = program.equations[i]
        if are_codes(e) or any(memory.on_host(v.aval) for v in e.invars):
            return None
    taken = {v for x in step.inlined_updates for v in variables(x.operands)}
    made = taken.intersection(program.producers)
    return nbytes(v for v in made if shape(v) and not memory.on_host(v.aval))


def frees_little(size: str, least: int) -> str:
    """Why a step is not cut of which turns would free so much, and not the least."""
    return (
        f"{NOT_CUT}gradients freed turn by turn would lower the peak by {size}, and "
        f"turns are worth it from {size_text(least)}, or where parameters or residuals "
        "are at rest"
    )


def too_few() -> str:
    """Why a step of few turns is not cut."""
    now = limits.now
    return (
        f"{NOT_CUT}that takes {now.least_segments} turns or more, each with "
        f"{size_text(now.segment_bytes // now.least_part)} of arrays on the "
        "host, or of gradients or residuals that may be stored there"
    )
