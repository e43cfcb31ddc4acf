"""Gradients that are used up row by row, and what is done with them, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from jax.extend import core as jex

from optax_offload._ground.units import counted
from optax_offload._places import memory, tpu_layout
from optax_offload._program import Step, nbytes
from optax_offload._rows import RowLocal, Sum
from optax_offload._schedule.follow import Component, Scan
from optax_offload._schedule.parts import Parts


@dataclasses.dataclass(frozen=True)
class Fused:
    """Gradients of which every row is used up as soon as it is there.

    Attributes:
      component: The gradients, and what follows from them.
      rows: The equations that lead to results, and to what is summed up.
      replaced: The argument whose buffer each result is written into.
      codes: The results that hold codes of 8 bits.
      parts: The parts of a row, where it is more than the window that was asked for.
      whole_reason: The reason why such a row is not divided; "" where it is, or need
        not be.
    """

    component: Component
    rows: RowLocal
    replaced: Mapping[jex.Var, jex.Var | None]
    codes: frozenset[jex.Var] = frozenset()
    parts: Parts | None = None
    whole_reason: str = ""

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradients on each device."""
        return nbytes(self.component.gradients)

    @property
    def loaded_bytes(self) -> int:
        """The bytes that it takes from the host, on each device.

        Gradients of parameters in host memory are typed as if they were there too.
        """
        loaded = set(self.rows.inputs).difference(self.component.gradients)
        return nbytes(v for v in loaded if memory.on_host(v.aval))

    @property
    def whole_on_tpu(self) -> list[jex.Var]:
        """What rests on the host, or waits there, and of which a TPU moves no row."""
        axes = self.rows.axes
        moved = {v: axes.get(v) for v in (*self.rows.inputs, *self.replaced)}
        found = {v: axis for v, axis in moved.items() if memory.on_host(v.aval)}
        found |= dict.fromkeys(
            self.component.gradients if self.component.waits else (), 0
        )
        return [
            v
            for v, axis in found.items()
            if axis is not None and not tpu_layout.row_moves(v.aval, axis)
        ]

    def summing(self, sums: Collection[Sum]) -> Fused:
        """Equations that lead to some of its sums, and to no result."""
        sums = tuple(s for s in self.component.sums if s in sums)
        component = dataclasses.replace(self.component, results=(), sums=sums)
        operands = dict.fromkeys(v for s in sums for v in s.operands)
        return Fused(component, self.rows.restricted([*operands]), {})


# How gradients wait, if they do.
Way = Literal["host", "recompute"]


@dataclasses.dataclass(frozen=True)
class FusedScan:
    """A scan, and the updates that are moved into it.

    Attributes:
      scan: The scan.
      now: The updates that run in the iteration that computes their gradient.
      late: The updates that have to wait for the last gradient.
      way: The way in which these wait.
    """

    scan: Scan
    now: tuple[Fused, ...] = ()
    late: tuple[Fused, ...] = ()
    way: Way = "host"

    def given(self, fused: Iterable[Fused]) -> list[jex.Var]:
        """What updates take that does not come from the scan."""
        own = {*self.scan.equation.outvars}
        return [v for f in fused for v in f.rows.inputs if v not in own]

    @property
    def fused(self) -> tuple[Fused, ...]:
        """The updates that are fused."""
        return (*self.now, *self.late)

    def first_pass(self, sums: Collection[Sum]) -> list[Fused]:
        """What is updated in its iterations, and what is summed up of what waits."""
        return [*self.now, *(f.summing(sums) for f in self.late)]

    @property
    def noun(self) -> str:
        """The word for its results: a forward scan stacks means and the like."""
        return "gradient" if self.scan.is_backward else "stacked result"

    def gradients(self, fused: Sequence[Fused]) -> str:
        """Returns how many gradients some of these are, and of how many bytes."""
        count = sum(len(f.component.gradients) for f in fused)
        return counted(count, self.noun, sum(f.gradient_bytes for f in fused))

    def in_parts(self, f: Fused) -> int | None:
        """The number of parts in which a row is updated; None if it is whole."""
        stored = f in self.late and self.way == "host"
        return None if f.parts is None or stored else f.parts.count

    def over_window(self, fused: Iterable[Fused]) -> Iterator[str]:
        """Lines on those of which a whole row is more than the window asked for."""
        for f in fused:
            if self.in_parts(f) is None and (f.parts or f.whole_reason):
                why = f.whole_reason or "its gradient waits in host memory"
                yield f"{self.gradients([f])}, a row at once: {why}"


def asked_window(step: Step, fused: Iterable[Fused]) -> int | None:
    """The least window that was asked for, of the updates that these are of."""
    results = {v for f in fused for v in f.component.results}
    inlined_updates = (o.inlined for v in results for o in step.origins.get(v, ()))
    asked = (inlined.what.caller.window_bytes for inlined in inlined_updates)
    return min((n for n in asked if n is not None), default=None)
