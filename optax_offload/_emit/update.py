"""Carrying out a schedule: it decides nothing."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

from optax_offload._emit.loop import Traces, run_loop, whole_kernel
from optax_offload._emit.moves import Rest, load_whole, moved, rest_of
from optax_offload._emit.spread import spread_by
from optax_offload._ground import trees
from optax_offload._ground.errors import warn
from optax_offload._places import memory
from optax_offload._program import (
    Call,
    Places,
    Sharded,
    Update,
    arguments,
    bound,
    check_pairs,
    evaluate,
    key_data,
    lower,
    offloaded_update,
    read,
    sharding_of,
    shardings,
    variables,
)
from optax_offload._schedule import (
    AnySchedule,
    Branched,
    Group,
    Loop,
    OverWindow,
    Phased,
    Straight,
    schedule,
)

logger = logging.getLogger("optax_offload")

Env = Mapping[jex.Var, Any]


def carry_out(
    update: Update,
    window_bytes: int | None,
    args: Sequence[Any],
    sharded: Mapping[int, Sharded],
    *,
    at_once: bool = False,
) -> list[Any]:
    """The values of an update's outputs, as its schedule says.

    It warns of state on the device beyond the window. It does so only here, since a
    step that moves parts of an update elsewhere may need less.

    Args:
      update: The update.
      window_bytes: The window that was asked for.
      args: The values of its inputs.
      sharded: The shardings of inputs whose types do not say it, by position.
      at_once: Whether all gradients are there before it.
    """
    planned = schedule(update, window_bytes, at_once=at_once)
    logger.debug("%s", planned)
    for each, straight in planned.updates(update):
        for message in _over_window(each, window_bytes, straight):
            warn(message)
    return run(update, planned, args, Around({}, sharded))


def _over_window(
    update: Update, window_bytes: int | None, straight: Straight
) -> Iterator[str]:
    for over in straight.over_window(window_bytes):
        paths = [update.paths[k] for k in over.outputs]
        yield (
            f"{over.nbytes} bytes of state are on the device at once, over the "
            f"window of {straight.window.nbytes}: {trees.listed(paths)}: "
            f"{over.reason}{_instead(update, over)}"
        )


def _instead(update: Update, over: OverWindow) -> str:
    """The advice where some leaves join the state of all, as a norm of them does."""
    if not over.joined:
        return ""
    found = (
        ". Instead, take it of each step's own gradients, before what keeps state: "
        "optax.chain(what takes it, offload(...))"
    )
    paths = [o.path for o in update.outputs if o.alias in over.joined]
    prefix = posixpath.commonpath(paths) if paths else ""
    if prefix:
        pattern = prefix if len(paths) == 1 else f"{prefix}/.*"
        found += (
            f". Or leave on the device what it is of: Rule({pattern!r}, 'device') as "
            "the first rule"
        )
    return found


class Around(NamedTuple):
    """Facts about an update that come from outside.

    Attributes:
      known: The values of further variables, where it is a version of another.
      sharded: The shardings of inputs whose types do not say it, by position.
    """

    known: Env
    sharded: Mapping[int, Sharded]


def run(
    update: Update, schedule: AnySchedule, args: Sequence[Any], around: Around
) -> list[Any]:
    """Evaluates an update as its schedule says.

    Args:
      update: The update.
      schedule: Its schedule.
      args: The values of its inputs, wherever they are.
      around: Facts from outside.

    Returns:
      The values of its outputs, each in its memory kind.
    """
    if isinstance(schedule, Phased):
        for reading, each in schedule.passes:
            values = run(reading, each, args, around)
            sums = bound(variables(reading.program.outvars), values)
            around = around._replace(known={**around.known, **sums})
        return run(schedule.update, schedule.schedule, args, around)
    program = update.program
    known = {**around.known, **program.constants}
    env = bound(program.invars, args) | known
    if isinstance(schedule, Branched):
        before = evaluate(program, schedule.branches.before, _on_device(env))
        env |= before
        predicate = schedule.branches.predicate  # Maybe an argument.
        before[predicate] = load_whole(env[predicate])
        env |= evaluate(program, schedule.branches.beside, _on_device(env))
        inside = around._replace(known=known | before)
        done = _run_branches(update, schedule, args, inside)
    else:
        done = _run_stages(update, schedule, env, around.sharded)
    return [
        done[k]
        if k in done
        else moved(read(a, env.__getitem__), update.outputs[k].memory_kind)
        for k, a in enumerate(program.outvars)
    ]


def _run_stages(
    update: Update,
    schedule: Straight,
    env: dict[jex.Var, Any],
    sharded: Mapping[int, Sharded],
) -> dict[int, Any]:
    """The values of what is computed in stages. The others are in the environment."""
    program = update.program
    for i in schedule.scalars:
        env[program.invars[i]] = load_whole(env[program.invars[i]])
    env |= evaluate(program, schedule.shared, env.__getitem__)
    done: dict[int, Any] = {}
    computed: list[list[Any]] = []
    traces = Traces()
    held: list[Any] = []
    for stage in schedule.stages:
        if isinstance(stage, Loop):
            done |= run_loop(update, stage, env, traces, sharded)
            continue
        # One value of the group before stands for all that it waited for, so that no
        # result is waited for twice and the barriers are linear in all.
        tokens = held + [x for at in stage.after for x in computed[at]]
        values, results, held = _run_group(update, stage.group, env, tokens, sharded)
        done |= values
        computed.append(results)
    return done


def _run_group(
    update: Update,
    group: Group,
    env: Env,
    tokens: list[Any],
    sharded: Mapping[int, Sharded],
) -> tuple[dict[int, Any], list[Any], list[Any]]:
    """Loads, computes and stores one group once the tokens are there.

    Returns:
      The values of its outputs, those that are stored as they are on the device (with
      stored values as tokens, an H100's compiler copies a leaf on the host: F03), and
      what to wait for to wait for the tokens.
    """
    program = update.program
    kernel = whole_kernel(program, group, lambda _: Rest())
    loaded = [program.invars[i] for i in group.loads]
    if group.makes and not group.loads:
        loaded = [*kernel.operands]
    loads, held = _after(tokens, [env[v] for v in loaded])
    of_output = kernel.values(0, 0, env.__getitem__, bound(loaded, loads))
    if not loaded:
        results, held = _after(tokens, [*of_output.values()])
        of_output = bound(group.outputs, results)
    done: dict[int, Any] = {}
    for k, x in of_output.items():
        done[k] = rest_of(update, k, sharded, update.in_place(k)).stored(x)
    stored = [
        x
        for k, x in of_output.items()
        if update.outputs[k].stored
        and isinstance(x, jax.Array)
        and not memory.on_host(x)
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
    return lambda v: load_whole(env[v])


def _run_branches(
    update: Update, schedule: Branched, args: Sequence[Any], around: Around
) -> dict[int, Any]:
    """The values of the outputs that the predicate may change.

    Each version is a loop that runs once or not at all, in place. In a conditional both
    compilers copy what both branches write to (F18).
    """
    program, branches = update.program, schedule.branches
    values = {
        k: memory.full(program.outvars[k].aval, 0, update.outputs[k].memory_kind)
        if alias is None
        else args[alias]
        for k, alias in branches.outputs.items()
    }
    index = around.known[branches.predicate] > 0
    with_keys = [*args, *around.known.values()]
    places, data = Places.of(with_keys), key_data(with_keys)
    for value, (version, each) in enumerate(schedule.cases):
        wanted = index if value else ~index

        def once(
            carry: Any, version: Update = version, each: AnySchedule = each
        ) -> Any:
            _, values = carry
            found = places.keys(data)
            here, rest = found[: len(args)], found[len(args) :]
            inside = bound(around.known, rest)
            for k, alias in branches.outputs.items():
                if alias is not None:
                    here[alias] = values[k]
            results = run(version, each, here, around._replace(known=inside))
            return jnp.asarray(False), {k: results[k] for k in values}

        _, values = lax.while_loop(lambda carry: carry[0], once, (wanted, values))
    return values


def _lower(ctx: mlir.LoweringRuleContext, *data: Any, what: Call, **_: Any) -> Any:
    found = arguments(ctx, data)
    what.caller.check(
        found, {i for i, x in enumerate(ctx.avals_in) if memory.on_host(x)}
    )
    check_pairs(ctx)
    sharded = shardings(found, ctx.avals_in)
    update, window_bytes = what.update, what.caller.window_bytes

    def fn(*data: Any) -> list[Any]:
        args = [
            moved(x, "pinned_host" if of.on_host else "device")
            for x, of in zip(what.given.keys(list(data)), update.inputs, strict=True)
        ]
        values = carry_out(update, window_bytes, args, sharded)
        for k in update.stores:
            has = sharding_of(sharded, update.outputs[k].alias)
            values[k] = spread_by(
                update.program, update.program.outvars[k], values[k], has
            )
        return key_data(values)

    return lower(ctx, fn, found, data)


# Not as a function of its own, in which nothing would be an argument of the program.
mlir.register_lowering(offloaded_update, _lower, cacheable=False)
