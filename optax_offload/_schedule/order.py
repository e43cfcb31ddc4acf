"""What comes when: passes over rows, updates in an iteration, what is stored late."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex

from optax_offload import _compat, _memory
from optax_offload._program import Step
from optax_offload._rows import Sum
from optax_offload._schedule.follow import Scan
from optax_offload._schedule.fused import Fused

# Updates that have less of the state than this are delayed whole: it costs nothing to
# keep their rows, and what their gradients need would be computed with no load beside
# it (F65).
SMALL_SHARE = 1 / 64

# Two iterations store their rows at once (`body.py`).
LEAST_LENGTH = 4


class Passes(NamedTuple):
    """How often the rows of gradients that wait are passed over.

    A norm of what a norm has scaled needs a pass of its own: clipping before LAMB, or
    clipping twice.

    Attributes:
      of: The pass in which each equation that is summed up over rows is: 0 is the scan
        that computes the gradients.
      last: The pass in which what waits is updated.
    """

    of: Mapping[int, int]
    last: int

    def sums(self, late: Sequence[Fused], number: int) -> list[Sum]:
        """What a pass sums up of these."""
        return [
            s for f in late for s in f.component.sums if self.of[s.position] == number
        ]

    def twice(self, late: Sequence[Fused]) -> int:
        """How often their scan runs again, the last time to update them."""
        return len(self._late(late) | {self.last})

    def stored(self, late: Sequence[Fused]) -> int:
        """How often they are loaded from host memory, the last time to update them."""
        return len(self._late(late)) + 1

    def _late(self, late: Sequence[Fused]) -> set[int]:
        return {self.of[s.position] for f in late for s in f.component.sums} - {0}


def passes(
    step: Step, scans: Collection[int], late: Sequence[tuple[Scan, Sequence[Fused]]]
) -> Passes:
    """Which pass sums up what: as early as what it takes is known.

    Args:
      step: The step.
      scans: All scans of it, as positions.
      late: What waits, by its scan. A pass takes the scans in this order.
    """
    gradients = {g for _, some in late for f in some for g in f.component.gradients}
    at = {
        s.position: scan.position
        for scan, some in late
        for f in some
        for s in f.component.sums
    }
    # The pass, and in it the scan, after which a variable is known.
    known: dict[jex.Var, tuple[int, int]] = {}
    of: dict[int, int] = {}

    def number(taken: Sequence[jex.Var], scan: int) -> int:
        """The first pass in which a scan can take these."""
        last, after = max((known[v] for v in taken if v in known), default=(0, -1))
        return last + (after >= scan)

    for i in range(len(step.program.equations)):
        if i in at:
            of[i] = number(step.reads(i), at[i])
            known.update((v, (of[i], at[i])) for v in step.defines(i))
            continue
        before = [known[v] for v in step.reads(i) if v in known]
        if i in scans:
            before.append((0, i))
        if before:
            after = (v for v in step.defines(i) if v not in gradients)
            known.update((v, max(before)) for v in after)
    results = (
        number(f.component.results, scan.position) for scan, some in late for f in some
    )
    return Passes(of, max([1, *of.values(), *results]))


def by_gradients(scan: Scan, fused: Sequence[Fused]) -> list[Fused]:
    """Updates in the order in which their gradients are there."""
    body: Any = scan.body.jaxpr
    producers = {v: n for n, e in enumerate(body.eqns) for v in e.outvars}
    carried = len(scan.carried)
    inside = dict(zip(scan.stacked, body.outvars[carried:], strict=True))

    def there(f: Fused) -> int:
        """When the last of its gradients is."""
        found = (inside[g] for g in f.component.gradients)
        return max(
            producers.get(a, -1) if isinstance(a, jex.Var) else -1 for a in found
        )

    return sorted(fused, key=there)


def delayed_rows(scan: Scan, fused: Sequence[Fused]) -> frozenset[jex.Var]:
    """The results in host memory whose rows the next iteration stores.

    Gradients come late in an iteration. Without this nothing is stored beside its first
    loads, nor loaded beside its last stores, for which it has to wait. With it the last
    rows are stored while the first of the next iteration are loaded: as many bytes as
    the first update then stores, or more. What is delayed is on the device an iteration
    longer.

    Args:
      scan: The scan.
      fused: What is updated in it, in order.
    """
    if scan.length < LEAST_LENGTH or not _compat.STORES_OVERLAP:
        return frozenset()
    stored = [(n, v) for n, f in enumerate(fused) for v in _stored(f)]
    total = sum(_nbytes(v) for _, v in stored)
    sizes = [sum(map(_nbytes, _stored(f))) for f in fused]
    large = [(n, v) for n, v in stored if sizes[n] >= SMALL_SHARE * total]
    if len(large) < 2:
        return frozenset()
    found = [v for n, v in stored if sizes[n] < SMALL_SHARE * total]
    waiting = 0
    while waiting < sum(_nbytes(v) for n, v in large if n == large[0][0]):
        _, v = large.pop()
        found.append(v)
        waiting += _nbytes(v)
    return frozenset(found)


def _stored(f: Fused) -> list[jex.Var]:
    """The results that replace an argument in host memory."""
    return [
        after
        for after, before in f.replaced.items()
        if before is not None and _memory.on_host(after.aval)
    ]


def _nbytes(v: jex.Var) -> int:
    """The bytes of all rows on each device."""
    return _memory.nbytes_on_each_device(v.aval)
