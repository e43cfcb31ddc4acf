"""Carrying out a scan that updates are moved into: it decides nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._emit import part_by_part, sums
from optax_offload._emit.moves import (
    ON_HOST,
    Rest,
    RowKernel,
    as_typed,
    load_whole,
    rows_of,
    together,
)
from optax_offload._places import memory
from optax_offload._program import Program, Sharded, bound, constrain, read
from optax_offload._rows import Kernel, kernel_of
from optax_offload._schedule import Pipeline, RowUpdate, Scan

Env = Mapping[jex.Var, Any]
Buffers = dict[jex.Var, Any]


class _Unit:
    """An update of a row: loaded, computed and stored."""

    def __init__(self, update: RowUpdate, k: Kernel, debug_info: Any):
        self.update, self.fused, self.rows = update, update.fused, k.rows
        jaxpr = k.rows.jaxpr(1, debug_info)
        axes = [k.rows.axes.get(v) for v in k.sources]
        operands = {
            v: Rest(axis=axis, layout=None if axis is None else to.aval)
            for v, axis, to in zip(k.sources, axes, k.rows.inputs, strict=True)
        }
        compute = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
        self.kernel = RowKernel(compute, operands, k.targets)
        self.results = update.fused.component.results

    def target(self, v: jex.Var, sharded: Mapping[jex.Var, Sharded]) -> Rest:
        """Where the rows of a result are stored."""
        before = self.fused.replaced[v]
        return Rest(
            memory.kind_of_type(v.aval),
            self.rows.axes[v],
            v.aval if v in self.fused.codes else None,
            None if before is None else sharded.get(before),
        )


class _State(NamedTuple):
    """The values that an iteration hands on to the next.

    Attributes:
      carry: The carry of the scan itself.
      buffers: The buffers that rows are written into.
      delayed: The rows that are still to be stored, with an axis of one row.
      totals: The sums so far.
      ahead: The rows that the iteration takes and the one before has loaded.
    """

    carry: Any
    buffers: Any
    delayed: Any
    totals: Any
    ahead: Any


class ScanLoop:
    """A scan with work in it: its stacked gradients are used up row by row.

    It takes the program of the step, the scan and its turns, the values of the
    variables that these take, and the shardings of arguments, whose types do not say
    it, and of gradients that wait for all others.
    """

    def __init__(
        self,
        program: Program,
        scan: Scan,
        turn: Pipeline,
        env: Env,
        sharded: Mapping[jex.Var, Sharded],
    ):
        self._program, self._scan, self._turn = program, scan, turn
        self._env, self._sharded = env, sharded
        self._units = [
            _Unit(u, kernel_of(u.fused.rows), program.debug_info) for u in turn.updates
        ]
        self._unit_of = {v: unit for unit in self._units for v in unit.results}
        # The buffer that has the rows of an argument that are not yet replaced, and
        # along which axis.
        self._now = {
            before: (after, u.fused.rows.axes[after])
            for u in turn.updates
            for after, before in u.fused.replaced.items()
            if before is not None
        }
        # What rows are stored into, of those that are kept as the turn has stored them.
        self._rests = {
            v: unit.target(v, sharded) for unit in self._units for v in unit.results
        }
        for v in (*turn.kept, *turn.waiting):
            by_us = v in turn.waiting or v in turn.delayed
            rest = Rest("pinned_host", 0, v.aval) if by_us else Rest(axis=0)
            self._rests[v] = rest

    def run(self) -> dict[jex.Var, Any]:
        """Evaluates the scan, and returns the values that it and updates define."""
        scan, turn = self._scan, self._turn
        carry = [self._read(a) for a in scan.body.carry]
        buffers: dict[jex.Var, Any] = {}
        for unit in self._units:
            for after, before in unit.fused.replaced.items():
                buffers[after] = (
                    memory.full(after.aval, 0, memory.kind_of_type(after.aval))
                    if before is None
                    else self._env[before]
                )
        # Of equal values a TPU's compiler makes one, and copies of it on the host.
        for fill, v in enumerate((*turn.kept, *turn.waiting)):
            on_host = v in turn.waiting or memory.on_host(v.aval)
            kind = "pinned_host" if on_host else "device"
            buffers[v] = memory.full(v.aval, fill if on_host else 0, kind)
        names = list(buffers)
        self._at = memory.positions()
        # Else the first rows are loaded long before the loop begins, and kept.
        after, *carry = lax.optimization_barrier([jnp.int32(0), *carry])
        state = _State(
            carry,
            list(buffers.values()),
            [self._row_before(v, self._position(after + 1)) for v in turn.delayed],
            [sums.identity(self._program, s) for s in turn.sums],
            self._rows_ahead(0, buffers),
        )

        def given(state: _State) -> Buffers:
            return bound(names, state.buffers)

        def iteration(number: Any, before: Any, then: Any, state: _State) -> _State:
            buffers = self._with_delayed(given(state), state.delayed, before)
            found = self._iteration(number, then, state, buffers)
            return found._replace(buffers=[found.buffers[v] for v in names])

        # A position is linear in the counter of a loop that begins with 0, and always
        # that of a row: else a GPU's transfers are kernels, or go astray (F66). So the
        # first iterations are a loop of their own, of which the very first stores a row
        # as it is; and the last, of which the very last loads a row for no one. Each is
        # two, of which a loop is left (F58).
        length = scan.length
        first, last = 2 * bool(turn.delayed), 2 * bool(turn.ahead)
        end = length - last
        state = self._loop(first, lambda n: (n, 1 - n, n + 1), iteration, state)
        state = self._loop(
            end - first,
            lambda n: (first + n, first + n - 1, first + n + 1),
            iteration,
            state,
        )
        state = self._loop(
            last, lambda n: (end + n, end + n - 1, length - 1 - n), iteration, state
        )
        last = scan.length - 1
        found = bound(scan.body.carried, state.carry)
        found |= self._with_delayed(given(state), state.delayed, last)
        for s, total in zip(turn.sums, state.totals, strict=True):
            result = self._program.equations[s.position].outvars[0]
            found[result] = sums.finished(self._program, s, total)
        return found

    def _loop(
        self,
        count: int,
        numbers: Callable[[Any], tuple[Any, Any, Any]],
        iteration: Callable[[Any, Any, Any, _State], _State],
        state: _State,
    ) -> _State:
        """Some iterations: which each is, whose rows it stores, and whose it loads."""
        if not count:
            return state
        return lax.fori_loop(
            0,
            count,
            lambda n, state: iteration(*numbers(n), state),
            state,
            unroll=self._scan.equation.params["unroll"],
        )

    def _rows_ahead(self, number: Any, buffers: Buffers) -> list[Any]:
        """The rows of an iteration that the one before loads."""
        i = self._position(number)
        return [load_whole(self._row(v, i, 0, buffers)) for v in self._turn.ahead]

    def _position(self, number: Any) -> Any:
        """The row of an iteration."""
        reverse = self._scan.equation.params["reverse"]
        return self._at(self._scan.length - 1 - number if reverse else number)

    def _row_before(self, v: jex.Var, i: Any) -> Any:
        """The row that a result's takes the place of."""
        aval: Any = v.aval
        if v not in self._unit_of:
            return memory.full(aval.update(shape=(1, *aval.shape[1:])), 0)
        unit = self._unit_of[v]
        before = unit.fused.replaced[v]
        assert before is not None
        return load_whole(rows_of(self._env[before], i, 1, unit.rows.axes[v]))

    def _with_delayed(
        self, buffers: Buffers, rows: Sequence[Any], number: Any
    ) -> Buffers:
        """Buffers, with what an iteration left to be stored."""
        stored = dict(buffers)
        for v, row in bound(self._turn.delayed, rows).items():
            i = self._position(number)
            stored[v] = self._rests[v].store(buffers[v], row, i)
        return stored

    def _iteration(
        self, number: Any, then: Any, state: _State, buffers: Buffers
    ) -> _State:
        """Evaluates an iteration, and returns what it hands on, with buffers by name.

        Args:
          number: The number of the iteration.
          then: The number of the iteration whose rows it loads.
          state: The values that the iteration before has handed on.
          buffers: The buffers that rows are written into, by name.
        """
        turn, body = self._turn, self._scan.body
        i, carry, rows_now = self._position(number), state.carry, state.ahead
        if turn.in_turn:
            then, carry, rows_now = self._begun(then, carry, rows_now)
        ahead = self._rows_ahead(then, buffers)
        loaded = {v: load_whole(self._row(v, i, 0, buffers)) for v in turn.loaded}
        # Nothing is written into a buffer before what is loaded from it is there.
        read = loaded | bound(turn.ahead, ahead)
        loaded |= bound(turn.ahead, rows_now)
        xs = [self._x(a, i, buffers, loaded) for a in body.xs]
        for n, x in enumerate(body.rows_taken):
            xs[n] = load_whole(xs[n]) if x.rests else xs[n]
        given = [*map(self._read, body.consts), *carry, *xs]
        results = jax.core.eval_jaxpr(body.jaxpr, body.closed.consts, *given)
        for x in body.stores:
            if x.stack not in turn.delayed:
                results[x.position] = ON_HOST.stored(results[x.position])
        count = len(carry)
        stacked = {
            v: lax.expand_dims(y, (0,))
            for v, y in bound(body.stacked, results[count:]).items()
        }
        # Else every device adds all of a gradient up for its norm, and what waits is
        # made anew on the host.
        rows: dict[jex.Var, Any] = {
            v: constrain(row, self._sharded.get(v), 0) for v, row in stacked.items()
        }
        first = self._state_rows(i, buffers)
        loaded |= first
        read |= first
        # What a unit replaces, another may read too.
        before, buffers = buffers, dict(buffers)
        for unit in self._units:
            given = rows | self._after_loads(unit, rows, read)
            if unit.fused.parts is not None:
                whole = functools.partial(self._whole, unit, before, buffers)
                part_by_part.run(unit.fused, i, given, whole, buffers)
                continue
            found = self._values(unit, i, before, given, loaded)
            rows = given | found | self._after_loads(unit, found, read)
            leaving = self._leaving(unit, rows, buffers)
            for v in unit.results:
                if v not in turn.delayed:
                    self._store(v, leaving.get(v, rows[v]), i, buffers)
        for v in turn.kept:
            if v not in turn.delayed:
                self._store(v, stacked[v], i, buffers)
        for v in turn.waiting:
            before = [read[x] for x in turn.store_after_loads.get(v, ())]
            row = lax.optimization_barrier([rows[v], *before])[0] if before else rows[v]
            self._store(v, row, i, buffers)
        totals = [
            sums.added(self._program, s, total, rows, self._env)
            for s, total in zip(turn.sums, state.totals, strict=True)
        ]
        delayed = [rows[v] for v in turn.delayed]
        return _State(results[:count], buffers, delayed, totals, ahead)

    def _begun(self, then: Any, carry: Any, rows: Sequence[Any]) -> tuple[Any, ...]:
        """What an iteration begins with on a TPU, where loads wait for it.

        A TPU's compiler has the iteration before load what it can, into the buffers
        which that one still reads: rows that are not written back are copied first.
        """
        yes = lax.optimization_barrier(jnp.bool_(True))
        rows = [
            lax.select(yes, x, lax.full_like(x, 0)) if v in self._turn.copied else x
            for v, x in zip(self._turn.ahead, rows, strict=True)
        ]
        return lax.optimization_barrier((jnp.int32(then), carry, rows))

    def _state_rows(self, i: Any, buffers: Buffers) -> dict[jex.Var, Any]:
        """The rows that are loaded before the first update."""
        leaves = {
            v: leaf
            for unit in self._units
            for v, leaf in unit.kernel.operands.items()
            if unit.fused.parts is None and leaf.axis == 0
        }
        return {
            v: leaves[v].load(self._unreplaced(v, 0, buffers), i, 1)
            for v in self._turn.first
        }

    def _leaving(
        self, unit: _Unit, rows: Mapping[jex.Var, Any], buffers: Buffers
    ) -> dict[jex.Var, Any]:
        """The rows of an update that leave the device together, after some stores."""
        leaving, after = unit.update.leaving, unit.update.after
        if len(leaving) + len(after) < 2:
            return {}
        given = {v: rows[v] for v in leaving} | {v: buffers[v] for v in after}
        tied = together(given)
        buffers.update((v, tied[v]) for v in after)
        return {v: tied[v] for v in leaving}

    def _store(self, v: jex.Var, row: Any, i: Any, buffers: Buffers) -> None:
        """Stores a row in its buffer, after the row that is stored before it."""
        last = self._turn.store_after.get(v)
        if last is not None:
            row, buffers[last] = lax.optimization_barrier((row, buffers[last]))
        buffers[v] = self._rests[v].store(buffers[v], row, i)

    def _read(self, a: Any) -> Any:
        return read(a, lambda v: as_typed(self._env[v], v.aval))

    def _row(self, v: jex.Var, i: Any, axis: int, buffers: Buffers) -> Any:
        """The row of a value of the step, as it was before the scan."""
        return rows_of(self._unreplaced(v, axis, buffers), i, 1, axis)

    def _unreplaced(self, v: jex.Var, axis: int | None, buffers: Buffers) -> Any:
        """What has the rows along an axis that are not yet replaced."""
        if v not in self._now or axis is None:
            return self._env[v]
        after, replaced_axis = self._now[v]
        return buffers[after] if replaced_axis == axis else self._env[v]

    def _x(
        self, a: Any, i: Any, buffers: Buffers, loaded: Mapping[jex.Var, Any]
    ) -> Any:
        """Arrays of which an iteration of the scan takes a row."""
        if not isinstance(a, jex.Var):
            return a.val[i]
        if a in loaded:
            return lax.squeeze(loaded[a], (0,))
        return as_typed(lax.squeeze(self._row(a, i, 0, buffers), (0,)), a.aval)

    def _after_loads(
        self,
        unit: _Unit,
        rows: Mapping[jex.Var, Any],
        read: Mapping[jex.Var, Any],
    ) -> dict[jex.Var, Any]:
        """Those of some rows that wait for the loads of a unit, once it has these."""
        before = [read[v] for v in unit.update.loads]
        return {
            v: lax.optimization_barrier([rows[v], *before])[0]
            for v in unit.update.held
            if v in rows
        }

    def _values(
        self,
        unit: _Unit,
        i: Any,
        buffers: Buffers,
        rows: Mapping[jex.Var, Any],
        loaded: Mapping[jex.Var, Any],
    ) -> dict[jex.Var, Any]:
        """The outputs of a unit."""
        axes = unit.rows.axes
        given = {**rows, **{v: x for v, x in loaded.items() if axes.get(v) == 0}}

        def whole(v: jex.Var) -> Any:
            return self._unreplaced(v, axes.get(v), buffers)

        return unit.kernel.values(i, 1, whole, given)

    def _whole(self, unit: _Unit, before: Buffers, buffers: Buffers, v: jex.Var) -> Any:
        """The value to take a part of a row from, with this unit's writes alone."""
        after, _ = self._now.get(v, (v, None))
        now = buffers if after in unit.results else before
        return now.get(after, self._env[v])
