"""What of a step is fused into its backward pass, and what is not, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._backward.fused import Fused
from optax_offload._backward.rest import rest
from optax_offload._backward.rows import (
    Component,
    Followed,
    MixesError,
    Scan,
    follow,
)
from optax_offload._backward.step import Step
from optax_offload._jaxpr import Flat, shape, variables
from optax_offload._update import RowLocal

# How gradients are treated whose update needs all of them first.
Held = Literal["store", "twice"]


@dataclasses.dataclass(frozen=True)
class Outside:
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
      outside: What is not fused.
    """

    scan: Scan
    now: tuple[Fused, ...]
    held: tuple[Fused, ...]
    outside: tuple[Outside, ...]

    @property
    def fused(self) -> tuple[Fused, ...]:
        """All that is fused."""
        return (*self.now, *self.held)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a step is fused.

    Attributes:
      step: The step.
      scans: The scans that updates are moved into, in their order.
      outside: The gradients of other scans, and of no scan.
      how: How gradients are held that have to wait.
    """

    step: Step
    scans: tuple[FusedScan, ...]
    outside: tuple[Outside, ...]
    how: Held


def plan(step: Step, how: Held | None) -> Plan:
    """Finds what of a step can be fused into its backward pass.

    Args:
      step: The step.
      how: What to do with gradients whose update needs all of them first: "store"
        keeps them in host memory until then, "twice" computes them again; None leaves
        them as they are.
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
        found = _fuse(step, scan, [j for j in candidates if j > i], how)
        if found.now or found.held:
            fused.append(found)
        else:
            outside += found.outside
    return Plan(step, tuple(fused), tuple(outside), how or "store")


def _fuse(
    step: Step, scan: Scan, later: Collection[int], how: Held | None
) -> FusedScan:
    used = {v for i in step.live for v in variables(step.flat.equations[i].invars)}
    used.update(variables(step.flat.outvars))
    followed = [v for v in scan.stacked if v in used]
    outside: list[Outside] = []
    while followed:
        try:
            found = follow(step, scan, followed, later)
            now, held = _checked(step, scan, found, how)
        except MixesError as e:
            outside += [Outside(v, e.because) for v in followed if v in e.gradients]
            followed = [v for v in followed if v not in e.gradients]
            continue
        # What follows to nothing but to itself is a residual, or some other result.
        return FusedScan(scan, now, held, tuple(outside))
    return FusedScan(scan, (), (), tuple(outside))


def _checked(
    step: Step, scan: Scan, found: Followed, how: Held | None
) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """What is fused at once, and what has to wait.

    Raises:
      MixesError: Something cannot be fused.
    """
    now: list[Fused] = []
    held: list[Fused] = []
    for component in found.components:
        rows = found.rows.restricted(_ends(component))
        late = component.late or bool(component.late_sums)
        returned = [v for v in component.gradients if v in component.results]
        if returned:
            raise MixesError(component.gradients, "the step returns it")
        replaced = _replaced(step, component, rows)
        if not any(replaced.values()) and not component.sums:
            raise MixesError(
                component.gradients, "nothing that it leads to is replaced"
            )
        if late and how is None:
            raise MixesError(component.gradients, _why_late(step.flat, found, rows))
        if component.late_sums and how == "store":
            raise MixesError(component.gradients, "its update is summed over all rows")
        (held if late else now).append(Fused(component, rows, replaced))
    _check_old_values(step, scan, found, [*now, *held])
    if how == "twice" and held:
        return (), (*now, *held)
    return tuple(now), tuple(held)


def _ends(component: Component) -> list[jex.Var]:
    summed = [v for s in component.sums for v in s.operands]
    return list(dict.fromkeys([*component.results, *summed]))


def _why_late(flat: Flat, found: Followed, rows: RowLocal) -> str:
    """The first thing that an update takes and that is known only after the scan."""
    by = next((v for v in rows.inputs if v in found.late), None)
    name = "what follows it"
    if by is not None and by in flat.producers:
        name = flat.equations[flat.producers[by]].primitive.name
    return f"its update needs all gradients first ({name})"


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
    return shape(v), v.aval.dtype, _memory.kind_of_type(v.aval)


def _check_old_values(
    step: Step, scan: Scan, found: Followed, fused: Sequence[Fused]
) -> None:
    """Raises if a value is read when its buffer has another one already."""
    owner = {
        before: f for f in fused for before in f.replaced.values() if before is not None
    }
    whole = {v for v in variables([*scan.consts, *scan.carry]) if v in owner}
    if whole:
        gradients = [g for v in whole for g in owner[v].component.gradients]
        raise MixesError(gradients, "the scan reads all of what it replaces at once")
    for node in rest(step, [scan.position], fused):
        if node.position == scan.position or found.late.isdisjoint(node.reads):
            continue
        for v in node.reads:
            if v in owner:
                name = step.flat.equations[node.position].primitive.name
                raise MixesError(
                    owner[v].component.gradients,
                    f"{'another update' if node.left else name} reads the old value "
                    "of what it replaces",
                )


def reasons(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Why gradients are left outside: the reason, how many, how many bytes."""
    outside = [*plan.outside, *(o for s in plan.scans for o in s.outside)]
    # Of what a scan stacks, residuals are no gradients.
    parameters = {shape(v) for v in plan.step.flat.invars}
    found: dict[str, list[int]] = {}
    for o in outside:
        if shape(o.gradient) in parameters:
            nbytes = _memory.nbytes_on_each_device(o.gradient.aval)
            found.setdefault(o.because, []).append(nbytes)
    for because, sizes in found.items():
        yield because, len(sizes), sum(sizes)
