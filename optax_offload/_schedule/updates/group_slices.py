"""Finds how a group is updated in slices, and in which parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax.extend import core as jex

from optax_offload._ground import compat, limits
from optax_offload._places import tpu_layout
from optax_offload._program import Atom, Program, Update, shape, variables
from optax_offload._rows import (
    NotRowLocalError,
    RowLocal,
    Sum,
    analyze,
    analyze_made,
    makes_number,
    summed,
)
from optax_offload._schedule.updates.group import Group, Part, Written


def sliced(update: Update, group: Group, beside: Mapping[jex.Var, int]) -> Group:
    """The group with what it takes to slice it, or with why it cannot be."""
    try:
        return _in_slices(update, group, beside)
    except NotRowLocalError as e:
        targets = tuple(Written(k, update.in_place(k)) for k in group.outputs)
        no_buffer = any(
            t.alias is None and update.outputs[t.output].stored for t in targets
        )
        in_place = bool(targets) and compat.LOOPS_RUN_ONCE and not no_buffer
        return dataclasses.replace(
            group,
            targets=targets if in_place else group.targets,
            in_place=in_place,
            parts=(Part(group.loads, group.outputs),),
            whole_reason=str(e),
        )


def _in_slices(update: Update, group: Group, beside: Mapping[jex.Var, int]) -> Group:
    program = update.program
    sums = _sums(program, group)
    ends: list[Atom] = [program.outvars[k] for k in group.outputs]
    if sums:
        ends = [*dict.fromkeys(v for s in sums.values() for v in s.operands)]
    reduced = {s.position for s in sums.values()}
    if group.loads:
        row_local = analyze(
            program,
            [i for i in group.equations if i not in reduced],
            _load_axes(update, group),
            ends,
            {before: _var(program, k) for before, k in beside.items()},
        )
    else:
        row_local = analyze_made(program, _made_axes(update, group))
    for e in (program.equations[i] for i in reduced):
        if not summed(e, row_local.axes):
            raise NotRowLocalError(f"{e.primitive.name} mixes rows")
    # What is on the device, and is read for slices, is replaced in slices too.
    position = {_var(program, k): k for k in beside.values()}
    more = [position[v] for v in row_local.outputs[len(ends) :] if v in position]
    outputs = (*group.outputs, *more)
    targets = tuple(
        Written(k, _row_alias(update, k, row_local), sums.get(k)) for k in outputs
    )
    moved = {program.invars[i] for i in group.loads}
    moved.update(_var(program, k) for k in outputs if update.outputs[k].stored)
    # What has one number for each row, as counters of a population, and does not cross
    # the link is no matter of tiles; nor is what is computed from slices.
    sliced = {*row_local.inputs, *row_local.outputs}
    types = {
        (v.aval, axis)
        for v, axis in row_local.axes.items()
        if v in moved or (v in sliced and math.prod(shape(v)) > row_local.rows)
    }
    multiple = max(tpu_layout.unit(aval, axis) for aval, axis in types)
    if row_local.rows < 2 * multiple:
        raise NotRowLocalError(f"{row_local.rows} rows, in units of {multiple}")
    group = dataclasses.replace(
        group,
        targets=targets,
        in_place=bool(targets),
        row_local=row_local,
        row_multiple=multiple,
    )
    return dataclasses.replace(group, parts=_parts(program, group))


def _sums(program: Program, group: Group) -> dict[int, Sum]:
    """The sum that makes each output, if all outputs are numbers that are reduced."""
    found: dict[int, Sum] = {}
    for k in group.outputs:
        i = program.producers.get(_var(program, k))
        if i is None:  # It hands an argument on.
            return {}
        e = program.equations[i]
        if not makes_number(e):
            return {}
        found[k] = Sum(i, tuple(variables(e.invars)))
    return found


def _var(program: Program, k: int) -> jex.Var:
    """The variable of an output that is no literal."""
    a = program.outvars[k]
    assert isinstance(a, jex.Var)
    return a


def _parts(program: Program, group: Group) -> tuple[Part, ...]:
    """Two parts, if half of the loads suffice for a store; else one."""
    row_local = group.in_rows
    early = group.loads[: (len(group.loads) + 1) // 2]
    later = group.loads[len(early) :]
    missing = {program.invars[i] for i in later}
    for e in row_local.equations:
        if not missing.isdisjoint(variables(e.invars)):
            missing.update(e.outvars)
    first: list[int] = []
    last: list[int] = []
    for t in group.targets:
        # What is not loaded is read by both parts, and replaced by the last.
        ready = t.alias in early and program.outvars[t.output] not in missing
        (first if ready else last).append(t.output)
    if group.sums:
        first = []
    small = group.nbytes < limits.now.least_apart_bytes * len(group.loads)
    if small or not (later and first and last):
        return (Part(group.loads, group.outputs, row_local),)
    one, other = row_local.split(
        [program.invars[i] for i in early],
        [_var(program, k) for k in first],
        [_var(program, k) for k in last],
    )
    return Part(early, tuple(first), one), Part(later, tuple(last), other)


def _load_axes(update: Update, group: Group) -> dict[jex.Var, int]:
    """The axis of the rows of each load; a parameter's is that of its state."""
    inputs, invars = update.inputs, update.program.invars
    asked = [i for i in group.loads if inputs[i].slice_axis != "auto"]
    axes = {i: _slice_axis(update, i, group) for i in asked or group.loads}
    rows = {(axis, shape(invars[i])[axis]) for i, axis in axes.items()}
    for i in set(group.loads).difference(axes):
        sizes = shape(invars[i])
        fits = [x for x, count in rows if x < len(sizes) and sizes[x] == count]
        if len(fits) != 1:
            raise NotRowLocalError(f"no rows of a leaf of shape {sizes}")
        (axes[i],) = fits
    return {invars[i]: axes[i] for i in group.loads}


def _made_axes(update: Update, group: Group) -> dict[jex.Var, int]:
    """The axis of the rows of each output of a group that loads nothing."""
    axes: dict[jex.Var, int] = {}
    for k in group.outputs:
        v, axis = _var(update.program, k), update.outputs[k].made_along
        if axis is None or axis >= len(shape(v)):
            raise NotRowLocalError(f"no axis to slice a leaf of shape {shape(v)}")
        axes[v] = axis
    return axes


def _slice_axis(update: Update, i: int, group: Group) -> int:
    """The axis of the rows of a load."""
    program = update.program
    sizes = shape(program.invars[i])
    axis = update.inputs[i].slice_axis
    if axis == "auto":
        # The row means of a stacked leaf have its layer axis.
        outputs = (shape(program.outvars[k]) for k in group.outputs)
        if any(len(o) > 2 and o[0] == sizes[0] for o in outputs):
            return 0
        made = (update.outputs[k] for k in group.outputs if update.outputs[k].made)
        axis = next((output.made_along for output in made), None)
    if axis is None or axis >= len(sizes):
        raise NotRowLocalError(f"no axis to slice a leaf of shape {sizes}")
    return axis


def _row_alias(update: Update, k: int, row_local: RowLocal) -> int | None:
    """The input into whose buffer an output can be written slice by slice."""
    program = update.program
    alias = update.in_place(k)
    if alias is not None:
        axis = row_local.axes[_var(program, k)]
        if row_local.axes.get(program.invars[alias], axis) == axis:
            return alias
    output = update.outputs[k]
    if output.made and row_local.axes[_var(program, k)] != output.made_along:
        raise NotRowLocalError("rows of new state would be spread over devices")
    if output.stored and not output.made:
        raise NotRowLocalError("no buffer on the host to write into")
    return None
