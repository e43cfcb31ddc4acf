"""Carrying out a schedule: loads, the window, slice loops, stores."""

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

from optax_offload import _memory, _tpu_layout
from optax_offload._jaxpr import Flat, _evaluate, _read, live_equations
from optax_offload._update.branches import Choice
from optax_offload._update.schedule import Group, Loop, Part, Schedule

T = TypeVar("T")


def run(
    flat: Flat, schedule: Schedule, args: Sequence[Any], kinds: Sequence[str]
) -> list[Any]:
    """Evaluates an update stage by stage.

    Args:
      flat: the update.
      schedule: its stages, in order.
      args: the values of its inputs, wherever they are.
      kinds: the memory kind of each output.

    Returns:
      The values of its outputs, each where ``kinds`` says.
    """
    env = dict(zip(flat.invars, args, strict=True)) | flat.constants
    for i in schedule.ahead:
        env[flat.invars[i]] = _memory.transfer(args[i], "device")
    env |= _evaluate(flat, schedule.shared, env.__getitem__)
    done: dict[int, Any] = {}
    computed: list[list[Any]] = []
    traces = _Traces()
    waits = iter(schedule.waits)
    passed, held = 0, []
    for stage in schedule.stages:
        if isinstance(stage, Loop):
            done |= _run_loop(flat, stage, env, kinds, traces)
            continue
        # One value of the group before stands for all that it waited for, so that no
        # result is waited for twice and the barriers are linear in all.
        wait = next(waits)
        tokens = held + [x for values in computed[passed:wait] for x in values]
        passed = max(passed, wait)
        values, results, held = _run_group(flat, stage, env, kinds, tokens)
        done |= values
        computed.append(results)
    return [
        done[k] if k in done else _memory.transfer(_read(a, env.__getitem__), kinds[k])
        for k, a in enumerate(flat.outvars)
    ]


def choose(
    choice: Choice,
    flat: Flat,
    args: Sequence[Any],
    kinds: Sequence[str],
    evaluate: Callable[[Flat, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Evaluates the version of an update that its predicate chooses.

    Each version is a loop that runs once or not at all, in place. In a conditional both
    compilers copy what both branches write to.

    Args:
      choice: the versions.
      flat: the update that they are of.
      args: the values of its inputs, wherever they are.
      kinds: the memory kind of each output.
      evaluate: how a version is evaluated.

    Returns:
      The values of the outputs, each where ``kinds`` says.
    """
    env = dict(zip(flat.invars, args, strict=True)) | flat.constants
    ahead = _evaluate(flat, choice.ahead, lambda v: _memory.transfer(env[v], "device"))
    env |= ahead
    rest = set(_rest(flat, choice)).difference(choice.ahead)
    env |= _evaluate(flat, sorted(rest), lambda v: _memory.transfer(env[v], "device"))
    values = {
        k: _zeros(flat.outvars[k].aval, kinds[k]) if home is None else args[home]
        for k, home in choice.outputs.items()
    }
    index = env[choice.predicate] > 0
    for wanted, version in zip((~index, index), choice.versions, strict=True):
        version = dataclasses.replace(version, constants=ahead | version.constants)

        def once(carry: Any, version: Flat = version) -> Any:
            _, values = carry
            here = list(args)
            for k, home in choice.outputs.items():
                if home is not None:
                    here[home] = values[k]
            results = evaluate(version, here)
            return jnp.asarray(False), {k: results[k] for k in values}

        _, values = lax.while_loop(lambda carry: carry[0], once, (wanted, values))
    return [
        values[k]
        if k in values
        else _memory.transfer(_read(a, env.__getitem__), kinds[k])
        for k, a in enumerate(flat.outvars)
    ]


def _zeros(aval: Any, kind: str) -> Any:
    return _memory.transfer(jnp.zeros(aval.shape, aval.dtype), kind)


def _rest(flat: Flat, choice: Choice) -> list[int]:
    """The equations of the outputs that a choice does not change."""
    outvars = [a for k, a in enumerate(flat.outvars) if k not in choice.outputs]
    return live_equations(dataclasses.replace(flat, outvars=outvars))


def _run_group(
    flat: Flat,
    group: Group,
    env: Mapping[jex.Var, Any],
    kinds: Sequence[str],
    tokens: list[Any],
) -> tuple[dict[int, Any], list[Any], list[Any]]:
    """Loads, computes and stores one group once the tokens are there.

    Returns:
      The values of its outputs, those that are stored as they are on the device (with
      stored values as tokens, an H100's compiler copies a leaf on the host), and what
      to wait for to wait for the tokens.
    """
    variables = [flat.invars[i] for i in group.loads]
    loads, held = _after(tokens, [env[v] for v in variables])
    loads = [_memory.transfer(x, "device") for x in loads]
    local = dict(zip(variables, loads, strict=True))

    def lookup(v: jex.Var) -> Any:
        return local[v] if v in local else env[v]

    local |= _evaluate(flat, group.equations, lookup)
    results = [_read(flat.outvars[k], lookup) for k in group.outputs]
    if not group.loads:
        results, held = _after(tokens, results)
    done = {
        k: _memory.transfer(x, kinds[k])
        for k, x in zip(group.outputs, results, strict=True)
    }
    stored = [
        x
        for k, x in zip(group.outputs, results, strict=True)
        if kinds[k] != "device" and isinstance(x, jax.Array) and not _memory.on_host(x)
    ]
    return done, stored, held


def _run_loop(
    flat: Flat,
    loop: Loop,
    env: Mapping[jex.Var, Any],
    kinds: Sequence[str],
    traces: _Traces,
) -> dict[int, Any]:
    """The values of the outputs of a loop, traced once for like loops."""
    inputs = loop.inputs(flat)
    outputs = [k for group in loop.groups for k in group.outputs]

    def fn(*values: Any) -> list[Any]:
        here = dict(zip(inputs, values, strict=True))
        done = _Loop(flat, loop, here, kinds, traces).run()
        return [done[k] for k in outputs]

    signature = loop.signature(flat), tuple(kinds[k] for k in outputs)
    traced = traces.once(signature, lambda: jax.jit(fn, inline=True))
    results = traced(*(env[v] for v in inputs))
    return dict(zip(outputs, results, strict=True))


class _Traces:
    """Functions that have been traced, so that like ones are traced once."""

    def __init__(self):
        self._traced: dict[Hashable, Any] = {}

    def once(self, signature: Hashable, make: Callable[[], T]) -> T:
        """What was made for the first of these signatures."""
        try:
            known = self._traced.get(signature)
        except TypeError:  # A parameter of an equation has no hash.
            return make()
        if known is None:
            known = self._traced[signature] = make()
        return known


class _Loop:
    """A loop in which every turn updates a slice of each of its groups, or all of it.

    What is stored is written to where it was read from, so no second buffer is needed
    on the host. Transfers are all inside: between stages, where they could run beside
    the backward pass, an H100's compiler reorders that for them and keeps several times
    more alive, and a v5e's starts loads long before their use.
    """

    def __init__(
        self,
        flat: Flat,
        loop: Loop,
        env: Mapping[jex.Var, Any],
        kinds: Sequence[str],
        traces: _Traces,
    ):
        self.traces = traces
        self.flat = flat
        self._loop = loop
        self._env = env
        self.kinds = kinds
        self.loads = {flat.invars[i] for group in loop.groups for i in group.loads}

    def run(self) -> dict[int, Any]:
        """The values of the outputs of all groups."""
        loop = self._loop
        buffers = {
            k: self._buffer(k, home)
            for group in loop.groups
            for k, home in zip(group.outputs, group.homes, strict=True)
        }
        iterations: Any = loop.turns // loop.unrolled
        if iterations == 1:
            # A compiler that knew would take the loop apart.
            iterations = lax.optimization_barrier(jnp.int32(1))

        def body(carry: tuple[Any, dict[int, Any]]) -> tuple[Any, dict[int, Any]]:
            number, buffers = carry
            return _next(number), self._iteration(number, buffers)

        _, buffers = lax.while_loop(
            lambda carry: carry[0] < iterations, body, (jnp.int32(0), buffers)
        )
        for group, rows in zip(loop.groups, loop.rows, strict=False):
            first = loop.turns * rows
            rest = group.row_local.rows - first
            if rest:
                update = _Update(self, group, self._env, rest, first)
                for part in group.parts:
                    buffers = update.carry_out(part, buffers)
        return buffers

    def _iteration(self, number: Any, buffers: dict[int, Any]) -> dict[int, Any]:
        """Updates, each of which is loaded when the window allows it."""
        loop = self._loop
        env = self._env
        if not loop.rows:
            # What is computed from these alone would be computed ahead of the loop, and
            # kept; of a slice it cannot be.
            read = self._read_whole()
            values, _ = lax.optimization_barrier(([env[v] for v in read], number))
            env = {**env, **dict(zip(read, values, strict=True))}
        updates = [
            _Update(self, group, env, rows, (number * loop.unrolled + i) * (rows or 0))
            for i in range(loop.unrolled)
            for group, rows in zip(
                loop.groups, loop.rows or [None] * len(loop.groups), strict=True
            )
        ]
        stored: list[tuple[int, ...]] = []
        passed = 0
        for update, wait in zip(updates, loop.waits, strict=True):
            parts = update.group.parts
            # The two parts of a group that is alone take turns, so that one is loaded
            # while the other is stored. Of several groups each follows its like.
            lag = len(parts) if len(loop.groups) > 1 else 1
            for n, part in enumerate(parts):
                before = [
                    k
                    for earlier in updates[passed:wait]
                    for k in update.waits_for(earlier.group, n)
                ]
                previous = stored[-lag] if len(stored) >= lag else ()
                buffers = update.carry_out(part, buffers, before, previous)
                stored.append(part.outputs)
            passed = max(passed, wait)
        return buffers

    def _read_whole(self) -> list[jex.Var]:
        """What the groups read and do not replace, such as parameters."""
        homes = {
            self.flat.invars[home]
            for group in self._loop.groups
            for home in group.homes
            if home is not None
        }
        return [v for v, x in self._env.items() if v not in homes and jnp.ndim(x)]

    def _buffer(self, k: int, home: int | None) -> Any:
        """What an output is written into: if possible, its input."""
        if home is not None:
            return self._env[self.flat.invars[home]]
        aval: Any = self.flat.outvars[k].aval
        return jnp.zeros(aval.shape, aval.dtype)


class _Update:
    """A slice of each leaf of a group, or all of it: loaded, computed and stored."""

    def __init__(
        self,
        loop: _Loop,
        group: Group,
        env: Mapping[jex.Var, Any],
        rows: int | None,
        first: Any,
    ):
        self.group = group
        self._loop = loop
        self._env = env
        self._rows = rows
        self._first = first
        self._handed: dict[jex.Var, Any] = {}
        self._buffers = {
            loop.flat.invars[home]: k
            for k, home in zip(group.outputs, group.homes, strict=True)
            if home is not None
        }

    def waits_for(self, group: Group, n: int) -> tuple[int, ...]:
        """The outputs of an earlier group that its n-th part comes after."""
        if group is self.group:  # It reads what that has written anyway.
            return ()
        like = len(group.parts) == len(self.group.parts)
        return group.parts[n].outputs if like else group.outputs

    def carry_out(
        self,
        part: Part,
        buffers: dict[int, Any],
        before: Sequence[int] = (),
        previous: Sequence[int] = (),
    ) -> dict[int, Any]:
        """The buffers with a part in them.

        It is loaded when the outputs before are in theirs, and what the part before
        hands on has been computed; else the parts would be computed as one. Slices are
        stored when the previous outputs are: else an H100's compiler stores them late,
        and keeps them.
        """
        flat, rows = self._loop.flat, self._rows
        if before or self._handed:
            # A barrier over host buffers is what holds a load back in a loop's body, on
            # a GPU as on a TPU.
            loads = (self._buffers.get(flat.invars[i]) for i in part.loads)
            held = dict.fromkeys((*before, *(k for k in loads if k is not None)))
            after, handed = lax.optimization_barrier(
                ([buffers[k] for k in held], list(self._handed.values()))
            )
            buffers = buffers | dict(zip(held, after, strict=True))
            self._handed = dict(zip(self._handed, handed, strict=True))
        results = self._results(part, buffers)
        if rows is not None:
            buffers = _after_stores(buffers, previous, part.outputs)
        updated = dict(buffers)
        for k, y in zip(part.outputs, results, strict=True):
            y = _memory.transfer(y, self._loop.kinds[k])
            if rows is not None:
                axis = self.group.row_local.axes[flat.outvars[k]]
                y = lax.dynamic_update_slice_in_dim(
                    buffers[k], y, self._first, axis, allow_negative_indices=False
                )
            updated[k] = y
        return updated

    def _results(self, part: Part, buffers: Mapping[int, Any]) -> list[Any]:
        """The outputs of a part."""
        flat = self._loop.flat
        if part.rows is None:
            loaded = {
                v: self._load(v, buffers) for v in (flat.invars[i] for i in part.loads)
            }

            def lookup(v: jex.Var) -> Any:
                return loaded[v] if v in loaded else self._load(v, buffers)

            loaded |= _evaluate(flat, self.group.equations, lookup)
            return [_read(flat.outvars[k], lookup) for k in part.outputs]
        row_local = part.rows
        rows = self._rows or row_local.rows

        def trace() -> Callable[..., list[Any]]:
            jaxpr = row_local.jaxpr(rows, flat.debug_info)
            evaluate = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
            return jax.jit(evaluate, inline=True)

        evaluate = self._loop.traces.once((rows, row_local.signature()), trace)
        results = evaluate(
            *(
                self._handed[v] if v in self._handed else self._load(v, buffers)
                for v in row_local.inputs
            )
        )
        own = len(part.outputs)
        self._handed = dict(zip(row_local.outputs[own:], results[own:], strict=True))
        return results[:own]

    def _load(self, v: jex.Var, buffers: Mapping[int, Any]) -> Any:
        """The rows of a variable, on the device.

        Each part reads the gradient's for itself: kept from one to the next, a v5e's
        compiler reads all slices ahead.
        """
        loop, rows = self._loop, self._rows
        x = buffers[self._buffers[v]] if v in self._buffers else self._env[v]
        if rows is not None:
            axis = self.group.row_local.axes.get(v)
            if axis is None:
                return x
            x = lax.dynamic_slice_in_dim(
                x, self._first, rows, axis, allow_negative_indices=False
            )
        if v not in loop.loads:
            # Else what reads it may be one with what replaces it, which a TPU's
            # compiler does with a copy of the whole.
            replaced = v in self._buffers and rows is not None
            return lax.optimization_barrier(x) if replaced else x
        return _tpu_layout.constrain(_memory.transfer(x, "device"), v.aval)


def _next(number: jax.Array) -> jax.Array:
    """The number of the next iteration, on a CPU by way of an FFT of one number.

    With JAX 0.12 a CPU's compiler makes one function of a loop over few bytes, in which
    it rounds otherwise than elsewhere, and for which it takes several times as long;
    not of what its generator for such functions lacks.
    """

    def cpu(number: jax.Array) -> jax.Array:
        numbers = lax.broadcast(number.astype(jnp.complex64), (1,))
        return lax.real(lax.fft(numbers, "fft", (1,)))[0].astype(number.dtype)

    return lax.platform_dependent(number + 1, cpu=cpu, default=lambda number: number)


def _after_stores(
    buffers: dict[int, Any], before: Sequence[int], outputs: Sequence[int]
) -> dict[int, Any]:
    """The buffers, which these outputs have once those before are written.

    The buffers of updates are in the barrier too: else a GPU's compiler writes those at
    the end of the body, and keeps what they are computed from until then.
    """
    chosen = list(dict.fromkeys((*before, *outputs)))
    if not before or set(before) <= set(outputs):
        return buffers
    after = lax.optimization_barrier([buffers[k] for k in chosen])
    return buffers | dict(zip(chosen, after, strict=True))


def _after(tokens: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The values, once the tokens are there, and one that stands for the tokens."""
    if not tokens or not values:
        return values, tokens[:1]
    values, _ = lax.optimization_barrier((values, tokens))
    return values, values[:1]
