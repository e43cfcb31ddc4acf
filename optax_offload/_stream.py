"""Carrying out a schedule: loads, the window, stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._schedule import Flat, Group, Schedule


def run(
    flat: Flat, schedule: Schedule, args: Sequence[Any], kinds: Sequence[str]
) -> list[Any]:
    """Evaluates an update group by group.

    A group's loads wait, through an `optimization_barrier`, until the groups that
    have to be out of its way are stored.

    Args:
      flat: the update.
      schedule: its groups, in order.
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
    stored: list[list[Any]] = []
    passed, held = 0, []
    for group, wait in zip(schedule.groups, schedule.waits, strict=True):
        # One value of the group before stands for all that it waited for, so that no
        # store is waited for twice and the barriers are linear in all.
        tokens = held + [x for values in stored[passed:wait] for x in values]
        values, held = _run_group(flat, group, env, kinds, tokens)
        passed = wait
        done |= values
        stored.append([x for k, x in values.items() if kinds[k] != "device"])
    return [
        done[k] if k in done else _memory.transfer(_read(a, env.__getitem__), kinds[k])
        for k, a in enumerate(flat.outvars)
    ]


def _run_group(
    flat: Flat,
    group: Group,
    env: dict[jex.Var, Any],
    kinds: Sequence[str],
    tokens: list[Any],
) -> tuple[dict[int, Any], list[Any]]:
    """Loads, computes and stores one group once the tokens are there.

    Returns:
      The values of its outputs, and what to wait for to wait for the tokens.
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
        results, _ = _after(tokens, results)
    done = {
        k: _memory.transfer(x, kinds[k])
        for k, x in zip(group.outputs, results, strict=True)
    }
    if not group.loads:
        held = list(done.values())[:1] if tokens else []
    return done, held


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
