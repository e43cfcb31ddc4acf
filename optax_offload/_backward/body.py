"""Carrying out a scan that updates are moved into: it decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory, _tpu_layout
from optax_offload._backward.fused import Fused
from optax_offload._backward.kernel import Kernel, kernel
from optax_offload._backward.rows import SUMMED_BY, Scan, Sum
from optax_offload._jaxpr import Flat, read, variables
from optax_offload._update import Cell, RowLocal, constrain

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
class Work:
    """What a scan does beside its own iterations.

    Attributes:
      fused: What is updated.
      sums: What is summed up over the rows.
      kept: The stacked results that are made whole, on the device.
      waiting: Those that wait in host memory, each with the argument that it is
        sharded like.
    """

    fused: Sequence[Fused]
    sums: Sequence[Sum]
    kept: Sequence[jex.Var]
    waiting: Mapping[jex.Var, jex.Var | None]


def run(
    flat: Flat, scan: Scan, work: Work, env: Env, cells: Mapping[jex.Var, Cell]
) -> dict[jex.Var, Any]:
    """The values of what a scan and the work in it define.

    Args:
      flat: The step.
      scan: The scan.
      work: What is done in it.
      env: The values of what it takes.
      cells: For arguments, what their shardings are noted in.
    """
    return _Loop(flat, scan, work, env, cells).run()


class _Loop:
    """A scan whose stacked gradients are used up row by row."""

    def __init__(
        self,
        flat: Flat,
        scan: Scan,
        work: Work,
        env: Env,
        cells: Mapping[jex.Var, Cell],
    ):
        self._flat, self._scan, self._work = flat, scan, work
        self._env, self._cells = env, cells
        self._units = [
            _Unit(f, kernel(f.rows), flat.debug_info)
            for f in sorted(work.fused, key=self._availability)
        ]
        # The buffer that has the rows of an argument that are not yet replaced, and
        # along which axis.
        self._now = {
            before: (after, f.rows.axes[after])
            for f in work.fused
            for after, before in f.replaced.items()
            if before is not None
        }

    def run(self) -> dict[jex.Var, Any]:
        """The values of what the loop defines."""
        scan, work = self._scan, self._work
        carry = [self._read(a) for a in scan.carry]
        buffers: dict[jex.Var, Any] = {}
        for f in work.fused:
            for after, before in f.replaced.items():
                buffers[after] = (
                    _empty(after.aval, _memory.kind_of_type(after.aval))
                    if before is None
                    else self._env[before]
                )
        buffers |= {v: _empty(v.aval, "device") for v in work.kept}
        # Of equal values a TPU's compiler makes one, and copies of it on the host.
        buffers |= {
            v: _empty(v.aval, "pinned_host", fill)
            for fill, v in enumerate(work.waiting)
        }
        sums = [_identity(self._flat.equations[s.position]) for s in work.sums]
        names = list(buffers)

        def iteration(number: Any, state: Any) -> Any:
            carry, values, sums = state
            i = scan.length - 1 - number if scan.equation.params["reverse"] else number
            carry, buffers, sums = self._iteration(
                i, carry, dict(zip(names, values, strict=True)), sums
            )
            return carry, [buffers[v] for v in names], sums

        carry, values, sums = lax.fori_loop(
            0,
            scan.length,
            iteration,
            (carry, list(buffers.values()), sums),
            unroll=scan.equation.params["unroll"],
        )
        found = dict(zip(scan.carried, carry, strict=True))
        found |= dict(zip(names, values, strict=True))
        for s, value in zip(work.sums, sums, strict=True):
            found[self._flat.equations[s.position].outvars[0]] = value
        return found

    def _iteration(
        self, i: Any, carry: list[Any], buffers: dict[jex.Var, Any], sums: list[Any]
    ) -> tuple[list[Any], dict[jex.Var, Any], list[Any]]:
        scan, body = self._scan, self._scan.body
        xs = [self._x(a, i, buffers) for a in scan.xs]
        consts = [self._read(a) for a in scan.consts]
        results = jax.core.eval_jaxpr(body.jaxpr, body.consts, *consts, *carry, *xs)
        count = len(carry)
        carry = results[:count]
        stacked = {
            v: lax.expand_dims(y, (0,))
            for v, y in zip(scan.stacked, results[count:], strict=True)
        }
        rows: dict[jex.Var, Any] = dict(stacked)
        # What a unit replaces, another may read too.
        before = dict(buffers)
        for unit in self._units:
            rows |= self._values(unit, i, before, rows)
            for v in unit.results:
                row = self._stored(v, rows[v], unit)
                buffers[v] = _put(buffers[v], row, i, unit.rows.axes[v])
        for v in self._work.kept:
            buffers[v] = _put(buffers[v], stacked[v], i, 0)
        for v, like in self._work.waiting.items():
            # Sharded in another way it would be made anew on the host.
            cell = None if like is None else self._cells[like]
            row = constrain(stacked[v], cell, 0)
            row = _tpu_layout.constrain(row, v.aval)
            row = _memory.transfer(row, "pinned_host")
            buffers[v] = _put(buffers[v], row, i, 0)
        sums = [
            self._added(s, total, rows)
            for s, total in zip(self._work.sums, sums, strict=True)
        ]
        return carry, buffers, sums

    def _read(self, a: Any) -> Any:
        return read(a, lambda v: _as_typed(self._env[v], v))

    def _row(self, v: jex.Var, i: Any, axis: int, buffers: Buffers) -> Any:
        """The row of a value of the step, as it was before the scan."""
        after, replaced_axis = self._now.get(v, (v, None))
        whole = buffers[after] if replaced_axis == axis else self._env[v]
        return lax.dynamic_slice_in_dim(whole, i, 1, axis, allow_negative_indices=False)

    def _x(self, a: Any, i: Any, buffers: Buffers) -> Any:
        """What an iteration of the scan takes a row of."""
        if not isinstance(a, jex.Var):
            return a.val[i]
        return _as_typed(lax.squeeze(self._row(a, i, 0, buffers), (0,)), a)

    def _values(
        self, unit: _Unit, i: Any, buffers: Buffers, rows: Mapping[jex.Var, Any]
    ) -> dict[jex.Var, Any]:
        """The outputs of a unit."""
        k = unit.kernel
        inputs = [
            rows[v] if v in rows else self._input(v, to, unit, i, buffers)
            for v, to in zip(k.sources, k.rows.inputs, strict=True)
        ]
        values = jax.core.eval_jaxpr(unit.jaxpr, (), *inputs)
        return dict(zip(k.targets, values, strict=True))

    def _input(
        self, v: jex.Var, to: jex.Var, unit: _Unit, i: Any, buffers: Buffers
    ) -> Any:
        """What the equations for a row take."""
        axis = unit.rows.axes.get(v)
        if axis is None:
            return _memory.transfer(self._env[v], "device")
        row = self._row(v, i, axis, buffers)
        if not _memory.on_host(row):
            return row
        return _tpu_layout.constrain(_memory.transfer(row, "device"), to.aval)

    def _stored(self, v: jex.Var, row: Any, unit: _Unit) -> Any:
        """The row of a result, where it belongs."""
        memory_kind = _memory.kind_of_type(v.aval)
        before = unit.fused.replaced[v]
        if memory_kind != "device" and before is not None:
            row = constrain(row, self._cells.get(before), unit.rows.axes[v])
        return _memory.transfer(row, memory_kind)

    def _availability(self, f: Fused) -> int:
        """When the last of its gradients is there."""
        body: Any = self._scan.body.jaxpr
        producers = {v: n for n, e in enumerate(body.eqns) for v in e.outvars}
        carried = len(self._scan.carried)
        inside = dict(zip(self._scan.stacked, body.outvars[carried:], strict=True))
        found = (inside[g] for g in f.component.gradients)
        return max(
            producers.get(a, -1) if isinstance(a, jex.Var) else -1 for a in found
        )

    def _added(self, s: Sum, total: Any, rows: Mapping[jex.Var, Any]) -> Any:
        e = self._flat.equations[s.position]
        free = list(dict.fromkeys(variables(e.invars)))
        one = jex.Jaxpr((), free, e.outvars, [e], debug_info=self._flat.debug_info)
        values = [rows[v] if v in rows else self._env[v] for v in free]
        (part,) = jax.core.eval_jaxpr(one, (), *values)
        return _ADD[SUMMED_BY[e.primitive.name]](total, part)


_ADD = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def _identity(e: jex.JaxprEqn) -> Any:
    """What a reduction of nothing is."""
    aval: Any = e.outvars[0].aval
    by = SUMMED_BY[e.primitive.name]
    value: Any = {"add": 0, "mul": 1, "and": -1, "or": 0}.get(by)
    if by in ("max", "min"):
        least = by == "max"
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            value = -jnp.inf if least else jnp.inf
        elif aval.dtype == jnp.bool_:
            value = not least
        else:
            info = jnp.iinfo(aval.dtype)
            value = info.min if least else info.max
    if aval.dtype == jnp.bool_:
        value = bool(value)
    return jnp.full(aval.shape, value, aval.dtype)


def _as_typed(x: Any, v: jex.Var) -> Any:
    """A value in the memory that the step has it in."""
    return _memory.transfer(x, _memory.kind_of_type(v.aval))


def _empty(aval: Any, memory_kind: str, fill: int = 0) -> Any:
    explicit = any(names is not None for names in aval.sharding.spec)
    sharding = aval.sharding if explicit else None
    values = lax.full(aval.shape, fill, aval.dtype, sharding=sharding)
    return _memory.transfer(values, memory_kind)


def _put(buffer: Any, row: Any, i: Any, axis: int) -> Any:
    return lax.dynamic_update_slice_in_dim(
        buffer, row, i, axis, allow_negative_indices=False
    )
