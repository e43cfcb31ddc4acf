"""A turn of a scan that updates are moved into: its loads, updates and stores.

A GPU's compiler orders these by what waits for what, and a TPU's takes each transfer
for the only one (F65, F77). So the plan says what waits, one function for each; what
carries it out decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._ground.units import size_text
from optax_offload._places import memory
from optax_offload._program import Step
from optax_offload._rows import Sum
from optax_offload._schedule import order
from optax_offload._schedule.follow import Scan
from optax_offload._schedule.fused import Fused


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """The update of a row in a turn.

    Attributes:
      fused: The update.
      loads: The rows that are there before it goes on.
      held: Its gradients, or its results, which wait for these.
      leaving: The rows that leave the device together.
      after: The buffers into which rows are stored before that.
    """

    fused: Fused
    loads: tuple[jex.Var, ...] = ()
    held: tuple[jex.Var, ...] = ()
    leaving: tuple[jex.Var, ...] = ()
    after: tuple[jex.Var, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A turn of a scan, and what it does for the turns beside it.

    Attributes:
      updates: The updates, in order.
      sums: The values that are summed up over the rows.
      kept: The stacked results that are made whole.
      waiting: The stacked results that wait in host memory.
      ahead: The variables whose rows it loads for the turn after it.
      loaded: Those whose rows it loads for its own equations.
      first: Those whose rows it loads before the first update, for all of them.
      delayed: The results of the turn before it, whose rows it stores.
      in_turn: Whether its loads begin when all that it is given is there.
      copied: The rows ahead that are copied then, as nothing is stored in their place.
      store_after: The results before which another's row is stored, and those.
      store_after_loads: The results whose row is stored when some rows are loaded, and
        those.
    """

    updates: tuple[RowUpdate, ...] = ()
    sums: tuple[Sum, ...] = ()
    kept: tuple[jex.Var, ...] = ()
    waiting: tuple[jex.Var, ...] = ()
    ahead: tuple[jex.Var, ...] = ()
    loaded: tuple[jex.Var, ...] = ()
    first: tuple[jex.Var, ...] = ()
    delayed: tuple[jex.Var, ...] = ()
    in_turn: bool = False
    copied: tuple[jex.Var, ...] = ()
    store_after: Mapping[jex.Var, jex.Var] = dataclasses.field(default_factory=dict)
    store_after_loads: Mapping[jex.Var, tuple[jex.Var, ...]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        fused: Iterable[Fused],
        sums: Iterable[Sum],
        kept: Iterable[jex.Var] = (),
        waiting: Iterable[jex.Var] = (),
    ) -> Pipeline:
        """A turn in which nothing has an order yet, but for the updates."""
        return cls(tuple(map(RowUpdate, fused)), tuple(sums), (*kept,), (*waiting,))

    def lines(self, length: int) -> Iterator[str]:
        """Lines on what a turn does for others, and in which order.

        Args:
          length: The number of turns.
        """
        if self.ahead:
            yield f"{_rows_text(self.ahead, length)} loaded ahead"
        if self.first:
            rows = _rows_text(self.first, length)
            yield f"{rows} loaded before the first update"
        if self.delayed:
            yield f"{_rows_text(self.delayed, length)} stored behind"
        if any(u.after for u in self.updates) or self.store_after:
            yield "stores in turn"


def for_gpu(step: Step, scan: Scan, turn: Pipeline) -> Pipeline:
    """What a GPU's compiler needs: each update has a time, by what is stored (F65).

    Args:
      step: The step.
      scan: The scan.
      turn: What is moved into it, the updates in the order of their gradients.
    """
    fused = [u.fused for u in turn.updates]
    found = order.rows_ahead(step, scan)
    whole = [f for f in fused if f.parts is None]
    delayed = order.delayed_rows(scan, whole, found)
    behind = [v for v in order.residuals_behind(step, scan) if v in turn.kept]
    delayed = delayed.union(behind)
    stores = order.by_gradients(scan, [*fused, *turn.waiting])
    if not order.hides_transfers(scan, stores):
        # Rows that are loaded early take memory beside what gradients are computed of.
        stores = list(fused)
    ahead = order.placed_ahead(scan, stores, found, delayed)
    loaded, placed = _loaded(scan, fused, ahead), _placed(ahead)
    waiting = {v: placed.get(n, ()) for n, v in enumerate(stores) if v in turn.waiting}
    of_updates = [n for n, v in enumerate(stores) if v not in turn.waiting]
    beside = {i: placed[n] for i, n in enumerate(of_updates) if n in placed}
    updates = _waiting(scan, fused, (*loaded, *ahead), beside)
    if delayed:
        in_turn = order.updates_in_turn(scan, fused)
        updates = list(_leaving_together(updates, delayed, in_turn))
    results = (v for u in updates for v in u.fused.component.results)
    return dataclasses.replace(
        turn,
        updates=tuple(updates),
        waiting=tuple(waiting) or turn.waiting,
        ahead=tuple(ahead),
        loaded=loaded,
        delayed=tuple(v for v in (*results, *turn.kept) if v in delayed),
        store_after=dict(zip([*waiting][1:], waiting, strict=False)),
        store_after_loads=waiting,
    )


def for_tpu(step: Step, scan: Scan, turn: Pipeline) -> Pipeline:
    """What a TPU's compiler needs: an order of loads and stores, written down (F77).

    It spreads transfers over an iteration by itself: no row is stored a turn behind, so
    that none is on the device longer.

    Args:
      step: The step.
      scan: The scan.
      turn: What is moved into it.
    """
    fused = [u.fused for u in turn.updates]
    ahead = order.rows_ahead_in_turn(step, scan, fused)
    in_turn = order.moves_in_turn(step, scan, fused)
    loaded = _loaded(scan, fused, ahead)
    placed, first = _placed(ahead), ()
    if in_turn and order.loads_first(step, scan, fused):
        first = _state(fused, {*scan.body.stacked, *loaded, *ahead})
        placed[0] = (*loaded, *ahead, *first)
    reads = (*loaded, *ahead, *first)
    replaced = {v for f in fused for v in f.replaced.values()}
    begins = in_turn and bool(ahead)
    return dataclasses.replace(
        turn,
        updates=tuple(_waiting(scan, fused, reads, placed, in_turn=in_turn)),
        ahead=tuple(ahead),
        loaded=loaded,
        first=first,
        in_turn=begins,
        copied=tuple(v for v in ahead if begins and v not in replaced),
        store_after=_in_turn(scan, fused) if in_turn else {},
    )


def _loaded(
    scan: Scan, fused: Sequence[Fused], ahead: Collection[jex.Var]
) -> tuple[jex.Var, ...]:
    """The variables whose rows a turn loads for its own equations, and none for it.

    What parts of a row are written into is not read as a whole, but by the scan.
    """
    in_parts = {v for f in fused if f.parts for v in f.replaced.values()}
    return tuple(v for v in scan.loaded if v in in_parts and v not in ahead)


def _placed(ahead: Mapping[jex.Var, int]) -> dict[int, tuple[jex.Var, ...]]:
    """The loads ahead, by the update that is stored after them."""
    found: dict[int, tuple[jex.Var, ...]] = {}
    for v, n in ahead.items():
        found[n] = (*found.get(n, ()), v)
    return found


def _state(fused: Sequence[Fused], given: Collection[jex.Var]) -> tuple[jex.Var, ...]:
    """What updates take rows of, and is loaded for nothing else."""
    found = (
        v
        for f in fused
        if f.parts is None
        for v in f.rows.inputs
        if f.rows.axes.get(v) == 0 and v not in given and memory.on_host(v.aval)
    )
    return tuple(dict.fromkeys(found))


def _waiting(
    scan: Scan,
    fused: Sequence[Fused],
    reads: Sequence[jex.Var],
    placed: Mapping[int, Sequence[jex.Var]],
    *,
    in_turn: bool = False,
) -> list[RowUpdate]:
    """Updates that wait for what is read of their buffers, and for loads beside them.

    Unless one follows from the other, a compiler copies the whole buffer. Before a row
    is updated in parts, and where loads are in turn, its gradients wait; else what is
    stored does.
    """
    stacked = set(scan.body.stacked)
    found: list[RowUpdate] = []
    for n, f in enumerate(fused):
        replaced, beside = set(f.replaced.values()), placed.get(n, ())
        loads = tuple(v for v in reads if v in replaced or v in beside)
        if in_turn or f.parts is not None:
            held = [v for v in f.component.gradients if v in stacked]
        else:
            held = f.component.results
            held = [v for v in held if n in placed or f.replaced[v] in reads]
        found.append(RowUpdate(f, loads, tuple(held) if loads else ()))
    return found


def _leaving_together(
    updates: Iterable[RowUpdate], delayed: Collection[jex.Var], in_turn: bool
) -> Iterator[RowUpdate]:
    """Updates whose rows leave the device together, if at all in this turn.

    Then a GPU loads all that the update takes at once (F65). In turn, they leave after
    those of the update before.
    """
    before: tuple[jex.Var, ...] = ()
    for u in updates:
        now = (v for v in u.fused.component.results if v not in delayed)
        leaving = tuple(v for v in now if memory.on_host(v.aval))
        if u.fused.parts is not None or not leaving:
            yield u
            continue
        yield dataclasses.replace(u, leaving=leaving, after=before)
        if in_turn:
            before = leaving[:1]


def _in_turn(scan: Scan, fused: Iterable[Fused]) -> dict[jex.Var, jex.Var]:
    """The stores that wait for another's, each large one for the one before it."""
    whole = (f for f in fused if f.parts is None)
    stores = [v for f in whole for v in f.component.results]
    least = limits.now.least_in_turn_bytes * scan.length
    large = [
        v
        for v in stores
        if memory.on_host(v.aval) and memory.nbytes_on_each_device(v.aval) >= least
    ]
    return dict(zip(large[1:], large, strict=False))


def _rows_text(of: Sequence[jex.Var], length: int) -> str:
    nbytes = sum(memory.nbytes_on_each_device(v.aval) // length for v in of)
    return f"{len(of)} row{'s' * (len(of) != 1)} of {size_text(nbytes)}"
