"""Passes that read state for what is reduced over all of it, before it is updated.

A norm of accumulated gradients joins the state of all parameters: what follows from it
needs all of them first. In a pass of their own they are read row by row, and summed up;
then the update treats each parameter alone. A norm of what a norm has scaled takes one
more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program import Output, Update, dependents, needed, shape, variables
from optax_offload._rows import makes_number
from optax_offload._schedule.updates.groups import Grouping, group


def reading_passes(
    update: Update, most_bytes: int
) -> tuple[list[Update], Update, Grouping]:
    """Takes an update apart that would have too much on the device together.

    Args:
      update: The update.
      most_bytes: The most that an equation may join, in bytes.

    Returns:
      The passes, each an update whose outputs are the values that it reduces; the
      remaining update, for which these are known; and its groups. The passes are empty
      where they would be of no use.
    """
    passes: list[Update] = []
    rest, whole = update, group(update)
    grouping = whole
    if any(map(compat.has_effects, update.program.equations)):
        return [], update, whole  # They would be had in each.
    while joined := _joined(grouping, most_bytes):
        sums = _sums(rest, joined)
        if not sums:
            return [], update, whole
        passes.append(_reading(rest, sums))
        rest = _without(rest, sums)
        grouping = group(rest)
    return passes, rest, grouping


def _joined(grouping: Grouping, most_bytes: int) -> set[int]:
    """The loads that something joins although they are too large for that."""
    return {
        i
        for g in grouping.groups
        if g.loads and g.tied_by and g.nbytes > most_bytes
        for i in g.loads
    }


def _sums(update: Update, loads: Collection[int]) -> list[jex.Var]:
    """The numbers that are reduced over loads, and take no other such number."""
    program = update.program
    loaded = dependents(program, [program.invars[i] for i in loads])
    late: set[jex.Var] = set()
    found: list[jex.Var] = []
    for i in program.live:
        e = program.equations[i]
        used = variables(e.invars)
        if not late.isdisjoint(used):
            late.update(e.outvars)
        elif makes_number(e) and any(v in loaded and shape(v) for v in used):
            found += e.outvars
            late.update(e.outvars)
    return found


def _reading(update: Update, sums: Sequence[jex.Var]) -> Update:
    """A pass that computes what is reduced, and stores nothing."""
    program = dataclasses.replace(update.program, outvars=[*sums])
    outputs = [Output(_path(update, v), "device", None, is_update=False) for v in sums]
    equations = [program.equations[i] for i in program.live]
    program = dataclasses.replace(program, equations=equations)
    return dataclasses.replace(update, program=program, outputs=tuple(outputs))


def _path(update: Update, v: jex.Var) -> str:
    """The path of a leaf that a variable is reduced from."""
    program = update.program
    equations = (program.equations[i] for i in needed(program.equations, [v]))
    used = {x for e in equations for x in variables(e.invars)}
    loads = {i for i in update.loads if program.invars[i] in used}
    loads = {i for i in loads if shape(program.invars[i])}
    return next((o.path for o in update.outputs if o.alias in loads), "")


def _without(update: Update, known: Sequence[jex.Var]) -> Update:
    """The update where some variables are known."""
    equations = [
        e for e in update.program.equations if set(known).isdisjoint(e.outvars)
    ]
    program = dataclasses.replace(update.program, equations=equations)
    return dataclasses.replace(update, program=program)
