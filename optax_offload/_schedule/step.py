"""Finding what of a step can be fused into its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._places.step_options import LateGradients, Options
from optax_offload._program import Program, Step, find_branches, variables
from optax_offload._rows import NotRowLocalError, RowLocal
from optax_offload._schedule import waiting
from optax_offload._schedule.chosen_state import ChosenState
from optax_offload._schedule.follow import (
    Component,
    RowUses,
    Scan,
    Unfused,
    candidates,
    follow,
    is_backward,
    without,
)
from optax_offload._schedule.fused import Fused, FusedScan, Way, asked_window
from optax_offload._schedule.fused_step import FusedStep
from optax_offload._schedule.inside import inside, microbatches
from optax_offload._schedule.order import residuals_behind, rows_ahead
from optax_offload._schedule.parts import parts
from optax_offload._schedule.rest import rest
from optax_offload._schedule.unfused import in_bodies

# Gradients that are not fused, by reason.
Refusals: TypeAlias = Iterator[list[Unfused]]


def plan(
    step: Step,
    asked: Options,
    *,
    chosen: ChosenState | None = None,
    on_tpu: bool = False,
) -> FusedStep:
    """Finds the updates of a step that can be fused into its backward pass.

    Args:
      step: The step.
      asked: The options that are asked for.
      chosen: What it makes of new state, if anything.
      on_tpu: Whether a row is only moved where a TPU can do that.
    """
    equations = step.program.equations

    def plan_body(body: Step) -> FusedStep:
        return plan(body, asked, on_tpu=on_tpu)

    steps = inside(step, plan_body)
    apart = {i for i, each in steps.items() if each.is_streamed}
    positions = [i for i in candidates(step) if i not in apart]
    fused: list[FusedScan] = []
    unfused: list[Unfused] = []
    # Where two scans have gradients of one parameter, the second updates it.
    for i in reversed(positions) if asked.fuse else ():
        scan = Scan(i, equations[i])
        scan = dataclasses.replace(scan, is_backward=is_backward(step.program, scan))
        found, left_out = _Search(step, scan, fused, asked.late_gradients, on_tpu).run()
        fused += [found] if found else []
        unfused += left_out
    done = {s.scan.position for s in fused}
    left = [i for i in positions if i not in done]
    sums = microbatches(step, left, plan_body)
    unfused += in_bodies(step, steps, sums) if asked.fuse else ()
    others = (Scan(i, equations[i]) for i in left if i not in sums)
    streaming = tuple(
        FusedScan(scan)
        for scan in others
        if rows_ahead(step, scan) or residuals_behind(step, scan)
    )
    found = FusedStep(
        step,
        tuple(fused[::-1]),
        tuple(unfused),
        asked,
        streaming,
        chosen or ChosenState(),
        on_tpu=on_tpu,
        inside={**steps, **sums},
    )
    if on_tpu or not found.chain:
        return found
    # A TPU's compiler keeps more of each turn then.
    opened = step.with_checkpoints_apart()
    return found if opened is step else plan(opened, asked, chosen=chosen)


class _Search:
    """Searches for the gradients of a scan that can be fused."""

    def __init__(
        self,
        step: Step,
        scan: Scan,
        before: Sequence[FusedScan],
        asked: LateGradients,
        on_tpu: bool,
    ):
        self._step, self._scan, self._on_tpu = step, scan, on_tpu
        self._later = [i for i in candidates(step) if i > scan.position]
        self._before = tuple(before)
        fused = [f for s in before for f in s.fused]
        self._taken = {v for f in fused for v in f.component.results}
        self._replaced_before = {v for f in fused for v in f.replaced.values()}
        self._asked: LateGradients = asked

    def run(self) -> tuple[FusedScan | None, list[Unfused]]:
        """Returns the scan, if anything is fused, and the gradients that are not."""
        step, scan = self._step, self._scan
        used = {
            v for i in step.live for v in variables(step.program.equations[i].invars)
        }
        used.update(variables(step.program.outvars))
        followed = [v for v in scan.body.stacked if v in used]
        unfused: list[Unfused] = []
        if any(memory.movable_nbytes(v.aval) is None for v in followed):
            unfused = [Unfused(v, "its scan stacks random keys") for v in followed]
            followed = []
        # What waits for gradients, as far as they could be followed.
        waits: dict[jex.Var, tuple[jex.Var, ...]] = {}
        while followed:
            found = follow(step, scan, followed, self._later)
            unfused += _waiting(found.unfused, waits)
            waits = {
                g: c.results for c in found.components if c.waits for g in c.gradients
            }
            planned = self._planned(found)
            if isinstance(planned, FusedScan):
                return (planned if planned.fused else None), unfused
            # Without these others may be fused.
            unfused += _waiting(planned, waits)
            followed = without(followed, (*found.unfused, *planned))
        return None, unfused

    def _planned(self, found: RowUses) -> FusedScan | list[Unfused]:
        """The scan with all gradients that could be followed, or why some cannot be."""
        replaced = self._replaced(found)
        unusable = next(self._unusable(found, replaced), None)
        if unusable:
            return unusable
        fused = tuple(_fused(self._step, found, c, replaced) for c in found.components)
        late = tuple(f for f in fused if f.component.waits)
        refused = next(self._refusals(found, fused, late), None)
        if refused:
            return refused
        way = self._way(late)
        now = tuple(f for f in fused if f not in late)
        if late and way == "recompute":
            # The scan that comes second has to find the old parameters.
            now, late = (), fused
        return FusedScan(self._scan, now, late, way)

    def _unusable(
        self, found: RowUses, replaced: Mapping[jex.Var, jex.Var | None]
    ) -> Refusals:
        """Gradients that cannot be used up by what follows from them."""
        for c in found.components:
            if not self._taken.isdisjoint(c.results):
                yield _unfused(c, "a later scan adds to it")
        for c in found.components:
            places = [replaced[v] for v in c.results]
            # State that is the last gradient takes the place of the one before.
            in_place = all(places) and not c.waits
            if not in_place and any(v in c.results for v in c.gradients):
                yield _unfused(c, "the step returns it")
            if not any(places):
                yield _unfused(c, "it replaces no argument of the step")

    def _refusals(
        self, found: RowUses, fused: Sequence[Fused], late: Sequence[Fused]
    ) -> Refusals:
        """Gradients that could be used up, and must not be in this scan."""
        for f in fused if self._on_tpu else ():
            if f.whole_on_tpu:
                yield _unfused(f.component, _WHOLE)
        why = self._why_not_late(found, late)
        if why:
            yield _unfused(late[0].component, why)
        if self._asked == "auto":
            yield from self._always_moved(found, fused)
        yield from self._old_values(found, fused)
        yield from self._later_scans(fused)

    def _replaced(self, found: RowUses) -> Mapping[jex.Var, jex.Var | None]:
        """The argument that each result replaces, and no other result does.

        It is that of the same leaf of an offloaded state. Other results take the next
        argument of the same type that their update reads, as JAX pairs donated
        arguments with results.
        """
        step, axes = self._step, found.rows.axes
        read = {
            v: found.rows.restricted(c.ends).inputs
            for c in found.components
            for v in c.results
        }
        results = [
            v for v in dict.fromkeys(variables(step.program.outvars)) if v in read
        ]
        replaced: dict[jex.Var, jex.Var | None] = dict.fromkeys(results)
        free = [v for v in step.program.invars if v not in self._replaced_before]
        for v in results:
            for inlined, k in step.origins.get(v, ()):
                alias = inlined.what.update.in_place(k)
                before = None if alias is None else inlined.operands[alias]
                if not isinstance(before, jex.Var) or before not in free:
                    continue
                # What was constrained or moved after the update may not fit.
                if v in inlined.results or _type(v) == _type(before):
                    replaced[v] = before
                    free.remove(before)
                    break
        for v in [v for v, before in replaced.items() if before is None]:
            fits = (
                x
                for x in free
                if x in read[v]
                and x in axes
                and _type(x) == _type(v)
                and axes[x] == axes[v]
            )
            before = next(fits, None)
            if before is not None:
                free.remove(before)
                replaced[v] = before
        return replaced

    def _why_not_late(self, found: RowUses, late: Sequence[Fused]) -> str:
        """The reason why gradients that have to wait do not; "" if they can."""
        if not late:
            return ""
        moved = any(f.loaded_bytes for f in late)
        if self._asked == "device" or (self._asked == "auto" and not moved):
            return _why_late(self._step.program, found, late[0].rows)
        if self._ways():
            return ""
        return self._why_not()["host" if self._asked == "host" else "recompute"]

    def _way(self, late: Sequence[Fused]) -> Way:
        """Chooses how gradients wait, where they can."""
        if not late:
            return "host"
        possible = self._ways()
        if len(possible) == 1:
            return possible[0]
        here = FusedScan(self._scan, late=tuple(late))
        passes = waiting.passes(self._step, [here, *self._before])
        return waiting.cheaper(self._scan, late, passes)

    def _ways(self) -> list[Way]:
        """The ways of waiting that were asked for, and are possible."""
        ways: list[Way] = ["host", "recompute"]
        why_not = self._why_not()
        return [x for x in ways if self._asked in ("auto", x) and x not in why_not]

    def _why_not(self) -> dict[Way, str]:
        """Returns why gradients cannot wait, for each way."""
        found: dict[Way, str] = {}
        if any(map(compat.has_ordered_effects, self._step.program.equations)):
            found["host"] = _ORDERED
        if self._step.tokens(self._scan.position):
            found["recompute"] = _ONCE
        return found

    def _always_moved(self, found: RowUses, fused: Sequence[Fused]) -> Refusals:
        """Gradients whose state is only moved in some steps, known before the scan.

        `optax.MultiSteps` keeps it in the others. In a scan it would be moved in all.
        """
        origins = self._step.origins
        for inlined in self._step.inlined_updates:
            branches = find_branches(inlined.what.update)
            if branches is None or inlined.names.get(branches.predicate) in found.late:
                continue
            for f in fused:
                of = (o for v in f.component.results for o in origins.get(v, ()))
                if f.loaded_bytes and any(o.inlined is inlined for o in of):
                    yield _unfused(f.component, _KEPT)

    def _old_values(self, found: RowUses, fused: Sequence[Fused]) -> Refusals:
        """Gradients for which a value is read when its buffer has another already."""
        owner = {
            before: f.component
            for f in fused
            for before in f.replaced.values()
            if before is not None
        }
        if not owner:
            return
        scan = self._scan
        for v in variables([*scan.body.consts, *scan.body.carry]):
            if v in owner:
                yield _unfused(owner[v], "the scan reads all of what it replaces")
        here = FusedScan(scan, tuple(fused))
        for node in rest(self._step, [here]):
            if node.position == scan.position or found.late.isdisjoint(node.reads):
                continue
            name = self._step.program.equations[node.position].primitive.name
            reader = "another update" if node.left else name
            for v in node.reads:
                if v in owner:
                    why = f"{reader} reads what it replaces, after the scan"
                    yield _unfused(owner[v], why)

    def _later_scans(self, fused: Sequence[Fused]) -> Refusals:
        """Gradients for whose sums over all rows a later scan waits.

        Itself, or an update that is moved into it.
        """
        step = self._step
        equations = step.program.equations
        inside = {v for s in self._before for f in s.now for v in f.rows.inputs}
        for f in fused:
            late = {v for s in f.component.late_sums for v in step.defines(s.position)}
            for i in range(self._scan.position + 1, len(equations)):
                if late.isdisjoint(step.reads(i)):
                    continue
                if i in self._later:
                    why = "a later scan needs what its update sums up over all rows"
                    yield _unfused(f.component, why)
                late.update(step.defines(i))
            if not late.isdisjoint(inside):
                yield _unfused(f.component, _LATER)


_ONCE = "it has to wait, and its scan, which has effects, runs once"
_ORDERED = (
    "it has to wait, and JAX compiles no step with ordered effects (ordered=True) and "
    "a value in host memory"
)
_WHOLE = "a TPU moves no row of it, or of its state, by itself (less than a tile)"
_LATER = "an update in a later scan needs what its update sums up over all rows"
_KEPT = (
    "its state is kept in some steps (optax.MultiSteps), and would be moved in all "
    "(which late_gradients='host' and late_gradients='recompute' allow)"
)


def _unfused(component: Component, reason: str) -> list[Unfused]:
    return [Unfused(v, reason) for v in component.gradients]


def _waiting(
    unfused: Iterable[Unfused], waits: Mapping[jex.Var, tuple[jex.Var, ...]]
) -> list[Unfused]:
    """Gradients that are not fused, with the results that wait for them."""
    return [o._replace(waits=waits.get(o.gradient, ())) for o in unfused]


def _fused(
    step: Step,
    found: RowUses,
    component: Component,
    all_replaced: Mapping[jex.Var, jex.Var | None],
) -> Fused:
    """Gradients, and what they are used up by."""
    rows = found.rows.restricted(component.ends)
    replaced = {v: all_replaced[v] for v in component.results}
    codes = frozenset(
        v
        for v in component.results
        for inlined, k in step.origins.get(v, ())
        if inlined.what.update.outputs[k].holds_codes and _type(v)[1] == jnp.uint16
    )
    return _in_parts(step, Fused(component, rows, replaced, codes))


def _in_parts(step: Step, fused: Fused) -> Fused:
    """With its rows divided, where they are more than the window that was asked for."""
    asked, nbytes = asked_window(step, [fused]), _row_bytes(fused)
    if asked is None or nbytes <= asked:
        return fused
    component = fused.component
    if component.late_sums or (component.sums and not component.waits):
        why = "it is summed up over rows too"
        return dataclasses.replace(fused, whole_reason=why)
    # What waits is summed up before.
    rows = fused.rows.restricted(component.results)
    try:
        found = parts(rows, nbytes / asked, step.program.debug_info)
    except NotRowLocalError as e:
        return dataclasses.replace(fused, whole_reason=str(e))
    return dataclasses.replace(fused, parts=found)


def _row_bytes(fused: Fused) -> int:
    """The bytes of a row of state on each device; codes count as decoded."""
    codes = {fused.replaced[v] for v in fused.codes}
    loads = [v for v in fused.rows.inputs if memory.on_host(v.aval)]
    return sum(
        memory.decoded_nbytes_on_each_device(v.aval, v in codes) // fused.rows.rows
        for v in loads
    )


def _why_late(program: Program, found: RowUses, rows: RowLocal) -> str:
    """Returns why an update is late, by the sums that it waits for."""
    sums = {s.position for c in found.components for s in c.sums}
    names = {program.equations[i].primitive.name for i in sums}
    by = ", ".join(sorted(names)) or "what follows the scan"
    late = any(v in found.late for v in rows.inputs)
    return f"its update needs all gradients first ({by})" if late else by


def _type(v: jex.Var) -> tuple[object, ...]:
    aval: Any = v.aval
    spec = tuple(aval.sharding.spec)
    return aval.shape, aval.dtype, spec, memory.kind_of_type(aval)
