"""Finds results that replace arguments at rest on the host, and so return there."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import shard_maps
from optax_offload._program.bodies import entered
from optax_offload._program.build import flatten
from optax_offload._program.call import called
from optax_offload._program.graph import (
    Program,
    needed,
    passed_on,
    shape,
    variables,
)
from optax_offload._program.primitives import facts

# Most of what replaces an argument adds something to it.
_ADDS = {"adds"}
_LEADS = {"adds", "scales"}


def returning(closed: jex.ClosedJaxpr, types: Sequence[Any]) -> dict[int, int]:
    """The argument in host memory that a result replaces, for each such result.

    Arguments and results are positions. An argument is replaced by the result to which
    the fewest equations between numbers of the same position lead: a parameter by
    itself plus its update. Results that follow from such a result, as the distance that
    a parameter moved, come after it. So do results to which an argument that does not
    rest there leads as directly: a state's copy of first parameters is chosen from them
    and from itself. Results to which only multiples of the argument lead, as a gradient
    that weight decay is part of, come last.
    """
    program = flatten(closed, once=True)
    resting = {
        v for v, x in zip(program.invars, types, strict=True) if memory.on_host(x)
    }
    for e in program.equations:  # New state is where its update leaves it.
        what = called(e)
        if what is not None:
            resting.difference_update(variables(e.invars[i] for i in what.update.loads))
    others = set(program.invars) - resting
    found: list[tuple[bool, bool, int, int, jex.Var]] = []
    for k, a in enumerate(program.outvars):
        if isinstance(a, jex.Var) and a not in resting:
            adding = _leading_to(program, a, resting, _ADDS)
            all_steps = _leading_to(program, a, resting, _LEADS)
            own = min(
                _leading_to(program, a, others, _LEADS).values(), default=math.inf
            )
            found += [
                (v not in adding, own <= n, n, k, v) for v, n in all_steps.items()
            ]
    wanted = collections.Counter(v for *_, v in found)
    several = {k: program.outvars[k] for *_, k, v in found if wanted[v] > 1}
    after = collections.Counter(
        {k: _count_before(program, a, several.values()) for k, a in several.items()}
    )

    def likely(each: tuple[bool, bool, int, int, jex.Var]) -> tuple[int, ...]:
        multiple, has_own, n, k, _ = each
        return multiple, has_own, after[k], n, k

    replaced: dict[int, int] = {}
    for *_, k, v in sorted(found, key=likely):
        i = program.invars.index(v)
        if k not in replaced and i not in replaced.values():
            replaced[k] = i
    return replaced


def _count_before(program: Program, result: Any, results: Iterable[Any]) -> int:
    """Returns how many of some results another is computed from."""
    positions = needed(program.equations, [result])
    taken = {v for i in positions for v in variables(program.equations[i].invars)}
    return len(taken.intersection(results))


def _leading_to(
    program: Program,
    result: jex.Var,
    resting: Collection[jex.Var],
    ways: Collection[str],
) -> Mapping[jex.Var, int]:
    """The arguments that lead to a result of their type, and in how many equations."""
    of: Any = result.aval
    found: dict[jex.Var, int] = {}
    reached, front, count = {result}, [result], 0
    while front:
        found |= {v: count for v in front if v in resting and _alike(v, of)}
        count += 1
        before = [
            x
            for v in front
            if v in program.producers
            for x in _before(program.equations[program.producers[v]], v, ways)
            if shape(x) == of.shape
        ]
        front = [v for v in dict.fromkeys(before) if v not in reached]
        reached.update(front)
    return found


def _before(e: jex.JaxprEqn, v: jex.Var, ways: Collection[str]) -> list[jex.Var]:
    """Returns the operands of which a result is made, number by number."""
    if facts(e).leads in ways:
        return variables(e.invars)
    if e.primitive.name in ("cond", "shard_map"):
        return _before_inside(e, v, ways)
    if e.primitive.name not in ("scan", "while"):
        return []
    (body,) = entered(e)
    if v in body.carried:  # What a loop carries is what it was, a few times over.
        return variables([body.carry[body.carried.index(v)]])
    # What it stacks may be what it took rows of.
    return variables(e.invars[i] for i in [passed_on(body).get(v)] if i is not None)


def _before_inside(e: jex.JaxprEqn, v: jex.Var, ways: Collection[str]) -> list[jex.Var]:
    """Returns the operands of which a body makes a result, in any of the branches."""
    found: list[jex.Var] = []
    k = e.outvars.index(v)
    for body in entered(e):
        program = flatten(body.closed)
        a = program.outvars[k]
        if isinstance(a, jex.Var):
            for x in _leading_to(program, a, program.invars, ways):
                i = body.operands[program.invars.index(x)]
                if shard_maps.shards_alike(e, i, k):
                    found += variables([e.invars[i]])
    return list(dict.fromkeys(found))


def _alike(v: jex.Var, of: Any) -> bool:
    aval: Any = v.aval
    return (aval.shape, aval.dtype) == (of.shape, of.dtype)
