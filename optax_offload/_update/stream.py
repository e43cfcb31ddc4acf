"""Carrying out a schedule: it decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._program import evaluate, read
from optax_offload._update import arguments, keys
from optax_offload._update.arguments import Cell
from optax_offload._update.group import Group
from optax_offload._update.loop import Traces, run_loop
from optax_offload._update.loops import Loop
from optax_offload._update.schedule import Branched, Schedule, Straight
from optax_offload._update.update import Update

Env = Mapping[jex.Var, Any]


def run(
    update: Update,
    schedule: Schedule,
    args: Sequence[Any],
    cells: Mapping[int, Cell] | None = None,
) -> list[Any]:
    """Evaluates an update as its schedule says.

    Args:
      update: The update.
      schedule: Its schedule.
      args: The values of its inputs, wherever they are.
      cells: For inputs, what their shardings are noted in, by position.

    Returns:
      The values of its outputs, each in its memory kind.
    """
    cells = cells or {}
    return _run(update, schedule, args, _Outside({}, cells))


class _Outside(NamedTuple):
    """What is known outside of an update that is a version of another.

    Attributes:
      known: The values of further variables.
      cells: For inputs, what their shardings are noted in, by position.
    """

    known: Env
    cells: Mapping[int, Cell]


def _run(
    update: Update, schedule: Schedule, args: Sequence[Any], outside: _Outside
) -> list[Any]:
    program = update.program
    known = {**outside.known, **program.constants}
    env = dict(zip(program.invars, args, strict=True)) | known
    if isinstance(schedule, Branched):
        before = evaluate(program, schedule.branches.before, _on_device(env))
        env |= before
        predicate = schedule.branches.predicate  # Maybe an argument.
        before[predicate] = _memory.transfer(env[predicate], "device")
        env |= evaluate(program, schedule.branches.beside, _on_device(env))
        done = _run_branches(
            update, schedule, args, _Outside(known | before, outside.cells)
        )
    else:
        done = _run_stages(update, schedule, env, outside.cells)
    return [
        done[k]
        if k in done
        else _memory.transfer(read(a, env.__getitem__), output.memory_kind)
        for k, (a, output) in enumerate(
            zip(program.outvars, update.outputs, strict=True)
        )
    ]


def _run_stages(
    update: Update,
    schedule: Straight,
    env: dict[jex.Var, Any],
    cells: Mapping[int, Cell],
) -> dict[int, Any]:
    """The values of what is computed in stages. The others are in the environment."""
    program = update.program
    for i in schedule.scalars:
        env[program.invars[i]] = _memory.transfer(env[program.invars[i]], "device")
    env |= evaluate(program, schedule.shared, env.__getitem__)
    done: dict[int, Any] = {}
    computed: list[list[Any]] = []
    traces = Traces()
    held: list[Any] = []
    for stage in schedule.stages:
        if isinstance(stage, Loop):
            done |= run_loop(update, stage, env, traces, cells)
            continue
        # One value of the group before stands for all that it waited for, so that no
        # result is waited for twice and the barriers are linear in all.
        tokens = held + [x for at in stage.after for x in computed[at]]
        values, results, held = _run_group(update, stage.group, env, tokens, cells)
        done |= values
        computed.append(results)
    return done


def _run_group(
    update: Update,
    group: Group,
    env: Env,
    tokens: list[Any],
    cells: Mapping[int, Cell],
) -> tuple[dict[int, Any], list[Any], list[Any]]:
    """Loads, computes and stores one group once the tokens are there.

    Returns:
      The values of its outputs, those that are stored as they are on the device (with
      stored values as tokens, an H100's compiler copies a leaf on the host: F03), and
      what to wait for to wait for the tokens.
    """
    program = update.program
    loaded = [program.invars[i] for i in group.loads]
    loads, held = _after(tokens, [env[v] for v in loaded])
    loads = [_memory.transfer(x, "device") for x in loads]
    local = dict(zip(loaded, loads, strict=True))

    def lookup(v: jex.Var) -> Any:
        return local[v] if v in local else env[v]

    local |= evaluate(program, group.equations, lookup)
    results = [read(program.outvars[k], lookup) for k in group.outputs]
    if not group.loads:
        results, held = _after(tokens, results)
    done: dict[int, Any] = {}
    for k, x in zip(group.outputs, results, strict=True):
        output = update.outputs[k]
        source = update.in_place(k)
        if output.stored:
            cell = arguments.cell_of(cells, output.like if source is None else source)
            x = arguments.constrain(x, cell, None)
        done[k] = _memory.transfer(x, output.memory_kind)
    stored = [
        x
        for k, x in zip(group.outputs, results, strict=True)
        if update.outputs[k].stored
        and isinstance(x, jax.Array)
        and not _memory.on_host(x)
    ]
    return done, stored, held


def _after(tokens: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The values, once the tokens are there, and one that stands for the tokens."""
    if not tokens or not values:
        return values, tokens[:1]
    values, _ = lax.optimization_barrier((values, tokens))
    return values, values[:1]


def _on_device(env: Env) -> Callable[[jex.Var], Any]:
    """Looks up variables, and loads what is on the host."""
    return lambda v: _memory.transfer(env[v], "device")


def _run_branches(
    update: Update, schedule: Branched, args: Sequence[Any], outside: _Outside
) -> dict[int, Any]:
    """The values of the outputs that the predicate may change.

    Each version is a loop that runs once or not at all, in place. In a conditional both
    compilers copy what both branches write to (F18).
    """
    program, branches = update.program, schedule.branches
    values = {
        k: _zeros(program.outvars[k].aval, update.outputs[k].memory_kind)
        if alias is None
        else args[alias]
        for k, alias in branches.outputs.items()
    }
    index = outside.known[branches.predicate] > 0
    with_keys = [*args, *outside.known.values()]
    places, data = keys.Places.of(with_keys), keys.data(with_keys)
    for wanted, version, each in zip(
        (~index, index), branches.versions, schedule.schedules, strict=True
    ):

        def once(carry: Any, version: Update = version, each: Schedule = each) -> Any:
            _, values = carry
            found = places.keys(data)
            here, rest = found[: len(args)], found[len(args) :]
            inside = dict(zip(outside.known, rest, strict=True))
            for k, alias in branches.outputs.items():
                if alias is not None:
                    here[alias] = values[k]
            results = _run(version, each, here, outside._replace(known=inside))
            return jnp.asarray(False), {k: results[k] for k in values}

        _, values = lax.while_loop(lambda carry: carry[0], once, (wanted, values))
    return values


def _zeros(aval: Any, memory_kind: str) -> Any:
    return _memory.transfer(jnp.zeros(aval.shape, aval.dtype), memory_kind)
