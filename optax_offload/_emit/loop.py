"""Carrying out a loop of a schedule: it decides nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._emit import sums
from optax_offload._emit.moves import load, rows_of, store, with_rows
from optax_offload._lowered import Sharded, constrain, sharding_of
from optax_offload._program import Places, Update, evaluate, key_data, read
from optax_offload._schedule import Group, Loop, Part

T = TypeVar("T")
Env = Mapping[jex.Var, Any]
Buffers = dict[int, Any]


class Traces:
    """Functions that have been traced, so that like ones are traced once."""

    def __init__(self):
        self._traced: dict[Hashable, Any] = {}

    def once(self, signature: Hashable, make: Callable[[], T]) -> T:
        """Returns the value made for the first of these signatures."""
        try:
            known = self._traced.get(signature)
        except TypeError:  # A parameter of an equation has no hash.
            return make()
        if known is None:
            known = self._traced[signature] = make()
        return known


def run_loop(
    update: Update, loop: Loop, env: Env, traces: Traces, sharded: Mapping[int, Sharded]
) -> Buffers:
    """The values of the outputs of a loop, traced once for like loops."""
    inputs = loop.inputs(update.program)
    outputs = [k for group in loop.groups for k in group.outputs]

    def fn(*values: Any) -> list[Any]:
        here = dict(zip(inputs, values, strict=True))
        done = _Loop(update, loop, here, traces, sharded).run()
        return [done[k] for k in outputs]

    kinds = tuple(update.outputs[k].memory_kind for k in outputs)
    # Whose shardings are told apart by the program alone, is not like another.
    own = tuple(sharded.get(i) for group in loop.groups for i in group.loads)
    own += tuple(sharding_of(sharded, update.outputs[k].like) for k in outputs)
    signature = loop.signature(update.program), kinds, own
    traced = traces.once(signature, lambda: jax.jit(fn, inline=True))
    results = traced(*(env[v] for v in inputs))
    return dict(zip(outputs, results, strict=True))


class _Loop:
    """A loop in which every iteration updates slices of each of its groups, or all.

    Results are written to where their rows were read from, so no second buffer is
    needed on the host. All transfers are inside of loops. Between stages, where they
    could run beside the backward pass, an H100's compiler reorders that pass for them
    and keeps several times more alive, and a v5e's starts loads long before their use
    (F01).
    """

    def __init__(
        self,
        update: Update,
        loop: Loop,
        env: Env,
        traces: Traces,
        sharded: Mapping[int, Sharded],
    ):
        self.sharded = sharded
        self.update, self.program, self.traces = update, update.program, traces
        self._loop = loop
        self._env = env
        self.loads = {self.program.invars[i] for g in loop.groups for i in g.loads}

    def run(self) -> Buffers:
        """The values of the outputs of all groups."""
        loop = self._loop
        values = list(self._env.values())
        self._places, self._data = Places.of(values), key_data(values)
        buffers = {
            k: self._buffer(k, alias)
            for group in loop.groups
            for k, alias in zip(group.outputs, group.aliases, strict=True)
        }
        for group in loop.groups:
            for k, s in zip(group.outputs, group.sums, strict=False):
                buffers[k] = sums.identity(self.program, s)
        iterations: Any = loop.trip_count
        if iterations == 1:
            # A compiler that knew would take the loop apart (F10).
            iterations = lax.optimization_barrier(jnp.int32(1))

        self._position = _memory.positions()

        def body(carry: tuple[Any, Buffers]) -> tuple[Any, Buffers]:
            number, buffers = carry
            return _next(number), self._iteration(number, buffers)

        def goes_on(carry: tuple[Any, Buffers]) -> Any:
            return carry[0] < iterations

        start = jnp.int32(0), buffers
        _, buffers = lax.while_loop(goes_on, body, start)
        for rest in loop.remainders:
            group = loop.groups[rest.group]
            last = _Slice(self, group, self._env, rest.rows, rest.first)
            for part in group.parts:
                buffers = last.carry_out(part, buffers)
        for group in loop.groups:
            for k, s in zip(group.outputs, group.sums, strict=False):
                buffers[k] = sums.finished(self.program, s, buffers[k])
        return buffers

    def _iteration(self, number: Any, buffers: Buffers) -> Buffers:
        """The steps of the schedule, in its order."""
        loop = self._loop
        values = self._places.keys(self._data)
        env = dict(zip(self._env, values, strict=True))
        if not loop.rows:
            # What is computed from these alone would be computed before the loop, and
            # kept (F11); of a slice it cannot be.
            whole = self._read_whole()
            values, _ = lax.optimization_barrier(([env[v] for v in whole], number))
            env = {**env, **dict(zip(whole, values, strict=True))}
        rows_of = loop.rows or [None] * len(loop.groups)
        at = self._position
        slices = [
            [
                _Slice(
                    self, group, env, rows, at((number * loop.unroll + i) * (rows or 0))
                )
                for group, rows in zip(loop.groups, rows_of, strict=True)
            ]
            for i in range(loop.unroll)
        ]
        for step in loop.steps:
            part = loop.groups[step.group].parts[step.part]
            taken = slices[step.slice][step.group]
            buffers = taken.carry_out(part, buffers, step.load_after, step.store_after)
        return buffers

    def _read_whole(self) -> list[jex.Var]:
        """Values that the groups read and do not replace, such as parameters."""
        replaced = {
            self.program.invars[alias]
            for group in self._loop.groups
            for alias in group.aliases
            if alias is not None
        }
        return [v for v, x in self._env.items() if v not in replaced and jnp.ndim(x)]

    def _buffer(self, k: int, alias: int | None) -> Any:
        """Returns the buffer of an output: if possible, its input."""
        if alias is not None:
            return self._env[self.program.invars[alias]]
        aval: Any = self.program.outvars[k].aval
        output = self.update.outputs[k]
        like = sharding_of(self.sharded, output.like) if output.stored else None
        return constrain(_memory.full(aval, 0), like, None)


class _Slice:
    """A slice of each leaf of a group, or all of it: loaded, computed and stored."""

    def __init__(
        self, loop: _Loop, group: Group, env: Env, rows: int | None, first: Any
    ):
        self.group = group
        self._loop = loop
        self._env = env
        self._rows = rows
        self._first = first
        self._handed: dict[jex.Var, Any] = {}
        self._buffers = {
            loop.program.invars[alias]: k
            for k, alias in zip(group.outputs, group.aliases, strict=True)
            if alias is not None
        }

    def carry_out(
        self,
        part: Part,
        buffers: Buffers,
        load_after: Sequence[int] = (),
        store_after: Sequence[int] = (),
    ) -> Buffers:
        """The buffers with a part in them.

        It is loaded when the outputs it comes after are in theirs, and what the part
        before hands on has been computed; else the parts would be computed as one
        (F06).
        """
        program, rows = self._loop.program, self._rows
        if load_after or self._handed:
            # A barrier over host buffers is what holds a load back in a loop's body, on
            # a GPU as on a TPU (F02).
            loads = [program.invars[i] for i in part.loads]
            own = (self._buffers[v] for v in loads if v in self._buffers)
            held = dict.fromkeys((*load_after, *own))
            only_read = [v for v in loads if v not in self._buffers]
            after, read_after, handed = lax.optimization_barrier(
                (
                    [buffers[k] for k in held],
                    [self._env[v] for v in only_read],
                    list(self._handed.values()),
                )
            )
            buffers = buffers | dict(zip(held, after, strict=True))
            self._env = {**self._env, **dict(zip(only_read, read_after, strict=True))}
            self._handed = dict(zip(self._handed, handed, strict=True))
        results = self._results(part, buffers)
        if self.group.sums:
            return buffers | self._totals(results, buffers)
        if store_after:
            # The buffers of updates are in the barrier too: else a GPU's compiler
            # writes those at the end of the body, and keeps what they are computed
            # from until then (F05).
            held = list(dict.fromkeys((*store_after, *part.outputs)))
            after = lax.optimization_barrier([buffers[k] for k in held])
            buffers = buffers | dict(zip(held, after, strict=True))
        updated = dict(buffers)
        alias_of = dict(zip(self.group.outputs, self.group.aliases, strict=True))
        for k, y in zip(part.outputs, results, strict=True):
            output, alias, axis = self._loop.update.outputs[k], alias_of[k], None
            if rows is not None:
                axis = self.group.in_rows.axes[_var(program.outvars[k])]
            y = store(
                y,
                output.memory_kind,
                of=program.outvars[k].aval if output.holds_codes else None,
                like=sharding_of(
                    self._loop.sharded, output.like if alias is None else alias
                ),
                axis=axis,
            )
            if axis is not None:
                y = with_rows(buffers[k], y, self._first, axis)
            updated[k] = y
        return updated

    def _totals(self, rows: Sequence[Any], buffers: Buffers) -> Buffers:
        """Adds these rows to the running totals."""
        values = dict(zip(self.group.in_rows.outputs, rows, strict=True))
        program = self._loop.program
        return {
            k: sums.added(program, s, buffers[k], values, {})
            for k, s in zip(self.group.outputs, self.group.sums, strict=True)
        }

    def _results(self, part: Part, buffers: Mapping[int, Any]) -> list[Any]:
        """The outputs of a part."""
        program = self._loop.program
        if part.row_local is None:
            loads = (program.invars[i] for i in part.loads)
            loaded = {v: self._load(v, buffers) for v in loads}

            def lookup(v: jex.Var) -> Any:
                return loaded[v] if v in loaded else self._load(v, buffers)

            loaded |= evaluate(program, self.group.equations, lookup)
            return [read(program.outvars[k], lookup) for k in part.outputs]
        row_local = part.row_local
        rows = self._rows or row_local.rows

        def trace() -> Callable[..., list[Any]]:
            jaxpr = row_local.jaxpr(rows, program.debug_info)
            evaluated = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
            return jax.jit(evaluated, inline=True)

        evaluated = self._loop.traces.once((rows, row_local.signature()), trace)
        results = evaluated(
            *(
                self._handed[v] if v in self._handed else self._load(v, buffers)
                for v in row_local.inputs
            )
        )
        own = len(self.group.sums and row_local.outputs) or len(part.outputs)
        self._handed = dict(zip(row_local.outputs[own:], results[own:], strict=True))
        return results[:own]

    def _load(self, v: jex.Var, buffers: Mapping[int, Any]) -> Any:
        """The rows of a variable, on the device.

        Each part reads the gradient's for itself: kept from one to the next, a v5e's
        compiler reads all slices before the first update (F08).
        """
        loop, rows = self._loop, self._rows
        x = buffers[self._buffers[v]] if v in self._buffers else self._env[v]
        if rows is not None:
            axis = self.group.in_rows.axes.get(v)
            if axis is None:
                return x
            x = rows_of(x, self._first, rows, axis)
        if v not in loop.loads:
            # Else what reads it may be one with what replaces it, which a TPU's
            # compiler does with a copy of the whole (F09).
            replaced = v in self._buffers and rows is not None
            return lax.optimization_barrier(x) if replaced else x
        return load(x, v.aval)


def _var(a: Any) -> jex.Var:
    """The variable that an output with rows is."""
    assert isinstance(a, jex.Var)
    return a


def _next(number: jax.Array) -> jax.Array:
    """The number of the next iteration, on a CPU by way of an FFT of one number.

    With JAX 0.12 a CPU's compiler makes one function of a loop over few bytes, in which
    it rounds otherwise than elsewhere, and for which it takes several times as long;
    not of what its generator for such functions lacks (F43).
    """

    def cpu(number: jax.Array) -> jax.Array:
        numbers = lax.broadcast(number.astype(jnp.complex64), (1,))
        return lax.real(lax.fft(numbers, "fft", (1,)))[0].astype(number.dtype)

    return lax.platform_dependent(number + 1, cpu=cpu, default=lambda number: number)
