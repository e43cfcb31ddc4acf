"""Taking an update apart: what must be on the device together.

Every step is linear in the number of equations.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program import Components, Program, Update, needed, shape, variables
from optax_offload._schedule.updates.group import Group, Written
from optax_offload._schedule.updates.group_slices import sliced
from optax_offload._schedule.updates.loops import MOST_SLICE_BYTES


@dataclasses.dataclass(frozen=True)
class Grouping:
    """An update taken apart.

    Attributes:
      groups: In the reverse natural order of their outputs' paths, in which gradients
        become available: last layer first.
      scalars: The inputs that are loaded before all groups, as positions: scalars, such
        as a step counter, which would tie every leaf to every other.
      shared: The equations that are evaluated whole before all groups, as positions.
      joined: Whether those need the gradients of several groups, as clipping by the
        global norm does, so that all are there before the first group.
    """

    groups: tuple[Group, ...]
    scalars: tuple[int, ...]
    shared: tuple[int, ...]
    joined: bool


def group(update: Update) -> Grouping:
    """Takes an update apart.

    Outputs that depend on a common load form a group, and so does each store that
    depends on none.
    """
    program = update.program
    scalars = tuple(i for i in update.loads if not shape(program.invars[i]))
    loads = [i for i in update.loads if shape(program.invars[i])]
    components = _components(program, loads)
    members, alone = _members(update, loads, components)
    equations: dict[int, list[int]] = {component: [] for component in members}
    shared: list[int] = []
    for i in program.live:
        of = components.of
        used = variables(program.equations[i].invars)
        component = next((of[v] for v in used if v in of), None)
        if component is None:
            shared.append(i)
        else:
            equations.setdefault(component, []).append(i)
    inputs: dict[int, list[int]] = {}
    for i in loads:
        inputs.setdefault(components.of[program.invars[i]], []).append(i)
    beside = _beside(update, components.of)
    groups: list[Group] = []
    for component in equations:
        whole = _whole(
            update,
            inputs[component],
            members.get(component, []),
            equations[component],
            components.ties[component],
        )
        groups.append(sliced(update, whole, beside))
        # What is replaced beside a group is replaced by the first that reads it.
        taken = set(groups[-1].outputs)
        beside = {v: k for v, k in beside.items() if k not in taken}
    groups += _of_no_load(update, alone, components.of)
    groups, shared = _own(program, shared, groups)
    groups.sort(key=lambda g: _availability(update, g), reverse=True)
    joined = _joins_gradients(update, shared)
    return Grouping(tuple(groups), scalars, tuple(shared), joined)


def _of_no_load(
    update: Update, stores: Sequence[int], of: Mapping[jex.Var, int]
) -> list[Group]:
    """Stores that depend on no load; new state with what is computed with it."""
    program = update.program
    made: dict[int, list[int]] = {}
    together = _made_together(program, of)
    for k, a in enumerate(program.outvars):
        if isinstance(a, jex.Var) and a in together and update.outputs[k].alias is None:
            made.setdefault(together[a], []).append(k)
    found: list[Group] = []
    taken: set[int] = set()
    for k in stores:
        if k in taken:
            continue
        a = program.outvars[k]
        outputs = [k]
        if isinstance(a, jex.Var) and a in together and update.outputs[k].made:
            outputs = made[together[a]]
        taken.update(outputs)
        group = _whole(update, (), outputs, (), ())
        if group.makes and group.nbytes > MOST_SLICE_BYTES:
            group = sliced(update, group, {})
        found.append(group)
    return found


def _made_together(program: Program, of: Mapping[jex.Var, int]) -> dict[jex.Var, int]:
    """Numbers arrays that no load leads to, alike where an equation joins them."""
    joined = Components[int]()
    numbered: dict[jex.Var, int] = {}
    for i in program.live:
        e = program.equations[i]
        results = [v for v in e.outvars if shape(v) and v not in of]
        if results:
            own = {joined.of(numbered[v]) for v in variables(e.invars) if v in numbered}
            nodes = sorted(own) or [i]
            joined.join(nodes)
            numbered.update((v, nodes[0]) for v in results)
    return {v: joined.of(n) for v, n in numbered.items()}


@dataclasses.dataclass(frozen=True)
class _Components:
    """Loads that belong together, and the equations that join them.

    Attributes:
      of: The component of each variable that depends on a load. Variables that a live
        equation joins share one.
      ties: The equations that joined two variables, by component.
    """

    of: Mapping[jex.Var, int]
    ties: Mapping[int, Sequence[jex.JaxprEqn]]


def _components(program: Program, loads: Sequence[int]) -> _Components:
    joined = Components[int]()
    node_of = {program.invars[i]: node for node, i in enumerate(loads)}
    joints: list[tuple[int, jex.JaxprEqn]] = []
    for i in program.live:
        e = program.equations[i]
        used = variables(e.invars)
        nodes = sorted({joined.of(node_of[v]) for v in used if v in node_of})
        if not nodes:
            continue
        joined.join(nodes)
        joints += [(nodes[0], e)] * (len(nodes) - 1)
        node_of.update((v, nodes[0]) for v in e.outvars)
    ties = {joined.of(node): list[jex.JaxprEqn]() for node in range(len(loads))}
    for node, e in joints:
        ties[joined.of(node)].append(e)
    return _Components({v: joined.of(n) for v, n in node_of.items()}, ties)


def _members(
    update: Update, loads: Sequence[int], components: _Components
) -> tuple[dict[int, list[int]], list[int]]:
    """The outputs of each component, and the stores that belong to none."""
    program = update.program
    unmoved = {program.invars[i] for i in loads}
    members: dict[int, list[int]] = {}
    alone: list[int] = []
    for k, a in enumerate(program.outvars):
        stored = update.outputs[k].stored
        if isinstance(a, jex.Var) and a in components.of:
            # What comes back to the host as it came need not move at all.
            if not (a in unmoved and stored):
                members.setdefault(components.of[a], []).append(k)
        elif stored:
            alone.append(k)
    return members, alone


def _beside(update: Update, of: Mapping[jex.Var, int]) -> dict[jex.Var, int]:
    """Outputs that stay on the device and depend on no load, by what they replace."""
    program = update.program
    found: dict[jex.Var, int] = {}
    for k, output in enumerate(update.outputs):
        a = program.outvars[k]
        if output.alias is None or output.stored or not shape(a):
            continue
        before = program.invars[output.alias]
        if isinstance(a, jex.Var) and a not in of and a is not before:
            found[before] = k
    return found


def _whole(
    update: Update,
    loads: Sequence[int],
    outputs: Sequence[int],
    equations: Sequence[int],
    ties: Sequence[jex.JaxprEqn],
) -> Group:
    """A group, before it is known whether it can be sliced."""
    program = update.program
    several = len([k for k in outputs if update.outputs[k].is_update]) > 1
    loaded = [(program.invars[i].aval, i in update.encoded) for i in loads]
    stored = [
        (program.outvars[k].aval, update.outputs[k].holds_codes)
        for k in outputs
        if update.outputs[k].stored
    ]
    moved = (
        sum(memory.nbytes_on_each_device(x) for x, _ in some)
        for some in (loaded, stored)
    )
    decoded = (
        sum(memory.decoded_nbytes_on_each_device(*x) for x in some)
        for some in (loaded, stored)
    )
    tied_by = _first_of_each(ties) if several else ()
    return Group(
        loads=tuple(loads),
        targets=tuple(map(Written, outputs)),
        equations=tuple(equations),
        nbytes=max(decoded),
        moved_bytes=max(moved),
        tied_by=tied_by,
        joined=_joined(program, loads, tied_by),
        makes=any(update.outputs[k].made for k in outputs),
    )


def _first_of_each(ties: Sequence[jex.JaxprEqn]) -> tuple[jex.JaxprEqn, ...]:
    """The equations to name of those that join leaves, the first of each primitive.

    A norm joins all leaves by adding up numbers, and the leaves that are scaled by it
    are joined once more: so equations of numbers are named if some are found. Else the
    equations that join most are named, as where leaves are concatenated.
    """
    times = Counter(map(id, ties))
    most = max(times.values(), default=0)
    of_numbers = [e for e in ties if not any(map(shape, e.outvars))]
    of_most = [e for e in ties if times[id(e)] == most]
    first = {e.primitive.name: e for e in reversed(of_numbers or of_most)}
    return tuple(first.values())[::-1]


def _joined(
    program: Program, loads: Sequence[int], tied_by: Sequence[jex.JaxprEqn]
) -> tuple[int, ...]:
    """The loads that equations depend on."""
    of = {
        i
        for e in tied_by
        for v in e.outvars[:1]
        for i in needed(program.equations, [v])
    }
    read = {v for i in of for v in variables(program.equations[i].invars)}
    return tuple(i for i in loads if program.invars[i] in read)


def _own(
    program: Program, shared: Sequence[int], groups: Sequence[Group]
) -> tuple[list[Group], list[int]]:
    """Gives equations to the groups that alone need them, as far as that is of use.

    Equations that are fused with an update stay fused with it, and take no memory of
    their own (F11).

    Returns:
      The groups, and the other equations that are needed, without those that are only
      evaluated slice by slice.
    """
    in_slices = {k for g in groups if g.row_local for k in g.outputs}
    # Which group wants a variable; None for several of them, or for others.
    wanted_by: dict[jex.Var, int | None] = {
        a: None
        for k, a in enumerate(program.outvars)
        if isinstance(a, jex.Var) and k not in in_slices
    }
    own: list[list[int]] = [list(g.equations) for g in groups]

    def want(wanted: Sequence[jex.Var], at: int | None) -> None:
        for v in wanted:
            wanted_by[v] = at if wanted_by.get(v, at) == at else None

    for at, g in enumerate(groups):
        if g.row_local is not None:
            want(g.row_local.inputs, None)
        elif g.makes and not g.loads:
            for v in variables(program.outvars[k] for k in g.outputs):
                wanted_by[v] = at
        else:
            for i in g.equations:
                used = variables(program.equations[i].invars)
                want(used, at if g.in_place else None)
    left: list[int] = []
    for i in reversed(shared):
        e = program.equations[i]
        wanted = {wanted_by[v] for v in e.outvars if v in wanted_by}
        effects = compat.has_effects(e)
        at = wanted.pop() if len(wanted) == 1 and not effects else None
        # A group that loads nothing waits for others before it takes its operands: of
        # a constant array a number remains to wait for.
        apart = at is not None and (groups[at].loads or any(map(shape, e.outvars)))
        if at is not None and apart:
            own[at].append(i)
        elif effects or wanted or any(v in wanted_by for v in e.outvars):
            left.append(i)
            at = None  # What it takes is evaluated before groups are.
        else:
            continue
        want(variables(e.invars), at)
    owning = [
        dataclasses.replace(g, equations=tuple(sorted(equations)))
        for g, equations in zip(groups, own, strict=True)
    ]
    return owning, left[::-1]


def _joins_gradients(update: Update, equations: Sequence[int]) -> bool:
    """Returns whether some value depends on more than one gradient."""
    program = update.program
    gradients = (
        program.invars[output.alias]
        for output in update.outputs
        if output.is_update and output.alias is not None
    )
    of: dict[jex.Var, jex.Var] = {v: v for v in gradients}
    for i in equations:
        e = program.equations[i]
        found = {of[v] for v in variables(e.invars) if v in of}
        if len(found) > 1:
            return True
        of.update((v, gradient) for gradient in found for v in e.outvars)
    return False


def _availability(update: Update, group: Group) -> tuple[Any, ...]:
    """The natural order of the last of its updates, or else of its outputs."""
    updates = [k for k in group.outputs if update.outputs[k].is_update]
    paths = (update.outputs[k].path for k in updates or group.outputs)
    return max(map(_natural, paths), default=())


def _natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key in which ``layers_10`` comes after ``layers_9``."""
    parts = re.split(r"(\d+)", path)
    return tuple((1, int(p)) if p.isdecimal() else (0, p) for p in parts if p)
