"""What of a step is fused into its backward pass, and what is not, as a value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._backward import price
from optax_offload._backward.fused import Fused
from optax_offload._backward.rest import Node, rest
from optax_offload._backward.rows import (
    Component,
    Followed,
    MixesError,
    Scan,
    follow,
)
from optax_offload._backward.step import Step
from optax_offload._jaxpr import Flat, shape, variables
from optax_offload._units import size_text
from optax_offload._update import RowLocal, Schedule, schedule

# What is done with gradients whose update needs all of them first.
Held = Literal["auto", "store", "twice", "leave"]
Way = Literal["store", "twice"]


class Outside(NamedTuple):
    """A gradient that is computed whole.

    Attributes:
      gradient: The gradient.
      because: The reason.
    """

    gradient: jex.Var
    because: str


@dataclasses.dataclass(frozen=True)
class FusedScan:
    """A scan, and the updates that are moved into it.

    Attributes:
      scan: The scan.
      now: What is updated in the iteration that computes its gradient.
      held: What has to wait for the last gradient.
      way: How it waits.
      outside: What is not fused.
    """

    scan: Scan
    now: tuple[Fused, ...]
    held: tuple[Fused, ...]
    way: Way
    outside: tuple[Outside, ...]

    @property
    def fused(self) -> tuple[Fused, ...]:
        """All that is fused."""
        return (*self.now, *self.held)


@dataclasses.dataclass(frozen=True)
class FusedStep:
    """What of a step is fused into its backward pass. Print it.

    Attributes:
      step: The step.
      scans: The scans that updates are moved into, in their order.
      outside: The gradients of other scans.
    """

    step: Step
    scans: tuple[FusedScan, ...]
    outside: tuple[Outside, ...]

    @functools.cached_property
    def rest(self) -> tuple[Node, ...]:
        """What is evaluated outside of the scans, and these, in order."""
        fused = [f for each in self.scans for f in each.fused]
        positions = {each.scan.position for each in self.scans}
        return tuple(rest(self.step, positions, fused))

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that never exist, on each device."""
        return sum(f.gradient_bytes for each in self.scans for f in each.fused)

    @property
    def stored_bytes(self) -> int:
        """Of these, the bytes that wait in host memory."""
        stored = (each for each in self.scans if each.way == "store")
        return sum(f.gradient_bytes for each in stored for f in each.held)

    @property
    def flops_again(self) -> float:
        """The operations of backward passes that run twice, on each device."""
        twice = (x for x in self.scans if x.held and x.way == "twice")
        return sum(price.flops(each.scan) for each in twice)

    def schedules(self) -> tuple[Schedule, ...]:
        """How the offloaded state that is left is updated."""
        left = [node.left for node in self.rest if node.left is not None]
        return tuple(schedule(x.update, x.region.what.window_bytes) for x in left)

    def __str__(self) -> str:
        lines = [line for each in self.scans for line in _lines(each)]
        if not self.scans:
            lines = ["nothing is fused into a backward pass"]
        lines += _reasons(self)
        for each in self.schedules():
            lines += ["what is left of an offloaded update:"]
            lines += [f"  {line}" for line in str(each).splitlines()]
        return "\n".join(lines)


def _lines(each: FusedScan) -> Iterator[str]:
    yield (
        f"backward scan of {each.scan.length} iterations: "
        f"{_gradients(each.fused)} never on the device whole"
    )
    if each.now:
        yield f"  updated with their rows: {_gradients(each.now)}{_moved(each.now)}"
    if each.held and each.way == "store":
        nbytes = sum(f.gradient_bytes for f in each.held)
        yield (
            f"  need all gradients first: {_gradients(each.held)}: stored to host "
            f"memory, and loaded with their state: {size_text(nbytes)} more each way"
            f"{_moved(each.held)}"
        )
    if each.held and each.way == "twice":
        yield (
            f"  need all gradients first: {_gradients(each.held)}: the scan runs twice "
            f"({price.flops(each.scan):.3g} FLOPs more){_moved(each.held)}"
        )
    sums = sum(len(f.component.sums) for f in each.fused)
    if sums:
        yield f"  summed up row by row, in another order: {sums}"


def _gradients(fused: Sequence[Fused]) -> str:
    count = sum(len(f.component.gradients) for f in fused)
    nbytes = sum(f.gradient_bytes for f in fused)
    return f"{count} gradient{'s' * (count != 1)} of {size_text(nbytes)}"


def _moved(fused: Sequence[Fused]) -> str:
    nbytes = sum(f.loaded_bytes for f in fused)
    return f"; {size_text(nbytes)} of state loaded" if nbytes else ""


def _reasons(plan: FusedStep) -> Iterator[str]:
    """Why gradients are left outside."""
    outside = [*plan.outside, *(o for s in plan.scans for o in s.outside)]
    # Of what a scan stacks, residuals are no gradients.
    parameters = {shape(v) for v in plan.step.flat.invars}
    found: dict[str, list[int]] = {}
    for o in outside:
        if shape(o.gradient) in parameters:
            nbytes = _memory.nbytes_on_each_device(o.gradient.aval)
            found.setdefault(o.because, []).append(nbytes)
    for because, sizes in found.items():
        count = f"{len(sizes)} gradient{'s' * (len(sizes) != 1)}"
        yield f"{count} of {size_text(sum(sizes))} left outside: {because}"


def plan(step: Step, held: Held = "auto") -> FusedStep:
    """Finds what of a step can be fused into its backward pass.

    Args:
      step: The step.
      held: What to do with gradients whose update needs all of them first.
    """
    equations = step.flat.equations
    candidates = [
        i
        for i in sorted(step.live)
        if equations[i].primitive.name == "scan" and equations[i].params["length"] > 1
    ]
    fused: list[FusedScan] = []
    outside: list[Outside] = []
    for i in candidates:
        scan = Scan(i, equations[i])
        found = _Search(step, scan, [j for j in candidates if j > i], held).run()
        if found.fused:
            fused.append(found)
        else:
            outside += found.outside
    return FusedStep(step, tuple(fused), tuple(outside))


class _Search:
    """What of a scan can be fused."""

    def __init__(self, step: Step, scan: Scan, later: Collection[int], held: Held):
        self._step, self._scan, self._later = step, scan, later
        self._held: Held = held

    def run(self) -> FusedScan:
        """What was found."""
        step, scan = self._step, self._scan
        used = {v for i in step.live for v in variables(step.flat.equations[i].invars)}
        used.update(variables(step.flat.outvars))
        followed = [v for v in scan.stacked if v in used]
        outside: list[Outside] = []
        while followed:
            try:
                found = follow(step, scan, followed, self._later)
                return self._checked(found, outside)
            except MixesError as e:
                outside += [Outside(v, e.because) for v in followed if v in e.gradients]
                followed = [v for v in followed if v not in e.gradients]
        return FusedScan(scan, (), (), "store", tuple(outside))

    def _checked(self, found: Followed, outside: Sequence[Outside]) -> FusedScan:
        """What is fused, of what can be followed.

        Raises:
          MixesError: Something cannot be fused.
        """
        all_fused = [_fused(self._step, found, c) for c in found.components]
        held = tuple(f for f in all_fused if f.component.waits)
        way = self._way(found, held)
        now = tuple(f for f in all_fused if f not in held)
        if held and way == "twice":
            # The scan that comes second has to find the old parameters.
            now, held = (), tuple(all_fused)
        self._check_old_values(found, all_fused)
        return FusedScan(self._scan, now, held, way, tuple(outside))

    def _way(self, found: Followed, held: Sequence[Fused]) -> Way:
        """How gradients wait.

        Raises:
          MixesError: They are to be left as they are.
        """
        if not held:
            return "store"
        asked = self._held
        moved = any(f.loaded_bytes for f in held)
        if asked == "leave" or (asked == "auto" and not moved):
            f = held[0]
            why = _why_late(self._step.flat, found, f.rows)
            raise MixesError(f.component.gradients, why)
        way: Way = price.cheaper(self._scan, held) if asked == "auto" else asked
        for f in held:
            if f.component.late_sums and way == "store":
                if asked == "auto":
                    return "twice"
                raise MixesError(
                    f.component.gradients, "its update is summed up over all rows"
                )
        return way

    def _check_old_values(self, found: Followed, fused: Sequence[Fused]) -> None:
        """Raises if a value is read when its buffer has another one already."""
        owner = {
            before: f.component.gradients
            for f in fused
            for before in f.replaced.values()
            if before is not None
        }
        scan = self._scan
        for v in variables([*scan.consts, *scan.carry]):
            if v in owner:
                raise MixesError(owner[v], "the scan reads all of what it replaces")
        for node in rest(self._step, [scan.position], fused):
            if node.position == scan.position or found.late.isdisjoint(node.reads):
                continue
            name = self._step.flat.equations[node.position].primitive.name
            reader = "another update" if node.left else name
            for v in node.reads:
                if v in owner:
                    raise MixesError(
                        owner[v], f"{reader} reads what it replaces, after the scan"
                    )


def _fused(step: Step, found: Followed, component: Component) -> Fused:
    """Gradients, and what they are used up by.

    Raises:
      MixesError: They cannot be used up.
    """
    if any(v in component.results for v in component.gradients):
        raise MixesError(component.gradients, "the step returns it")
    rows = found.rows.restricted(component.ends)
    replaced = _replaced(step, component, rows)
    if not any(replaced.values()) and not component.sums:
        raise MixesError(component.gradients, "it replaces no argument of the step")
    return Fused(component, rows, replaced)


def _why_late(flat: Flat, found: Followed, rows: RowLocal) -> str:
    """What an update waits for."""
    names = {flat.equations[i].primitive.name for i in found.sums}
    by = ", ".join(sorted(names)) or "what follows the scan"
    late = any(v in found.late for v in rows.inputs)
    return f"its update needs all gradients first ({by})" if late else by


def _replaced(
    step: Step, component: Component, rows: RowLocal
) -> Mapping[jex.Var, jex.Var | None]:
    """For each result the argument that it replaces.

    That of the same leaf of an offloaded state; of others the next argument of the
    same type, as JAX pairs donated arguments with results.
    """
    arguments = set(step.flat.invars)
    found: dict[jex.Var, jex.Var | None] = dict.fromkeys(component.results)
    for region in step.regions:
        for k, a in enumerate(region.results):
            alias = region.what.update.in_place(k)
            before = None if alias is None else region.operands[alias]
            if a in found and before in arguments and isinstance(before, jex.Var):
                found[a] = before
    taken = set(found.values())
    read = {v for v in rows.inputs if v in rows.axes}
    free = [v for v in step.flat.invars if v in read and v not in taken]
    for v in [v for v, before in found.items() if before is None]:
        fits = (
            x for x in free if _type(x) == _type(v) and rows.axes[x] == rows.axes[v]
        )
        before = next(fits, None)
        if before is not None:
            free.remove(before)
            found[v] = before
    return found


def _type(v: jex.Var) -> tuple[object, ...]:
    aval: Any = v.aval
    return aval.shape, aval.dtype, _memory.kind_of_type(aval)
