"""When an iteration updates what, and which of it the next one stores: decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload import _compat, _memory
from optax_offload._backward.fused import Fused
from optax_offload._backward.rows import Scan

# Updates that have less of the state than this are delayed whole: it costs nothing to
# keep their rows, and what their gradients need would be computed with no load beside
# it (F65).
SMALL_SHARE = 1 / 64

# Two iterations store their rows at once (`body.py`).
LEAST_LENGTH = 4


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


def delayed(scan: Scan, fused: Sequence[Fused]) -> frozenset[jex.Var]:
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
