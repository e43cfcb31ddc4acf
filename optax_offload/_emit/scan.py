"""Carrying out a scan that updates are moved into: it decides nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._emit import part_by_part, sums
from optax_offload._emit.moves import load, load_whole, rows_of, store, with_rows
from optax_offload._lowered import Sharded, constrain
from optax_offload._program import Builder, Program, is_store, read, variables
from optax_offload._rows import Kernel, RowLocal, Sum, kernel_of
from optax_offload._schedule import Fused, Scan

Env = Mapping[jex.Var, Any]
Buffers = dict[jex.Var, Any]


class _Unit:
    """An update of a row: loaded, computed and stored."""

    def __init__(self, fused: Fused, k: Kernel, debug_info: Any):
        self.fused, self.kernel = fused, k
        self.jaxpr = k.rows.jaxpr(1, debug_info)
        self.results = [v for v in k.targets if v in fused.replaced]

    @property
    def rows(self) -> RowLocal:
        """The equations, with what they move."""
        return self.kernel.rows


@dataclasses.dataclass(frozen=True)
class InScan:
    """The work that is moved into a scan, beside its own iterations.

    Attributes:
      fused: The updates in it, in order.
      delayed: The results whose rows are stored in the next iteration.
      sums: The values that are summed up over the rows.
      kept: The stacked results that are made whole, on the device.
      waiting: The stacked results that wait in host memory.
      like: For each gradient that waits for all others, the variable that it is
        sharded like.
      ahead: The variables in host memory whose rows each iteration loads for the next
        one, and the position of the update that is stored after each of these loads.
      loaded: The variables whose rows are loaded for its body, ahead or not.
      loads_first: Whether an update is computed once the rows are there that are loaded
        from the buffers it is stored into, and not only stored then.
    """

    fused: Sequence[Fused]
    delayed: Collection[jex.Var]
    sums: Sequence[Sum]
    kept: Sequence[jex.Var]
    waiting: Sequence[jex.Var]
    like: Mapping[jex.Var, jex.Var | None]
    ahead: Mapping[jex.Var, int] = dataclasses.field(default_factory=dict)
    loaded: Collection[jex.Var] = ()
    loads_first: bool = False


def run(
    program: Program,
    scan: Scan,
    work: InScan,
    env: Env,
    sharded: Mapping[jex.Var, Sharded],
) -> dict[jex.Var, Any]:
    """Evaluates a scan with the work in it, and returns the values that these define.

    Args:
      program: The step.
      scan: The scan.
      work: The work in it.
      env: The values of the variables that it takes.
      sharded: The shardings of arguments whose types do not say it.
    """
    return _Loop(program, scan, work, env, sharded).run()


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


class _Loop:
    """A scan whose stacked gradients are used up row by row."""

    def __init__(
        self,
        program: Program,
        scan: Scan,
        work: InScan,
        env: Env,
        sharded: Mapping[jex.Var, Sharded],
    ):
        self._program, self._scan, self._work = program, scan, work
        self._env, self._sharded = env, sharded
        self._units = [
            _Unit(f, kernel_of(f.rows), program.debug_info) for f in work.fused
        ]
        self._unit_of = {v: unit for unit in self._units for v in unit.results}
        self._delayed = [v for v in (*self._unit_of, *work.kept) if v in work.delayed]
        # The buffer that has the rows of an argument that are not yet replaced, and
        # along which axis.
        self._now = {
            before: (after, f.rows.axes[after])
            for f in work.fused
            for after, before in f.replaced.items()
            if before is not None
        }
        self._ahead = tuple(work.ahead)
        xs = enumerate(scan.xs, len(scan.consts) + len(scan.carry))
        stacked = enumerate(scan.stacked, len(scan.carry))
        self._body = _on_device(
            scan.body,
            [k for k, v in xs if isinstance(v, jex.Var) and v in work.loaded],
            [k for k, v in stacked if v in work.kept and v in work.delayed],
        )

    def run(self) -> dict[jex.Var, Any]:
        """The values of what the loop defines."""
        scan, work = self._scan, self._work
        carry = [self._read(a) for a in scan.carry]
        buffers: dict[jex.Var, Any] = {}
        for f in work.fused:
            for after, before in f.replaced.items():
                buffers[after] = (
                    _memory.full(after.aval, 0, _memory.kind_of_type(after.aval))
                    if before is None
                    else self._env[before]
                )
        # Of equal values a TPU's compiler makes one, and copies of it on the host.
        for fill, v in enumerate((*work.kept, *work.waiting)):
            on_host = v in work.waiting or _memory.on_host(v.aval)
            kind = "pinned_host" if on_host else "device"
            buffers[v] = _memory.full(v.aval, fill if on_host else 0, kind)
        names = list(buffers)
        self._at = _memory.positions()
        # Else the first rows are loaded long before the loop begins, and kept.
        after, *carry = lax.optimization_barrier([jnp.int32(0), *carry])
        state = _State(
            carry,
            list(buffers.values()),
            [self._row_before(v, self._position(after + 1)) for v in self._delayed],
            [sums.identity(self._program, s) for s in work.sums],
            self._rows_ahead(0, buffers),
        )

        def given(state: _State) -> Buffers:
            return dict(zip(names, state.buffers, strict=True))

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
        first, last = 2 * bool(self._delayed), 2 * bool(self._ahead)
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
        found = dict(zip(scan.carried, state.carry, strict=True))
        found |= self._with_delayed(given(state), state.delayed, last)
        for s, total in zip(work.sums, state.totals, strict=True):
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
        return [load_whole(self._row(v, i, 0, buffers)) for v in self._ahead]

    def _position(self, number: Any) -> Any:
        """The row of an iteration."""
        reverse = self._scan.equation.params["reverse"]
        return self._at(self._scan.length - 1 - number if reverse else number)

    def _row_before(self, v: jex.Var, i: Any) -> Any:
        """The row that a result's takes the place of."""
        aval: Any = v.aval
        if v not in self._unit_of:
            return _memory.full(aval.update(shape=(1, *aval.shape[1:])), 0)
        unit = self._unit_of[v]
        before = unit.fused.replaced[v]
        assert before is not None
        return load_whole(rows_of(self._env[before], i, 1, unit.rows.axes[v]))

    def _with_delayed(
        self, buffers: Buffers, rows: Sequence[Any], number: Any
    ) -> Buffers:
        """Buffers, with what an iteration left to be stored."""
        stored = dict(buffers)
        for v, row in zip(self._delayed, rows, strict=True):
            stored[v] = self._put(buffers[v], v, row, self._position(number))
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
        scan, body, i = self._scan, self._body, self._position(number)
        ahead = self._rows_ahead(then, buffers)
        loaded = dict(zip(self._ahead, state.ahead, strict=True)) | {
            v: load_whole(self._row(v, i, 0, buffers))
            for v in self._work.loaded
            if v not in self._ahead
        }
        # Nothing is written into a buffer before what is loaded from it is there.
        read = {v: x for v, x in loaded.items() if v not in self._ahead}
        read |= zip(self._ahead, ahead, strict=True)
        xs = [self._x(a, i, buffers, loaded) for a in scan.xs]
        consts = [self._read(a) for a in scan.consts]
        results = jax.core.eval_jaxpr(
            body.jaxpr, body.consts, *consts, *state.carry, *xs
        )
        count = len(state.carry)
        stacked = {
            v: lax.expand_dims(y, (0,))
            for v, y in zip(scan.stacked, results[count:], strict=True)
        }
        # Else every device adds all of a gradient up for its norm, and what waits is
        # made anew on the host.
        rows: dict[jex.Var, Any] = {
            v: constrain(row, self._like(v), 0) for v, row in stacked.items()
        }
        # What a unit replaces, another may read too.
        before, buffers = buffers, dict(buffers)
        for unit in self._units:
            gradients = [v for v in unit.fused.component.gradients if v in rows]
            if unit.fused.parts is not None:
                whole = functools.partial(self._whole, unit, before, buffers)
                given = rows | self._after_loads(unit, gradients, rows, read)
                part_by_part.run(unit.fused, i, given, whole, buffers)
                continue
            if self._work.loads_first:
                rows |= self._after_loads(unit, gradients, rows, read)
            rows |= self._values(unit, i, before, rows, loaded)
            if not self._work.loads_first:
                tied = [v for v in unit.results if unit.fused.replaced[v] in read]
                rows |= self._after_loads(unit, tied, rows, read)
            now = {v: rows[v] for v in unit.results if v not in self._work.delayed}
            for v, row in (_together(now) if self._delayed else now).items():
                buffers[v] = self._put(buffers[v], v, row, i)
        for v in self._work.kept:
            if v in self._delayed:
                continue
            buffers[v] = with_rows(buffers[v], stacked[v], i, 0)
        for v in self._work.waiting:
            row = store(rows[v], "pinned_host", of=v.aval)
            buffers[v] = with_rows(buffers[v], row, i, 0)
        totals = [
            sums.added(self._program, s, total, rows, self._env)
            for s, total in zip(self._work.sums, state.totals, strict=True)
        ]
        delayed = [rows[v] for v in self._delayed]
        return _State(results[:count], buffers, delayed, totals, ahead)

    def _like(self, gradient: jex.Var) -> Sharded | None:
        """Returns the sharding that rows of a gradient need."""
        like = self._work.like.get(gradient)
        return None if like is None else self._sharded[like]

    def _read(self, a: Any) -> Any:
        return read(a, lambda v: _as_typed(self._env[v], v))

    def _row(self, v: jex.Var, i: Any, axis: int, buffers: Buffers) -> Any:
        """The row of a value of the step, as it was before the scan."""
        after, replaced_axis = self._now.get(v, (v, None))
        whole = buffers[after] if replaced_axis == axis else self._env[v]
        return rows_of(whole, i, 1, axis)

    def _x(
        self, a: Any, i: Any, buffers: Buffers, loaded: Mapping[jex.Var, Any]
    ) -> Any:
        """Arrays of which an iteration of the scan takes a row."""
        if not isinstance(a, jex.Var):
            return a.val[i]
        if a in loaded:
            return lax.squeeze(loaded[a], (0,))
        return _as_typed(lax.squeeze(self._row(a, i, 0, buffers), (0,)), a)

    def _after_loads(
        self,
        unit: _Unit,
        tied: Sequence[jex.Var],
        rows: Mapping[jex.Var, Any],
        read: Mapping[jex.Var, Any],
    ) -> dict[jex.Var, Any]:
        """Rows of a unit that are there once what is read of its buffers is.

        Unless one follows from the other, a compiler copies the whole buffer.
        """
        replaced, number = unit.fused.replaced.values(), self._units.index(unit)
        before = [
            x
            for v, x in read.items()
            if v in replaced or self._work.ahead.get(v) == number
        ]
        if not before:
            return {}
        return {v: lax.optimization_barrier([rows[v], *before])[0] for v in tied}

    def _values(
        self,
        unit: _Unit,
        i: Any,
        buffers: Buffers,
        rows: Mapping[jex.Var, Any],
        loaded: Mapping[jex.Var, Any],
    ) -> dict[jex.Var, Any]:
        """The outputs of a unit."""
        k = unit.kernel
        rows = {**rows, **{v: x for v, x in loaded.items() if k.rows.axes.get(v) == 0}}
        inputs = [
            load_whole(rows[v]) if v in rows else self._input(v, to, unit, i, buffers)
            for v, to in zip(k.sources, k.rows.inputs, strict=True)
        ]
        values = jax.core.eval_jaxpr(unit.jaxpr, (), *inputs)
        return dict(zip(k.targets, values, strict=True))

    def _input(
        self, v: jex.Var, to: jex.Var, unit: _Unit, i: Any, buffers: Buffers
    ) -> Any:
        """Operands of the equations for a row."""
        axis = unit.rows.axes.get(v)
        if axis is None:
            return load_whole(self._env[v])
        return load(self._row(v, i, axis, buffers), to.aval)

    def _whole(self, unit: _Unit, before: Buffers, buffers: Buffers, v: jex.Var) -> Any:
        """The value to take a part of a row from, with this unit's writes alone."""
        after, _ = self._now.get(v, (v, None))
        now = buffers if after in unit.results else before
        return now.get(after, self._env[v])

    def _put(self, buffer: Any, v: jex.Var, row: Any, i: Any) -> Any:
        """The buffer of a result, with the row in it."""
        if v not in self._unit_of:
            return with_rows(buffer, store(row, "pinned_host", of=v.aval), i, 0)
        unit = self._unit_of[v]
        axis, before = unit.rows.axes[v], unit.fused.replaced[v]
        row = store(
            row,
            _memory.kind_of_type(v.aval),
            of=v.aval if v in unit.fused.codes else None,
            like=None if before is None else self._sharded.get(before),
            axis=axis,
        )
        return with_rows(buffer, row, i, axis)


def _on_device(
    body: jex.ClosedJaxpr, loaded: Collection[int], stored: Collection[int]
) -> jex.ClosedJaxpr:
    """The body of a scan that others load and store some rows for.

    Args:
      body: The body, which loads and stores them itself.
      loaded: The positions of the arguments that it takes on the device.
      stored: The positions of the results that it leaves there.
    """
    jaxpr, builder = body.jaxpr, Builder()
    invars = list(jaxpr.invars)
    for i in loaded:
        invars[i] = jex.Var(_memory.device_type(jaxpr.invars[i].aval))
    given = {a: b for a, b in zip(jaxpr.invars, invars, strict=True) if a is not b}
    before: dict[Any, Any] = {}
    for e in jaxpr.eqns:
        of = [given[a] for a in variables(e.invars) if a in given]
        if of:
            builder.rename(e.outvars, of)
            continue
        if is_store(e):
            before[e.outvars[0]] = e.invars[0]
        builder.add(e)
    outvars = list(jaxpr.outvars)
    for k in stored:
        outvars[k] = before[outvars[k]]
    results = builder.read_all(outvars)
    changed = jaxpr.replace(invars=invars, eqns=builder.equations, outvars=results)
    return jex.ClosedJaxpr(changed, body.consts)


def _as_typed(x: Any, v: jex.Var) -> Any:
    """A value in the memory that the step has it in."""
    return _memory.transfer(x, _memory.kind_of_type(v.aval))


def _together(rows: dict[jex.Var, Any]) -> dict[jex.Var, Any]:
    """The rows of an update, of which those that leave the device do so together.

    Then a GPU loads all that the update takes at once (F65).
    """
    leave = [v for v in rows if _memory.on_host(v.aval)]
    if len(leave) < 2:
        return rows
    together = lax.optimization_barrier([rows[v] for v in leave])
    return rows | dict(zip(leave, together, strict=True))
