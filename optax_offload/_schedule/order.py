"""Decides the order in an iteration: of updates, loads and stores."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from jax.extend import core as jex

from optax_offload._ground import compat, limits
from optax_offload._places import memory
from optax_offload._program import (
    Step,
    as_they_are,
    entered,
    flops_of,
    nbytes,
    variables,
)
from optax_offload._schedule.follow import Scan
from optax_offload._schedule.fused import Fused

T = TypeVar("T", Fused, Fused | jex.Var)

# Updates that have less of the state than this are delayed whole: it costs nothing to
# keep their rows, and what their gradients need would be computed with no load beside
# it (F65).
SMALL_SHARE = 1 / 64

# The first two iterations are a loop of their own, and so are the last two (`scan.py`).
LEAST_LENGTH = 4


def by_gradients(scan: Scan, stores: Sequence[T]) -> list[T]:
    """Updates, or gradients that wait, in the order in which gradients are there."""
    until = _flops_until(scan, stores)
    order = sorted(range(len(stores)), key=until.__getitem__)
    return [stores[n] for n in order]


def _flops_until(
    scan: Scan, stores: Sequence[Fused | jex.Var]
) -> list[tuple[int, int]]:
    """The computation in an iteration up to the last gradient of each of these.

    It is given as floating point operations of products, and as equations.
    """
    at, _ = _until(scan.body.jaxpr)
    inside = {x.stack: x.row for x in scan.body.rows_given}
    start = (0, 0)
    return [
        max(
            (
                at.get(a, start) if isinstance(a, jex.Var) else start
                for a in map(inside.__getitem__, _gradients(f))
            ),
            default=start,
        )
        for f in stores
    ]


def _until(body: jex.Jaxpr) -> tuple[dict[jex.Var, tuple[int, int]], tuple[int, int]]:
    """The computation up to each variable, and in all. See `_flops_until`."""
    found: dict[jex.Var, tuple[int, int]] = {}
    flops = count = 0
    for e in body.eqns:
        if (inner := _called(e)) is not None:
            inside, (more, others) = _until(inner)
            for v, a in zip(e.outvars, inner.outvars, strict=True):
                n, m = inside.get(a, (0, 0)) if isinstance(a, jex.Var) else (0, 0)
                found[v] = (flops + n, count + m)
        else:
            more, others = flops_of(e), 1
            found.update((v, (flops + more, count + 1)) for v in e.outvars)
        flops, count = flops + more, count + others
    return found, (flops, count)


def rows_ahead(step: Step, scan: Scan) -> list[jex.Var]:
    """The variables in host memory whose rows each iteration loads for the next one.

    Without this an iteration waits for its own rows, with nothing to compute. They take
    the device memory of one more row; where a window was asked for, no more than that.
    """
    params = scan.equation.params
    if params["unroll"] != 1 or not _spreads(step, scan):
        return []
    windows = (x.what.caller.window_bytes for x in step.inlined_updates)
    left = min((n for n in windows if n is not None), default=math.inf)
    found: list[jex.Var] = []
    for v in scan.loaded:
        if nbytes([v]) // scan.length <= left:
            left -= nbytes([v]) // scan.length
            found.append(v)
    return found


def placed_ahead(
    scan: Scan,
    stores: Sequence[Fused | jex.Var],
    ahead: Sequence[jex.Var],
    delayed: Collection[jex.Var] = (),
) -> dict[jex.Var, int]:
    """Assigns each load ahead to what is stored once its rows are there.

    A GPU's compiler begins what a store needs when the one before it has begun (F65).
    The time between two stores is that of its products or that of its loads, whichever
    is longer. Loads are placed such that the device waits least over all speeds of a
    link: loads of L bytes beside C operations, each of which takes as long as s bytes,
    make it wait for max(0, L - C * s), which is L**2 / 2C, integrated over s.

    Args:
      scan: The scan.
      stores: The updates in it and the gradients that wait in host memory, in order.
      ahead: The variables whose rows are loaded ahead.
      delayed: The results whose rows the next iteration stores. An update of which all
        are is in no time of its own, but in that of the next.
    """
    if not stores:
        return dict.fromkeys(ahead, 0)
    # The last update in each time between stores, and the time of each update.
    ends = [n for n, f in enumerate(stores) if not {*_stored(f)} <= {*delayed}]
    ends = sorted({*ends, len(stores) - 1})
    time = [bisect.bisect_left(ends, n) for n in range(len(stores))]
    products, loads = [1] * len(ends), [0] * len(ends)
    for n, (f, flops) in enumerate(zip(stores, _flops_for(scan, stores), strict=True)):
        products[time[n]] += flops
        loads[time[n]] += sum(
            nbytes([v]) // scan.length
            for v in _taken(f)
            if memory.on_host(v.aval) and v not in (*ahead, *_gradients(f))
        )
    # A parameter is loaded before it is stored itself. Fractions are exact: each move
    # lessens the waiting, so there is a last one.
    stored = {v: time[n] for n, f in enumerate(stores) for v in _taken(f)}
    latest = {v: stored.get(v, len(ends) - 1) for v in ahead}
    found: dict[jex.Var, int] = {}
    moved = True
    while moved:
        moved = False
        for v in sorted(ahead, key=lambda v: (latest[v], -nbytes([v]))):
            size, now = nbytes([v]) // scan.length, found.get(v)
            if now is not None:
                loads[now] -= size
            waits = [
                Fraction(size * (2 * others + size), flops)
                for others, flops in zip(loads, products, strict=True)
            ]
            best = min(range(latest[v], -1, -1), key=waits.__getitem__)
            if now is None or waits[best] < waits[now]:
                found[v], moved = best, True
            loads[found[v]] += size
    return {v: ends[n] for v, n in found.items()}


def _flops_for(scan: Scan, stores: Sequence[Fused | jex.Var]) -> list[int]:
    """The operations of products that each of these needs, and none before it does."""
    body = scan.body.jaxpr
    inside = {x.stack: x.row for x in scan.body.rows_given}
    done: set[tuple[int, ...]] = set()
    return [
        _flops_of(body, {*variables(map(inside.__getitem__, _gradients(f)))}, done)
        for f in stores
    ]


def _flops_of(
    body: jex.Jaxpr,
    wanted: set[jex.Var],
    done: set[tuple[int, ...]],
    path: tuple[int, ...] = (),
) -> int:
    """The operations of what variables need, beside equations that are done.

    Both sets are added to: what the variables are computed from, and the equations of
    that, with positions in bodies inside of bodies.
    """
    flops = 0
    for n, e in reversed([*enumerate(body.eqns)]):
        if wanted.isdisjoint(e.outvars):
            continue
        at, inner = (*path, n), _called(e)
        if inner is None:
            flops += 0 if at in done else flops_of(e)
            done.add(at)
            wanted.update(variables(e.invars))
            continue
        pairs = zip(e.outvars, inner.outvars, strict=True)
        needed = {*variables(a for v, a in pairs if v in wanted)}
        flops += _flops_of(inner, needed, done, at)
        pairs = zip(e.invars, inner.invars, strict=True)
        wanted.update(variables(a for a, v in pairs if v in needed))
    return flops


def _called(e: jex.JaxprEqn) -> jex.Jaxpr | None:
    """The body of an equation that evaluates it once, in place."""
    once = as_they_are(e)
    return None if once is None else once.jaxpr


def rows_ahead_in_turn(
    step: Step, scan: Scan, fused: Sequence[Fused]
) -> dict[jex.Var, int]:
    """The variables whose rows a TPU loads an iteration ahead: some of `rows_ahead`.

    A TPU's compiler loads rows of arguments early by itself, but none of a buffer that
    the iteration before stores into. It loads rows of residuals early too, for which it
    takes an iteration out of the loop, with the memory of all that it computes (F77).
    So these are residuals, and what updates in the scan replace, the latter only where
    there is computation enough to hide them.

    Returns:
      The variables, each with the position of an update as in `placed_ahead`: the last
      one that moves much, which is as late as can be hidden.
    """
    replaced = {before for f in fused for before in f.replaced.values()}
    arguments, hidden = set(step.program.invars), hides_transfers(scan, fused)
    sizes = [nbytes(_stored(f)) for f in fused]
    large = (n for n, x in enumerate(sizes) if x >= SMALL_SHARE * sum(sizes))
    return dict.fromkeys(
        (
            v
            for v in rows_ahead(step, scan)
            if v not in arguments or (hidden and v in replaced)
        ),
        max(large, default=0),
    )


def moves_in_turn(step: Step, scan: Scan, fused: Sequence[Fused]) -> bool:
    """Returns whether a TPU is told the order of a scan's loads and stores (F77).

    It is, where computation hides them, and where more than state rests on the host. Of
    state alone loads and stores overlap more without it.
    """
    more = bool(scan.loaded)
    return compat.STORES_OVERLAP and (more or loads_first(step, scan, fused))


def loads_first(step: Step, scan: Scan, fused: Sequence[Fused]) -> bool:
    """Returns whether a TPU loads all rows of an iteration before its first update.

    That is where the computation hides them, and no window was asked for.
    """
    windows = (x.what.caller.window_bytes for x in step.inlined_updates)
    return all(n is None for n in windows) and hides_transfers(scan, fused)


def hides_transfers(scan: Scan, stores: Sequence[Fused | jex.Var]) -> bool:
    """Returns whether the computation of a scan takes longer than loads and stores.

    Both count, as rows are stored when all those of an iteration are loaded.
    """
    return flops(scan) >= limits.now.flops_per_byte * sum(_moved(scan, stores))


def updates_in_turn(scan: Scan, fused: Sequence[Fused]) -> bool:
    """Returns whether a GPU stores each update after the one before it (F65).

    Then what `placed_ahead` knows of the time between stores is right. But each store
    waits for the last to end, which takes longer where the link has much more to do
    than the device: it is done where products take half as long as transfers, or more.
    """
    return 2 * flops(scan) >= limits.now.flops_per_byte * max(_moved(scan, fused))


def _moved(scan: Scan, stores: Sequence[Fused | jex.Var]) -> tuple[int, int]:
    """The bytes that a scan loads and stores, on each device."""
    loaded = {
        v
        for v in (*scan.loaded, *(v for f in stores for v in _taken(f)))
        if memory.on_host(v.aval)
    }
    stored = (v for f in stores for v in _stored(f))
    return nbytes(loaded), nbytes(stored)


def flops(scan: Scan) -> float:
    """The floating point operations of a scan's products, on each device."""
    aval: Any = scan.equation.outvars[0].aval
    devices = aval.sharding.mesh.size or 1
    return flops_of(scan.equation) / devices


def residuals_behind(step: Step, scan: Scan) -> list[jex.Var]:
    """The stacked results in host memory whose rows the next iteration stores.

    These are results that another scan takes rows of. An iteration overwrites the
    values that it begins with, which it keeps, and would wait until they are stored.
    """
    if not _spreads(step, scan):
        return []
    taken = {
        v
        for e in step.program.equations
        for body in entered(e)
        for v in variables(body.xs)
    }
    return [x.stack for x in scan.body.stores if x.stack in taken]


def _spreads(step: Step, scan: Scan) -> bool:
    """Returns whether an iteration of a scan moves rows for others."""
    return (
        scan.length >= LEAST_LENGTH
        and compat.COPIES_AT_POSITIONS
        and not step.tokens(scan.position)
    )


def delayed_rows(
    scan: Scan, fused: Sequence[Fused], read: Collection[jex.Var] = ()
) -> frozenset[jex.Var]:
    """The results in host memory whose rows the next iteration stores.

    Gradients come late in an iteration. Without this nothing is stored beside its first
    loads, nor loaded beside its last stores, for which it has to wait. With it the last
    rows are stored while the first of the next iteration are loaded: as many bytes as
    the first update then stores, or more. Delayed rows are on the device an iteration
    longer.

    Args:
      scan: The scan.
      fused: The updates in it, in order.
      read: The arguments whose rows are loaded ahead, from the buffers that results
        are stored into: none of these is delayed.
    """
    if scan.length < LEAST_LENGTH or not compat.STORES_OVERLAP:
        return frozenset()
    stored = [(n, v) for n, f in enumerate(fused) for v in _stored(f)]
    total = nbytes(v for _, v in stored)
    sizes = [nbytes(_stored(f)) for f in fused]
    large = [(n, v) for n, v in stored if sizes[n] >= SMALL_SHARE * total]
    if len(large) < 2:
        return frozenset()
    small = [(n, v) for n, v in stored if sizes[n] < SMALL_SHARE * total]
    found = [v for n, v in small if fused[n].replaced[v] not in read]
    left = nbytes(v for n, v in large if n == large[0][0])
    for n, v in large[:0:-1]:
        if fused[n].replaced[v] not in read and left >= nbytes([v]) / 2:
            found.append(v)
            left -= nbytes([v])
    return frozenset(found)


def _gradients(f: Fused | jex.Var) -> Collection[jex.Var]:
    """The stacked gradients of an update, or one that waits."""
    return [f] if isinstance(f, jex.Var) else f.component.gradients


def _taken(f: Fused | jex.Var) -> Sequence[jex.Var]:
    """What an update takes rows of."""
    return [] if isinstance(f, jex.Var) else f.rows.inputs


def _stored(f: Fused | jex.Var) -> list[jex.Var]:
    """The results that replace an argument in host memory, or a gradient that waits."""
    if isinstance(f, jex.Var):
        return [f]
    return [
        after
        for after, before in f.replaced.items()
        if before is not None and memory.on_host(after.aval)
    ]
