"""The dataflow of an update: from a jaxpr to an ordered list of groups.

Pure: a jaxpr goes in, a plan that can be printed and tested comes out. Every step is
linear in the number of equations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex

from optax_offload import _tpu_layout
from optax_offload._jaxpr import (
    Flat,
    _is_scalar,
    _shape,
    _vars,
    live_equations,
    signature,
)
from optax_offload._update import slicing as _rows

MIB = 2**20
# A window that nobody chose is a sixteenth of the state, between these two. With two
# slices in it, each of two leaves, its transfers have 4 to 8 MiB: at 50 GB/s 80 to 170
# us, beside a latency of some 10 us. More costs memory and gains little.
LEAST_WINDOW_BYTES = 16 * MIB
MOST_WINDOW_BYTES = 64 * MIB
# Two slices have to fit into the window, so that one can be loaded while another is
# stored. Beyond these bytes slices need not grow, and more of them fit: at 50 GB/s they
# take 0.3 ms each way, beside a latency of some 10 us, here in bytes.
MOST_SLICE_BYTES = 16 * MIB
LATENCY_BYTES = MIB // 2
# Leaves of less are loaded together with the others of their group: what their stores
# gain beside those loads is less than the latency, and a part is a kernel to compile.
LEAST_PART_BYTES = MIB // 2
# That a loop begins and ends, in the same way: some 40 us.
LOOP_BYTES = 2 * MIB
# One iteration of a loop and the next do not overlap: of n updates, each in two parts,
# the link is busy for 2 n parts in 2 n + 1. More cost compile time.
UPDATES_IN_AN_ITERATION = 32
# However many fit the window: of more a TPU's compiler loads as many as fit, and only
# then stores them. What cannot be sliced, such as Muon's products, computes with more
# memory than it loads.
MOST_AT_ONCE = 3
MOST_UNSLICED_AT_ONCE = 2
# Whether there are loops that run once, as those over whole leaves. With JAX 0.10.2 a
# TPU's compiler takes their bodies for row-major, and copies on the host what is not.
RUNS_ONCE = jax.__version_info__ >= (0, 11)
# Of models with leaves of several shapes, in turns.
MOST_UNFILLED_LOOPS = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """What of a group is loaded, computed and stored at a time.

    Attributes:
      loads: the inputs that are loaded, as positions.
      outputs: the outputs that these, and the parts before, suffice for.
      rows: the equations as they are for a slice, if the group can be updated in
        slices. Outputs that are not outputs of the group are for the next part.
    """

    loads: tuple[int, ...]
    outputs: tuple[int, ...]
    rows: _rows.RowLocal | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """What must be on the device together: usually the state of one parameter.

    Attributes:
      loads: the inputs that are loaded, as positions.
      outputs: the outputs that are computed from them, as positions.
      equations: the equations that only this group needs, as positions; of those that
        depend on no load, only if it is in a loop and not updated in slices.
      nbytes: the bytes that its loads take on each device, or its stores if more.
      tied_by: the primitives that join leaves of different parameters, where any do.
      rows: the equations as they are for a slice, if it can be updated in slices.
      homes: for each output the input whose buffer it is written into, as a position;
        None where a buffer has to be made on the device. () if the host has none.
      unit: slices are multiples of so many rows.
      parts: the order within an update: two parts where half of the loads suffice for a
        store, which then takes place beside the other loads.
      whole_because: what keeps it from being updated in slices.
    """

    loads: tuple[int, ...]
    outputs: tuple[int, ...]
    equations: tuple[int, ...]
    nbytes: int
    tied_by: tuple[str, ...] = ()
    rows: _rows.RowLocal | None = None
    homes: tuple[int | None, ...] = ()
    unit: int = 1
    parts: tuple[Part, ...] = ()
    whole_because: str = ""

    @property
    def row_local(self) -> _rows.RowLocal:
        """The rows of a group that is in a loop."""
        if self.rows is None:
            raise TypeError(f"a group that is updated whole: {self.whole_because}")
        return self.rows

    def reads(self, flat: Flat) -> list[jex.Var]:
        """The variables that it takes to update the group."""
        homes = [flat.invars[home] for home in self.homes if home is not None]
        if self.rows is not None:
            return [*self.rows.inputs, *homes]
        equations = [flat.equations[i] for i in self.equations]
        defined = {v for e in equations for v in e.outvars}
        used = [a for e in equations for a in _vars(e)]
        outputs = [flat.outvars[k] for k in self.outputs]
        used += [a for a in outputs if isinstance(a, jex.Var)]
        loads = [flat.invars[i] for i in self.loads]
        return [*loads, *(a for a in used if a not in defined), *homes]

    def signature(self, flat: Flat, inputs: Mapping[jex.Var, int]) -> Hashable:
        """Equal for groups that are updated alike, given how inputs are numbered."""
        if self.rows is not None:
            reads: Sequence[jex.Var] = self.rows.inputs
            update = self.rows.signature()
        else:
            reads = list(dict.fromkeys(self.reads(flat)))
            update = signature(
                [flat.equations[i] for i in self.equations],
                reads,
                [flat.outvars[k] for k in self.outputs],
            )
        return (
            update,
            tuple(inputs[v] for v in reads),
            tuple(inputs[flat.invars[i]] for i in self.loads),
            tuple(None if i is None else inputs[flat.invars[i]] for i in self.homes),
        )


@dataclasses.dataclass(frozen=True)
class Loop:
    """Groups that are updated together: slice by slice, or whole.

    Attributes:
      groups: in the order in which a turn of the loop updates a slice of each.
      turns: how many slices each leaf has.
      rows: of each group, the rows in a slice. What does not divide is a last slice,
        outside the loop. () where leaves are whole.
      unrolled: how many turns are one iteration of the loop.
      waits: for each update of an iteration the number of updates, counted from its
        first, that must have been stored before it is loaded.
    """

    groups: tuple[Group, ...]
    turns: int
    rows: tuple[int, ...]
    unrolled: int
    waits: tuple[int, ...]

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """Of each group, what a slice takes on each device, or the whole of it."""
        return _slice_bytes(self.groups, self.rows)

    def inputs(self, flat: Flat) -> list[jex.Var]:
        """The variables that it takes to run the loop."""
        return list(dict.fromkeys(v for g in self.groups for v in g.reads(flat)))

    def signature(self, flat: Flat) -> Hashable:
        """Equal for loops that only the names of their variables tell apart."""
        inputs = {v: i for i, v in enumerate(self.inputs(flat))}
        groups = tuple(group.signature(flat, inputs) for group in self.groups)
        return groups, self.turns, self.rows, self.unrolled, self.waits


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An update as an ordered list of stages.

    Attributes:
      stages: in the order in which they run: loops, and the groups that cannot be in
        one.
      ahead: the inputs that are loaded before all groups, as positions: scalars, such
        as a step counter, which would tie every leaf to every other.
      shared: the equations that are evaluated whole beforehand, as positions.
      waits: for each group that is in no loop the number of such groups, counted from
        the first, that must have been updated before it is loaded.
      window_bytes: the bytes that may be on each device at once.
      window_because: what the window was chosen by.
    """

    stages: tuple[Group | Loop, ...]
    ahead: tuple[int, ...]
    shared: tuple[int, ...]
    waits: tuple[int, ...]
    window_bytes: int
    window_because: str

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The stages that are loops."""
        return tuple(s for s in self.stages if isinstance(s, Loop))

    @property
    def whole(self) -> tuple[Group, ...]:
        """The groups that cannot be updated in slices."""
        return tuple(group for group in self.groups if group.rows is None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, in the order in which they run."""
        stages = (s.groups if isinstance(s, Loop) else (s,) for s in self.stages)
        return tuple(group for groups in stages for group in groups)

    def __str__(self) -> str:
        groups = self.groups
        sizes = [group.nbytes for group in groups]
        lines = [
            f"{_groups(len(sizes))} of {sum(sizes)} bytes in all, the largest of "
            f"{max(sizes, default=0)}",
            f"window of {self.window_bytes} bytes: {self.window_because}",
        ]
        lines += [
            f"loop of {loop.turns} turns over {_groups(len(loop.groups))}, "
            f"{loop.unrolled} to an iteration, "
            f"slices of {_range(loop.slice_bytes)} bytes"
            if loop.rows
            else f"loop that runs once over {_groups(len(loop.groups))}, "
            f"whole, of {_range(loop.slice_bytes)} bytes"
            for loop in self.loops
        ]
        reasons: dict[str, int] = {}
        for group in self.whole:
            if group.whole_because:
                reasons[group.whole_because] = reasons.get(group.whole_because, 0) + 1
        lines += [f"{_groups(n)} whole: {reason}" for reason, n in reasons.items()]
        return "\n".join(lines)


def _groups(count: int) -> str:
    return f"{count} group" + "s" * (count != 1)


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return str(most) if least == most else f"{least} to {most}"


def plan(
    flat: Flat,
    *,
    loads: Sequence[int],
    stores: Sequence[int],
    updates: Collection[int],
    homes: Sequence[int | None],
    paths: Sequence[str],
    slice_axes: Mapping[int, int | None],
    nbytes: Callable[[Any], int],
    window_bytes: int | None,
) -> Schedule:
    """Splits an update into groups and puts them in order.

    Outputs that depend on a common load form a group, and so does each store that
    depends on none. Groups run in the reverse natural order of their outputs' paths,
    in which gradients become available: last layer first. They are put into loops, up
    to 32 in each, in slices if they can be and need to be.

    Args:
      flat: the update.
      loads: the inputs that are loaded from the host.
      stores: the outputs that are stored to the host.
      updates: the outputs that are updates, one for each parameter.
      homes: for each output the input that it replaces: an update its gradient, new
        state the old.
      paths: the path of each output: in its tree of updates or of state.
      slice_axes: the axis along which each load may be sliced; None where it must not
        be; not there where its own type does not say.
      nbytes: the bytes that a type takes on each device.
      window_bytes: how many bytes may be on each device at once. None: a sixteenth
        of the state, but at least 16 and at most 64 MiB.
    """
    live = live_equations(flat)
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
    beside = {
        k: home
        for k, (a, home) in enumerate(zip(flat.outvars, homes, strict=True))
        if home is not None
        and k not in stored
        and isinstance(a, jex.Var)
        and a not in of
        and _shape(a)
        and a is not flat.invars[home]
    }
    slicer = _Slicer(flat, set(loads), stored, homes, slice_axes, beside)

    def group(component: int) -> Group:
        outputs = members.get(component, [])
        several = len([k for k in outputs if k in updates]) > 1
        whole = Group(
            loads=tuple(inputs[component]),
            outputs=tuple(outputs),
            equations=tuple(equations[component]),
            nbytes=max(
                sum(nbytes(flat.invars[i].aval) for i in inputs[component]),
                sum(nbytes(flat.outvars[k].aval) for k in stored.intersection(outputs)),
            ),
            tied_by=tuple(dict.fromkeys(ties[component])) if several else (),
        )
        return slicer.sliced(whole)

    groups = [group(component) for component in equations]
    groups += [Group((), (k,), (), nbytes(flat.outvars[k].aval)) for k in alone]
    groups, shared = _own(flat, shared, groups)

    def availability(group: Group) -> tuple[Any, ...]:
        of_updates = [k for k in group.outputs if k in updates]
        return max(
            (_natural(paths[k]) for k in of_updates or group.outputs), default=()
        )

    groups.sort(key=availability, reverse=True)
    because = "as asked"
    if window_bytes is None:
        sixteenth = sum(g.nbytes for g in groups) // 16
        window_bytes = min(max(sixteenth, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES)
        because = "a sixteenth of the state, at least 16 and at most 64 MiB"
    stages = _stages(groups, window_bytes)
    apart = [stage for stage in stages if isinstance(stage, Group)]
    return Schedule(
        tuple(stages),
        ahead,
        tuple(shared),
        _waits([g.nbytes for g in apart], window_bytes),
        window_bytes,
        because,
    )


class _Slicer:
    """Finds out whether a group can be updated in slices."""

    def __init__(
        self,
        flat: Flat,
        loads: Collection[int],
        stored: Collection[int],
        homes: Sequence[int | None],
        slice_axes: Mapping[int, int | None],
        beside: Mapping[int, int],
    ):
        self._flat = flat
        self._loads = loads
        self._stored = stored
        self._homes = homes
        self._axes = slice_axes
        self._outputs = {a for a in flat.outvars if isinstance(a, jex.Var)}
        self._positions = {flat.outvars[k]: k for k in beside}
        self._beside = {flat.invars[i]: flat.outvars[k] for k, i in beside.items()}
        self._producers = {
            v: (i, e) for i, e in enumerate(flat.equations) for v in e.outvars
        }

    def sliced(self, group: Group) -> Group:
        """The group with what it takes to slice it, or with why it cannot be."""
        try:
            return self._sliced(group)
        except _rows.NotRowLocalError as e:
            homes = tuple(self._in_place(k) for k in group.outputs)
            stores = zip(group.outputs, homes, strict=True)
            if not RUNS_ONCE or any(
                home is None and k in self._stored for k, home in stores
            ):
                homes = ()
            parts = (Part(group.loads, group.outputs),)
            return dataclasses.replace(
                group, homes=homes, parts=parts, whole_because=str(e)
            )

    def _sliced(self, group: Group) -> Group:
        flat = self._flat
        rows = _rows.analyze(
            [(i, flat.equations[i]) for i in group.equations],
            self._producers,
            {flat.invars[i]: self._axis(i, group) for i in group.loads},
            [flat.outvars[k] for k in group.outputs],
            self._outputs,
            self._beside,
        )
        # What is on the device, and is read for slices, is replaced in slices too.
        beside = [self._positions[v] for v in rows.outputs[len(group.outputs) :]]
        outputs = (*group.outputs, *beside)
        homes = tuple(self._home(k, rows) for k in outputs)
        types = {(v.aval, axis) for v, axis in rows.axes.items()}
        unit = max(_tpu_layout.unit(aval, axis) for aval, axis in types)
        if rows.rows < 2 * unit:
            raise _rows.NotRowLocalError(f"{rows.rows} rows, in units of {unit}")
        for k in beside:
            # By the first group that reads it, and once only.
            del self._beside[flat.invars[self._homes[k] or 0]]
        group = dataclasses.replace(
            group, outputs=outputs, rows=rows, homes=homes, unit=unit
        )
        return dataclasses.replace(group, parts=self._parts(group))

    def _parts(self, group: Group) -> tuple[Part, ...]:
        """Two parts, if half of the loads suffice for a store; else one."""
        flat, rows = self._flat, group.row_local
        early = group.loads[: (len(group.loads) + 1) // 2]
        later = group.loads[len(early) :]
        missing = {flat.invars[i] for i in later}
        for e in rows.equations:
            if not missing.isdisjoint(_vars(e)):
                missing.update(e.outvars)
        first, last = [], []
        for k, home in zip(group.outputs, group.homes, strict=True):
            # What is not loaded is read by both parts, and replaced by the last.
            ready = home in early and flat.outvars[k] not in missing
            (first if ready else last).append(k)
        small = group.nbytes < LEAST_PART_BYTES * len(group.loads)
        if small or not (later and first and last):
            return (Part(group.loads, group.outputs, rows),)
        one, other = rows.split(
            [flat.invars[i] for i in early],
            [flat.outvars[k] for k in first],
            [flat.outvars[k] for k in last],
        )
        return (
            Part(early, tuple(first), one),
            Part(later, tuple(last), other),
        )

    def _axis(self, i: int, group: Group) -> int:
        """The axis of the rows of a load."""
        shape = _shape(self._flat.invars[i])
        axis = self._axes.get(i)
        if axis is None and i not in self._axes:
            # The row means of a stacked leaf have its layer axis.
            outputs = (_shape(self._flat.outvars[k]) for k in group.outputs)
            if any(len(o) > 2 and o[0] == shape[0] for o in outputs):
                return 0
        if axis is None or axis >= len(shape):
            raise _rows.NotRowLocalError(f"no axis to slice a leaf of shape {shape}")
        return axis

    def _home(self, k: int, rows: _rows.RowLocal) -> int | None:
        """The input into whose buffer an output can be written slice by slice."""
        home = self._in_place(k)
        if home is not None:
            axis = rows.axes[self._flat.outvars[k]]
            if rows.axes.get(self._flat.invars[home], axis) == axis:
                return home
        if k in self._stored:
            raise _rows.NotRowLocalError("no buffer on the host to write into")
        return None

    def _in_place(self, k: int) -> int | None:
        return in_place(self._flat, k, self._homes[k], self._loads, self._stored)


def in_place(
    flat: Flat,
    k: int,
    home: int | None,
    loads: Collection[int],
    stores: Collection[int],
) -> int | None:
    """The input that an output replaces, if it can be written into its buffer."""
    if home is None:
        return None
    before: Any = flat.invars[home].aval
    after: Any = flat.outvars[k].aval
    same = (before.shape, before.dtype) == (after.shape, after.dtype)
    return home if same and (home in loads) == (k in stores) else None


def _stages(groups: Sequence[Group], window_bytes: int) -> list[Group | Loop]:
    """Puts the groups that have buffers to be written into into loops.

    A group joins the last loop that it makes no slower, of the few that are not full.
    """
    stages: list[Group | Loop] = []
    unfilled: list[Loop] = []
    for group in groups:
        if not group.homes:
            stages.append(group)
            continue
        alone = _loop([group], window_bytes)
        assert alone is not None, "any group can be in a loop of its own"
        for at in reversed(range(len(unfilled))):
            joined = _loop([*unfilled[at].groups, group], window_bytes)
            apart = _cost(unfilled[at]) + _cost(alone)
            if joined and _cost(joined) <= apart:
                unfilled[at] = joined
                break
        else:
            at = len(unfilled)
            unfilled.append(alone)
        if len(unfilled[at].groups) == UPDATES_IN_AN_ITERATION:
            stages.append(unfilled.pop(at))
        elif len(unfilled) > MOST_UNFILLED_LOOPS:
            stages.append(unfilled.pop(0))
    return stages + unfilled


def _loop(groups: Sequence[Group], window_bytes: int) -> Loop | None:
    """The fastest loop of which two slices, or leaves, fit into the window.

    Then one can be loaded while the one before is stored. Slices of a single group are
    loaded and stored one after the other, so that one may fill the window. None if
    there is no such loop.
    """
    groups = _in_order(groups)
    several = len(groups) > 1
    bound = min(window_bytes / 2, MOST_SLICE_BYTES) if several else window_bytes
    whole = RUNS_ONCE and max(g.nbytes for g in groups) <= bound
    loops = [_loop_of(groups, 1, (), window_bytes)] if whole else []
    if all(g.rows is not None for g in groups):
        loops += _slice_loops(groups, window_bytes, bound)
    elif not several and not whole:
        return _loop_of(groups, 1, (), window_bytes)
    return min(loops, key=_cost, default=None)


def _in_order(groups: Sequence[Group]) -> Sequence[Group]:
    """Groups in the order in which a loop updates them.

    Where sizes differ, the smallest first and last, when there is nothing to be stored
    or loaded beside them, and the largest between, beside each other.
    """
    sizes = [group.nbytes for group in groups]
    if max(sizes) <= 2 * min(sizes):
        return groups
    ascending = sorted(groups, key=lambda group: group.nbytes)
    return ascending[0::2] + ascending[1::2][::-1]


def _slice_loops(
    groups: Sequence[Group], window_bytes: int, bound: float
) -> list[Loop]:
    """Loops over slices of at most so many bytes, if the groups have any like slices.

    Several groups have to be cut into the same number of slices, each of like size.
    """
    least = max(2, math.ceil(max(g.nbytes for g in groups) / bound))
    common = math.gcd(*(g.row_local.rows // g.unit for g in groups))
    if all(g.row_local.rows % g.unit == 0 for g in groups):
        divisors = [d for d in range(least, 8 * least) if common % d == 0]
        # A count of turns that divides is within twice of what is needed, or not used.
        if divisors and divisors[0] < 2 * least:
            return [
                _loop_of(
                    groups, d, [g.row_local.rows // d for g in groups], window_bytes
                )
                for d in divisors
            ]
    if len(groups) > 1:
        return []
    in_slice = max(1, common // least)
    rows = [in_slice * groups[0].unit]
    return [_loop_of(groups, common // in_slice, rows, window_bytes)]


def _loop_of(
    groups: Sequence[Group], turns: int, rows: Sequence[int], window_bytes: int
) -> Loop:
    most = UPDATES_IN_AN_ITERATION // len(groups)
    most = min(most, turns if RUNS_ONCE else turns // 2)
    unrolled = next((n for n in range(most, 1, -1) if turns % n == 0), 1)
    waits = _waits(_slice_bytes(groups, rows) * unrolled, window_bytes)
    if len(groups) > 1:
        # A group's next slice waits for the one before anyway.
        sliceable = all(group.rows is not None for group in groups)
        at_once = MOST_AT_ONCE if sliceable else MOST_UNSLICED_AT_ONCE
        at_once = min(at_once, len(groups))
        waits = tuple(max(wait, k + 1 - at_once) for k, wait in enumerate(waits))
        if all(len(group.parts) > 1 for group in groups[-2:]):
            # Else a v5e's compiler loads the last two at once, and stores them late.
            waits = (*waits[:-1], len(waits) - 1)
    return Loop(tuple(groups), turns, tuple(rows), unrolled, waits)


def _cost(loop: Loop) -> float:
    """How long a loop takes, in bytes that a link could move in one direction.

    Loads and stores overlap, but for the first and the last part of an iteration; and
    for those of a group in one part: it is loaded again when it has been stored.
    """
    updates = [
        nbytes + LATENCY_BYTES * len(group.loads)
        for group, nbytes in zip(loop.groups, loop.slice_bytes, strict=True)
    ]
    ends = max(u / len(g.parts) for u, g in zip(updates, loop.groups, strict=True))
    iteration = loop.unrolled * sum(updates) + ends
    cost = loop.turns / loop.unrolled * iteration + LOOP_BYTES
    in_turn = (u for u, g in zip(updates, loop.groups, strict=True) if not g.parts[1:])
    return max(cost, 2 * loop.turns * max(in_turn, default=0))


def _slice_bytes(groups: Sequence[Group], rows: Sequence[int]) -> tuple[int, ...]:
    if not rows:
        return tuple(g.nbytes for g in groups)
    return tuple(
        math.ceil(g.nbytes * n / g.row_local.rows)
        for g, n in zip(groups, rows, strict=True)
    )


def _own(
    flat: Flat, shared: Sequence[int], groups: Sequence[Group]
) -> tuple[list[Group], list[int]]:
    """Gives equations to the groups that alone need them, as far as that is of use.

    What is fused with an update stays fused with it, and takes no memory of its own.

    Returns:
      The groups, and the equations that are left and needed: not those that are only
      evaluated slice by slice.
    """
    in_slices = {k for group in groups if group.rows for k in group.outputs}
    # Which group wants a variable; None for several of them, or for others.
    wanted_by: dict[jex.Var, int | None] = {
        a: None
        for k, a in enumerate(flat.outvars)
        if isinstance(a, jex.Var) and k not in in_slices
    }
    own: list[list[int]] = [list(group.equations) for group in groups]

    def want(variables: Sequence[jex.Var], at: int | None) -> None:
        for v in variables:
            wanted_by[v] = at if wanted_by.get(v, at) == at else None

    for at, group in enumerate(groups):
        if group.rows is not None:
            want(group.rows.inputs, None)
        else:
            for i in group.equations:
                want(_vars(flat.equations[i]), at if group.homes else None)
    left = []
    for i in reversed(shared):
        e = flat.equations[i]
        wanted = {wanted_by[v] for v in e.outvars if v in wanted_by}
        at = wanted.pop() if len(wanted) == 1 and not e.effects else None
        if at is not None:
            own[at].append(i)
        elif e.effects or wanted or any(v in wanted_by for v in e.outvars):
            left.append(i)
        else:
            continue
        want(_vars(e), at)
    groups = [
        dataclasses.replace(group, equations=tuple(sorted(equations)))
        for group, equations in zip(groups, own, strict=True)
    ]
    return groups, left[::-1]


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


def _waits(sizes: Sequence[int], window_bytes: int) -> tuple[int, ...]:
    """For each of a sequence how many from the first must be gone for it to fit."""
    waits = []
    first, inside = 0, 0
    for k, nbytes in enumerate(sizes):
        inside += nbytes
        while inside > window_bytes and first < k:
            inside -= sizes[first]
            first += 1
        waits.append(first)
    return tuple(waits)
