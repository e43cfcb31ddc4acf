"""Carrying out a loop of a schedule: it decides nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._emit import sums
from optax_offload._emit.moves import Rest, RowKernel, rest_of, together
from optax_offload._places import memory
from optax_offload._program import (
    Places,
    Program,
    Sharded,
    Update,
    bound,
    key_data,
    sharding_of,
)
from optax_offload._schedule import Group, Loop, Part, Written

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
        here = bound(inputs, values)
        done = _Loop(update, loop, here, traces, sharded).run()
        return [done[k] for k in outputs]

    kinds = tuple(update.outputs[k].memory_kind for k in outputs)
    # Whose shardings are told apart by the program alone, is not like another.
    own = tuple(sharded.get(i) for group in loop.groups for i in group.loads)
    own += tuple(sharding_of(sharded, update.outputs[k].like) for k in outputs)
    signature = loop.signature(update.program), kinds, own
    traced = traces.once(signature, lambda: jax.jit(fn, inline=True))
    results = traced(*(env[v] for v in inputs))
    return bound(outputs, results)


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
        self.like = {update.program.invars[i]: x for i, x in sharded.items()}
        self.update, self.program, self.traces = update, update.program, traces
        self._loop = loop
        self._env = env

    def run(self) -> Buffers:
        """The values of the outputs of all groups."""
        loop = self._loop
        values = list(self._env.values())
        self._places, self._data = Places.of(values), key_data(values)
        targets = [t for group in loop.groups for t in group.targets]
        buffers = {t.output: self._buffer(t) for t in targets}
        iterations: Any = loop.trip_count
        if iterations == 1:
            # A compiler that knew would take the loop apart (F10).
            iterations = lax.optimization_barrier(jnp.int32(1))

        self._position = memory.positions()

        def body(carry: tuple[Any, Buffers]) -> tuple[Any, Buffers]:
            number, buffers = carry
            return _next(number), self._iteration(number, buffers)

        def goes_on(carry: tuple[Any, Buffers]) -> Any:
            return carry[0] < iterations

        start = jnp.int32(0), buffers
        _, buffers = lax.while_loop(goes_on, body, start)
        if loop.remainders:
            of_gpus = {"cuda": self._rest_in_a_loop, "rocm": self._rest_in_a_loop}
            buffers = lax.platform_dependent(buffers, default=self._rest, **of_gpus)
        for t in targets:
            if t.sum is not None:
                total = buffers[t.output]
                buffers[t.output] = sums.finished(self.program, t.sum, total)
        return buffers

    def _rest(self, buffers: Buffers) -> Buffers:
        """The buffers with the rows that no iteration has."""
        loop = self._loop
        for rest in loop.remainders:
            group = loop.groups[rest.group]
            last = _Slice(self, group, self._env, rest.rows, rest.first)
            for part in group.parts:
                buffers = last.carry_out(part, buffers)
        return buffers

    def _rest_in_a_loop(self, buffers: Buffers) -> Buffers:
        """The same in a loop that runs once.

        Between the operations of a step, a few rows of an embedding of 50257 tokens
        made an H100's compiler keep logits over the update (F01).
        """
        iterations = lax.optimization_barrier(jnp.int32(1))
        _, buffers = lax.while_loop(
            lambda carry: carry[0] < iterations,
            lambda carry: (_next(carry[0]), self._rest(carry[1])),
            (jnp.int32(0), buffers),
        )
        return buffers

    def _iteration(self, number: Any, buffers: Buffers) -> Buffers:
        """The steps of the schedule, in its order."""
        loop = self._loop
        env = bound(self._env, self._places.keys(self._data))
        if not loop.rows:
            # What is computed from these alone would be computed before the loop, and
            # kept (F11); of a slice it cannot be.
            whole = self._read_whole()
            values, _ = lax.optimization_barrier(([env[v] for v in whole], number))
            env |= bound(whole, values)
        at = self._position
        slices = [
            [
                _Slice(
                    self, group, env, rows, at((number * loop.unroll + i) * (rows or 0))
                )
                for group, rows, _ in loop.members
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
        }
        return [v for v, x in self._env.items() if v not in replaced and jnp.ndim(x)]

    def _buffer(self, t: Written) -> Any:
        """Returns the buffer of an output: if possible, its input."""
        if t.sum is not None:
            return sums.identity(self.program, t.sum)
        if t.alias is not None:
            return self._env[self.program.invars[t.alias]]
        aval: Any = self.program.outvars[t.output].aval
        output = self.update.outputs[t.output]
        return memory.full(aval, 0, output.memory_kind)


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
            loop.program.invars[t.alias]: t.output
            for t in group.targets
            if t.alias is not None
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
        program = self._loop.program
        first = self._first
        if load_after or self._handed:
            # A barrier over host buffers is what holds a load back in a loop's body, on
            # a GPU as on a TPU (F02).
            loads = [program.invars[i] for i in part.loads]
            own = (self._buffers[v] for v in loads if v in self._buffers)
            held = dict.fromkeys((*load_after, *own))
            only_read = [v for v in loads if v not in self._buffers]
            # What is made of values on the device is held back by its position.
            at = [] if loads else [first]
            after, read_after, handed, at = lax.optimization_barrier(
                (
                    [buffers[k] for k in held],
                    [self._env[v] for v in only_read],
                    list(self._handed.values()),
                    at,
                )
            )
            first = at[0] if at else first
            buffers = buffers | bound(held, after)
            self._env = {**self._env, **bound(only_read, read_after)}
            self._handed = bound(self._handed, handed)
        kernel = self._kernel(part)
        results = kernel.values(
            first,
            self._rows or 0,
            lambda v: self._whole(v, buffers),
            self._handed,
        )
        if self.group.sums:
            # These rows are added to the running totals.
            return buffers | {
                t.output: sums.added(program, t.sum, buffers[t.output], results, {})
                for t in self.group.targets
                if t.sum is not None
            }
        self._handed = {v: x for v, x in results.items() if v not in part.outputs}
        if store_after:
            # The buffers of updates are in the barrier too: else a GPU's compiler
            # writes those at the end of the body, and keeps what they are computed
            # from until then (F05).
            held = {k: buffers[k] for k in (*store_after, *part.outputs)}
            buffers = buffers | together(held)
        return buffers | {
            t.output: self._target(t).store(
                buffers[t.output], results[t.output], self._first
            )
            for t in self.group.targets
            if t.output in part.outputs
        }

    def _kernel(self, part: Part) -> RowKernel:
        """The equations of a part, which names its further results for the next one.

        Each part loads a gradient's rows for itself: kept from one to the next, a v5e's
        compiler reads all slices before the first update (F08).
        """
        program, traces = self._loop.program, self._loop.traces
        if part.row_local is None:
            return whole_kernel(program, self.group, self._source)
        row_local = part.row_local
        rows = self._rows or row_local.rows

        def trace() -> Callable[..., list[Any]]:
            jaxpr = row_local.jaxpr(rows, program.debug_info)
            evaluated = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
            return jax.jit(evaluated, inline=True)

        compute = traces.once((rows, row_local.signature()), trace)
        own = () if self.group.sums else part.outputs
        results = (*own, *row_local.outputs[len(own) :])
        return RowKernel(
            compute, {v: self._source(v) for v in row_local.inputs}, results
        )

    def _axis(self, v: Any) -> int | None:
        return None if self._rows is None else self.group.in_rows.axes.get(v)

    def _source(self, v: jex.Var) -> Rest:
        loop, axis = self._loop, self._axis(v)
        # Else a whole one may be computed in parts, as its gradient is, and what a loop
        # carries of it too: that is made whole in host memory, where nothing can (F85).
        like = None if axis is not None else loop.like.get(v)
        replaced = v in self._buffers
        return Rest(axis=axis, layout=v.aval, like=like, replaced=replaced)

    def _target(self, t: Written) -> Rest:
        update, v = self._loop.update, self._loop.program.outvars[t.output]
        rest = rest_of(update, t.output, self._loop.sharded, t.alias, self._axis(v))
        of_codes = update.outputs[t.output].holds_codes
        return dataclasses.replace(rest, layout=v.aval if of_codes else None)

    def _whole(self, v: jex.Var, buffers: Mapping[int, Any]) -> Any:
        """The value that rows of a variable are in now."""
        return buffers[self._buffers[v]] if v in self._buffers else self._env[v]


def whole_kernel(
    program: Program, group: Group, source: Callable[[jex.Var], Rest]
) -> RowKernel:
    """The equations of a group that is updated whole."""
    jaxpr = group.jaxpr(program)
    compute = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
    return RowKernel(compute, {v: source(v) for v in jaxpr.invars}, group.outputs)


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
