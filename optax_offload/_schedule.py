"""The dataflow of an update: from a jaxpr to an ordered list of groups.

Pure: a jaxpr goes in, a plan that can be printed and tested comes out. Every step is
linear in the number of equations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex

# What a window holds when nobody says: two transfers of 32 MiB, each long enough
# (0.6 ms at 50 GB/s) for its latency of some 10 us not to matter.
DEFAULT_WINDOW_BYTES = 64 * 2**20

Atom = Any  # jex.Var or jex.Literal


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without nested jits: equations, and the values that they close over."""

    equations: list[jex.JaxprEqn]
    constants: dict[jex.Var, Any]
    invars: list[jex.Var]
    outvars: list[Atom]
    debug_info: Any


@dataclasses.dataclass(frozen=True)
class Group:
    """What must be on the device together: usually the state of one parameter.

    Attributes:
      loads: the inputs that are loaded, as positions.
      outputs: the outputs that are computed from them, as positions.
      equations: the equations that only this group needs, as positions.
      nbytes: the bytes that its loads take on the device, or its stores if more.
      tied_by: the primitives that join leaves of different parameters, where any do.
    """

    loads: tuple[int, ...]
    outputs: tuple[int, ...]
    equations: tuple[int, ...]
    nbytes: int
    tied_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An update as an ordered list of groups.

    Attributes:
      groups: in the order in which they run.
      ahead: the inputs that are loaded before all groups, as positions: scalars, such
        as a step counter, which would tie every leaf to every other.
      shared: the equations that depend on no group's loads, as positions.
      waits: for each group the number of groups, counted from the first, that must
        have been stored before it is loaded.
      window_bytes: the bytes that may be on the device at once.
    """

    groups: tuple[Group, ...]
    ahead: tuple[int, ...]
    shared: tuple[int, ...]
    waits: tuple[int, ...]
    window_bytes: int

    def __str__(self) -> str:
        sizes = [group.nbytes for group in self.groups]
        return (
            f"{len(sizes)} groups of {sum(sizes)} bytes in all, the largest of "
            f"{max(sizes, default=0)}, in a window of {self.window_bytes} bytes"
        )


def flatten(closed: jex.ClosedJaxpr) -> Flat:
    """Inlines nested jits, and conds whose branch is known.

    optax jits its bias correction: left whole, it ties every leaf to every other. So
    does the cond of `optax.MultiSteps`, whose predicate is the constant False unless
    steps are to be skipped. A jit that constrains shardings is left as it is.
    """
    equations: list[jex.JaxprEqn] = []
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    # Scalars known while tracing; enough to know a constant predicate.
    known = {v: c for v, c in constants.items() if _is_known_scalar(c)}

    def value_of(a: Atom) -> Any:
        return a.val if isinstance(a, jex.Literal) else known.get(a)

    def walk(jaxpr: jex.Jaxpr, names: dict[jex.Var, Atom]) -> list[Atom]:
        def read(a: Atom) -> Atom:
            return a if isinstance(a, jex.Literal) else names.get(a, a)

        for e in jaxpr.eqns:
            operands = [read(a) for a in e.invars]
            body, operands_of_body = _inlinable(e, operands, value_of)
            if body is not None:
                constants.update(zip(body.jaxpr.constvars, body.consts, strict=True))
                inner = dict(zip(body.jaxpr.invars, operands_of_body, strict=True))
                names.update(zip(e.outvars, walk(body.jaxpr, inner), strict=True))
                continue
            # A jaxpr may be inlined several times: every time has variables of its own.
            results = [jex.Var(v.aval) for v in e.outvars]
            names.update(zip(e.outvars, results, strict=True))
            equations.append(e.replace(invars=operands, outvars=results))
            if e.primitive.name in ("convert_element_type", "ne"):
                values = [value_of(a) for a in operands]
                if all(v is not None for v in values):
                    with jax.ensure_compile_time_eval():
                        known[results[0]] = e.primitive.bind(*values, **e.params)
        return [read(a) for a in jaxpr.outvars]

    outvars = walk(closed.jaxpr, {})
    # The names of arguments and results are those of a function that is taken apart.
    debug_info = closed.jaxpr.debug_info.with_unknown_names()
    invars = list(closed.jaxpr.invars)
    return Flat(equations, constants, invars, outvars, debug_info)


def _is_known_scalar(c: Any) -> bool:
    return not isinstance(c, jax.core.Tracer) and getattr(c, "shape", None) == ()


def _inlinable(
    e: jex.JaxprEqn, operands: list[Atom], value_of: Callable[[Atom], Any]
) -> tuple[jex.ClosedJaxpr | None, list[Atom]]:
    if e.primitive.name in ("jit", "pjit"):
        constrained = any(
            isinstance(s, jax.sharding.Sharding)
            for s in (*e.params["in_shardings"], *e.params["out_shardings"])
        )
        return (None if constrained else e.params["jaxpr"]), operands
    if e.primitive.name == "cond":
        index = value_of(operands[0])
        if index is not None:
            branches = e.params["branches"]
            return branches[min(max(int(index), 0), len(branches) - 1)], operands[1:]
    return None, operands


def plan(
    flat: Flat,
    *,
    loads: Sequence[int],
    stores: Sequence[int],
    updates: Collection[int],
    paths: Sequence[str],
    nbytes: Callable[[Any], int],
    window_bytes: int | None,
) -> Schedule:
    """Splits an update into groups and puts them in order.

    Outputs that depend on a common load form a group, and so does each store that
    depends on none. Groups run in the reverse natural order of their outputs' paths,
    in which gradients become available: last layer first.

    Args:
      flat: the update.
      loads: the inputs that are loaded from the host.
      stores: the outputs that are stored to the host.
      updates: the outputs that are updates, one for each parameter.
      paths: the path of each output: in its tree of updates or of state.
      nbytes: the bytes of a type.
      window_bytes: how many bytes may be on the device at once. None: as many as the
        largest group, which there is no going below, and 64 MiB at least.
    """
    live = _live(flat)
    ahead = tuple(i for i in loads if _is_scalar(flat.invars[i]))
    loads = [i for i in loads if not _is_scalar(flat.invars[i])]
    of, ties = _components(flat, live, loads)
    stored = set(stores)
    unmoved = {flat.invars[i] for i in loads}
    members: dict[int, list[int]] = {}
    alone = []
    for k, a in enumerate(flat.outvars):
        if isinstance(a, jex.Var) and a in of:
            # What comes back to the host as it came need not move at all.
            if not (a in unmoved and k in stored):
                members.setdefault(of[a], []).append(k)
        elif k in stored:
            alone.append(k)
    equations: dict[int, list[int]] = {component: [] for component in members}
    shared = []
    for i in live:
        component = next((of[a] for a in _vars(flat.equations[i]) if a in of), None)
        if component is None:
            shared.append(i)
        else:
            equations.setdefault(component, []).append(i)
    inputs: dict[int, list[int]] = {}
    for i in loads:
        inputs.setdefault(of[flat.invars[i]], []).append(i)

    def group(component: int) -> Group:
        outputs = members.get(component, [])
        several = len([k for k in outputs if k in updates]) > 1
        return Group(
            loads=tuple(inputs[component]),
            outputs=tuple(outputs),
            equations=tuple(equations[component]),
            nbytes=max(
                sum(nbytes(flat.invars[i].aval) for i in inputs[component]),
                sum(nbytes(flat.outvars[k].aval) for k in stored.intersection(outputs)),
            ),
            tied_by=tuple(dict.fromkeys(ties[component])) if several else (),
        )

    groups = [group(component) for component in equations]
    groups += [Group((), (k,), (), nbytes(flat.outvars[k].aval)) for k in alone]

    def availability(group: Group) -> tuple[Any, ...]:
        of_updates = [k for k in group.outputs if k in updates]
        return max(
            (_natural(paths[k]) for k in of_updates or group.outputs), default=()
        )

    groups.sort(key=availability, reverse=True)
    if window_bytes is None:
        largest = max((g.nbytes for g in groups), default=0)
        window_bytes = max(DEFAULT_WINDOW_BYTES, largest)
    return Schedule(
        tuple(groups), ahead, tuple(shared), _waits(groups, window_bytes), window_bytes
    )


def _vars(e: jex.JaxprEqn) -> list[jex.Var]:
    return [a for a in e.invars if isinstance(a, jex.Var)]


def _is_scalar(variable: Any) -> bool:
    return not variable.aval.shape


def _live(flat: Flat) -> list[int]:
    """The equations that an output or an effect needs, in their order."""
    needed = {a for a in flat.outvars if isinstance(a, jex.Var)}
    live = []
    for i in reversed(range(len(flat.equations))):
        e = flat.equations[i]
        if e.effects or not needed.isdisjoint(e.outvars):
            live.append(i)
            needed.update(_vars(e))
    live.reverse()
    return live


def _components(
    flat: Flat, live: Sequence[int], loads: Sequence[int]
) -> tuple[dict[jex.Var, int], dict[int, list[str]]]:
    """Which loads belong together, and by what.

    Returns:
      For each variable that depends on a load, its component (variables that some
      live equation joins share one); and for each component the primitives that
      joined two.
    """
    parent = list(range(len(loads)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    node_of = {flat.invars[i]: node for node, i in enumerate(loads)}
    joints = []
    for i in live:
        e = flat.equations[i]
        nodes = {root(node_of[a]) for a in _vars(e) if a in node_of}
        if not nodes:
            continue
        first, *rest = sorted(nodes)
        for node in rest:
            parent[node] = first
            joints.append((first, e.primitive.name))
        node_of.update((v, first) for v in e.outvars)
    ties: dict[int, list[str]] = {root(node): [] for node in parent}
    for node, name in joints:
        ties[root(node)].append(name)
    return {v: root(node) for v, node in node_of.items()}, ties


def _natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key in which ``layers_10`` comes after ``layers_9``."""
    parts = re.split(r"(\d+)", path)
    return tuple((1, int(p)) if p.isdecimal() else (0, p) for p in parts if p)


def _waits(groups: Sequence[Group], window_bytes: int) -> tuple[int, ...]:
    waits = []
    first, inside = 0, 0
    for k, group in enumerate(groups):
        inside += group.nbytes
        while inside > window_bytes and first < k:
            inside -= groups[first].nbytes
            first += 1
        waits.append(first)
    return tuple(waits)
