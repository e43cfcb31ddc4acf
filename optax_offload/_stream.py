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

from optax_offload import _memory, _tiles
from optax_offload._choices import Choice
from optax_offload._schedule import Flat, Group, Loop, Schedule, live_equations

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
        self._traces = traces
        self._flat = flat
        self._loop = loop
        self._env = env
        self._kinds = kinds
        self._loads = {flat.invars[i] for group in loop.groups for i in group.loads}

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
                buffers = self._update(group, self._env, buffers, first, rest)
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
            (group, rows, (number * loop.unrolled + i) * rows if rows else 0)
            for i in range(loop.unrolled)
            for group, rows in zip(
                loop.groups, loop.rows or [None] * len(loop.groups), strict=True
            )
        ]
        passed = 0
        previous: tuple[int, ...] = ()
        for (group, rows, first), wait in zip(updates, loop.waits, strict=True):
            before = [
                k for earlier, *_ in updates[passed:wait] for k in earlier.outputs
            ]
            passed = max(passed, wait)
            buffers = _after_stores(buffers, before, group.outputs)
            buffers = self._update(group, env, buffers, first, rows, previous)
            previous = group.outputs
        return buffers

    def _read_whole(self) -> list[jex.Var]:
        """What the groups read and do not replace, such as parameters."""
        homes = {
            self._flat.invars[home]
            for group in self._loop.groups
            for home in group.homes
            if home is not None
        }
        return [v for v, x in self._env.items() if v not in homes and jnp.ndim(x)]

    def _buffer(self, k: int, home: int | None) -> Any:
        """What an output is written into: if possible, its input."""
        if home is not None:
            return self._env[self._flat.invars[home]]
        aval: Any = self._flat.outvars[k].aval
        return jnp.zeros(aval.shape, aval.dtype)

    def _update(
        self,
        group: Group,
        env: Mapping[jex.Var, Any],
        buffers: dict[int, Any],
        first: Any,
        rows: int | None,
        previous: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Loads, computes and stores a slice of each leaf of a group, or all of it.

        Slices are stored when the previous outputs have been: else an H100's compiler
        stores them late, and keeps them.
        """
        here = {
            self._flat.invars[home]: buffers[k]
            for k, home in zip(group.outputs, group.homes, strict=True)
            if home is not None
        }

        def load(v: jex.Var, first: Any) -> Any:
            x = here[v] if v in here else env[v]
            if rows is not None:
                if v not in group.row_local.axes:
                    return x
                axis = group.row_local.axes[v]
                x = lax.dynamic_slice_in_dim(
                    x, first, rows, axis, allow_negative_indices=False
                )
            if v not in self._loads:
                return x
            return _tiles.constrain(_memory.transfer(x, "device"), v.aval)

        if rows is None and group.rows is None:
            results = self._whole(group, lambda v: load(v, 0))
        else:
            results = self._slices(group, load, first, rows)
        if rows is not None:
            buffers = _after_stores(buffers, previous, group.outputs)
        updated = dict(buffers)
        for k, y in zip(group.outputs, results, strict=True):
            y = _memory.transfer(y, self._kinds[k])
            if rows is not None:
                axis = group.row_local.axes[self._flat.outvars[k]]
                y = lax.dynamic_update_slice_in_dim(
                    buffers[k], y, first, axis, allow_negative_indices=False
                )
            updated[k] = y
        return updated

    def _whole(self, group: Group, load: Callable[[jex.Var], Any]) -> list[Any]:
        """The outputs of a group by the equations that it has."""
        values = {self._flat.invars[i]: load(self._flat.invars[i]) for i in group.loads}

        def lookup(v: jex.Var) -> Any:
            return values[v] if v in values else load(v)

        values |= _evaluate(self._flat, group.equations, lookup)
        return [_read(self._flat.outvars[k], lookup) for k in group.outputs]

    def _slices(
        self,
        group: Group,
        load: Callable[[jex.Var, Any], Any],
        first: Any,
        rows: int | None,
    ) -> list[Any]:
        """Slices of the outputs of a group by its equations for so many rows."""
        row_local = group.row_local
        rows = rows or row_local.rows

        def trace() -> tuple[jex.Jaxpr, Callable[..., list[Any]]]:
            jaxpr = row_local.jaxpr(rows, self._flat.debug_info)
            evaluate = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
            return jaxpr, jax.jit(evaluate, inline=True)

        jaxpr, update = self._traces.once((rows, row_local.signature()), trace)
        names = dict(zip(row_local.inputs, jaxpr.invars, strict=True))
        # In a group that is alone in its loop, a slice of one leaf is computed, as far
        # as it suffices, before the next leaf's is loaded, so that loads and stores of
        # different leaves run side by side.
        loads = [self._flat.invars[i] for i in group.loads]
        alone = len(self._loop.groups) == 1 and len(loads) > 1
        later = set(loads[(len(loads) + 1) // 2 :]) if alone else set()
        values = {names[v]: load(v, first) for v in names if v not in later}
        if not later:
            return update(*values.values())
        at = first
        early = _evaluable(jaxpr, values)
        results = jax.core.eval_jaxpr(early, (), *values.values())
        if results:
            at, results = lax.optimization_barrier((jnp.asarray(at), results))
        known = dict(zip(early.outvars, results, strict=True))
        values |= {names[v]: load(v, at) for v in later}
        jaxpr = jaxpr.replace(invars=list(values))
        results = jax.core.eval_jaxpr(jaxpr, (), *values.values())
        return [known.get(a, y) for a, y in zip(jaxpr.outvars, results, strict=True)]


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

    A barrier over host buffers is what holds a load back in a loop's body, on a GPU
    as on a TPU. The buffers of updates are in it too: else a GPU's compiler writes
    those at the end of the body, and keeps what they are computed from until then.
    """
    chosen = list(dict.fromkeys((*before, *outputs)))
    if not before or set(before) <= set(outputs):
        return buffers
    after = lax.optimization_barrier([buffers[k] for k in chosen])
    return buffers | dict(zip(chosen, after, strict=True))


def _evaluable(jaxpr: jex.Jaxpr, values: Mapping[jex.Var, Any]) -> jex.Jaxpr:
    """The part of a jaxpr that these inputs suffice for."""
    known = set(values)
    equations = []
    for e in jaxpr.eqns:
        if all(isinstance(a, jex.Literal) or a in known for a in e.invars):
            equations.append(e)
            known.update(e.outvars)
    outvars = [a for a in jaxpr.outvars if isinstance(a, jex.Var) and a in known]
    outvars = [a for a in outvars if a not in values]
    return jaxpr.replace(invars=list(values), outvars=outvars, eqns=equations)


def _after(tokens: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The values, once the tokens are there, and one that stands for the tokens."""
    if not tokens or not values:
        return values, tokens[:1]
    values, _ = lax.optimization_barrier((values, tokens))
    return values, values[:1]


def _read(a: Any, lookup: Callable[[jex.Var], Any]) -> Any:
    return a.val if isinstance(a, jex.Literal) else lookup(a)


def _evaluate(
    flat: Flat, positions: Sequence[int], lookup: Callable[[jex.Var], Any]
) -> dict[jex.Var, Any]:
    """Evaluates equations, and returns the value of each variable they define."""
    equations = [flat.equations[i] for i in positions]
    results = [v for e in equations for v in e.outvars]
    defined = set(results)
    used = [a for e in equations for a in e.invars if isinstance(a, jex.Var)]
    free = [v for v in dict.fromkeys(used) if v not in defined]
    # JAX's own interpreter knows how each version of it binds an equation, and keeps
    # the name stack and the context (mesh, matmul precision) it was traced in.
    jaxpr = jex.Jaxpr(
        constvars=(),
        invars=free,
        outvars=results,
        eqns=equations,
        debug_info=flat.debug_info,
    )
    values = jax.core.eval_jaxpr(jaxpr, (), *map(lookup, free))
    return dict(zip(results, values, strict=True))
