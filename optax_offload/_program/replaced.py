"""Finds results that replace arguments at rest on the host, and so return there."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import shard_maps
from optax_offload._program.bodies import Body, entered
from optax_offload._program.build import flatten
from optax_offload._program.call import called
from optax_offload._program.graph import (
    Atom,
    Program,
    in_pairs,
    needed,
    shape,
    variables,
)
from optax_offload._program.primitives import facts
from optax_offload._program.wanted import has_update

# Most of what replaces an argument adds something to it.
_ADDS = {"adds"}
_LEADS = {"adds", "scales"}


def returning(
    closed: jex.ClosedJaxpr,
    types: Sequence[Any],
    places: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """The argument in host memory that a result replaces, for each such result.

    Arguments and results are positions. An argument is replaced by the result to which
    the fewest equations between numbers of the same position lead: a parameter by
    itself plus its update. Results that follow from such a result, as the distance that
    a parameter moved, come after it. So do results to which an argument that does not
    rest there leads as directly: a state's copy of first parameters is chosen from them
    and from itself. Results to which only multiples of the argument lead, as a gradient
    that weight decay is part of, come last.

    What is made of such a result alone, and has the place of the argument among the
    results, is what replaces it: parameters that are clipped. So does what has the
    place of a donated argument that nothing else replaces, however it is made; unless
    the step says itself where either belongs, or what is made of an update's new state
    is in the place of the old.

    Args:
      closed: A step that was traced as if all were on the device.
      types: The types of its arguments, where they are.
      places: The donated argument in whose place each result is, as far as it is known.
    """
    places = places or {}
    program = flatten(closed, once=True)
    resting = {
        v for v, x in zip(program.invars, types, strict=True) if memory.on_host(x)
    }
    given = {*resting}
    for e in program.equations:  # New state is where its update leaves it.
        what = called(e)
        if what is not None:
            resting.difference_update(variables(e.invars[i] for i in what.update.loads))
    if not given:
        return {}
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
    puts = [e for e in program.equations if e.primitive.name == "device_put"]
    by_hand = {v for e in puts for v in (*variables(e.invars), *e.outvars)}
    for k, i in places.items():
        v, a = program.invars[i], program.outvars[k]
        if k in replaced or v not in given or not isinstance(a, jex.Var):
            continue
        if a is v or not _alike(v, a.aval) or not by_hand.isdisjoint({v, a}):
            continue
        if v not in resting and _is_new_state(program, a):
            continue
        other = next((n for n, x in replaced.items() if x == i), None)
        if other is None:
            replaced[k] = i
        elif _is_made_of(program, a, program.outvars[other], v):
            del replaced[other]
            replaced[k] = i
    return replaced


def _is_new_state(program: Program, a: jex.Var) -> bool:
    """Returns whether a result is an update's new state, or follows from an update."""
    return memory.on_host(a.aval) or any(
        has_update(program.equations[i]) for i in needed(program.equations, [a])
    )


def _is_made_of(program: Program, result: jex.Var, new: Atom, old: jex.Var) -> bool:
    """Returns whether a result is made of the new numbers alone, each of its own."""
    last = variables([new])
    found = _leading_to(program, result, (*last, old), _LEADS, last=last)
    return [*found] == last


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
    last: Collection[jex.Var] = (),
) -> Mapping[jex.Var, int]:
    """The arguments that lead to a result of their type, and in how many equations.

    They may lead there through any variables but the last.
    """
    of: Any = result.aval
    reached: dict[jex.Var, int] = {}
    # The nearest come first; of those that are as near, the one found first.
    waiting, number = [(0, 0, result)], itertools.count(1)
    while waiting:
        count, _, v = heapq.heappop(waiting)
        if v in reached:
            continue
        reached[v] = count
        if v in program.producers and v not in last:
            before = _before(program.equations[program.producers[v]], v, ways)
            for x, steps in before:
                if shape(x) == of.shape:
                    heapq.heappush(waiting, (count + steps, next(number), x))
    return {v: n for v, n in reached.items() if v in resting and _alike(v, of)}


def _before(
    e: jex.JaxprEqn, v: jex.Var, ways: Collection[str]
) -> Iterable[tuple[jex.Var, int]]:
    """The operands of which a result is made, number by number, and in how many steps.

    In a body each equation is a step, so that what it only hands through is nearer.
    """
    if facts(e).leads in ways:
        alone = [a for a, x in in_pairs(e) if x is v] if len(e.outvars) > 1 else None
        return [(x, 1) for x in variables(alone or e.invars)]
    if e.primitive.name in ("cond", "remat2", "shard_map"):
        return _before_inside(e, v, ways)
    if e.primitive.name not in ("scan", "while"):
        return []
    (body,) = entered(e)
    if v in body.carried:  # What a loop carries is what it was, a few times over.
        return [(x, 1) for x in variables([body.carry[body.carried.index(v)]])]
    return _before_rows(body, v, ways)


def _before_rows(
    body: Body, v: jex.Var, ways: Collection[str]
) -> Iterator[tuple[jex.Var, int]]:
    """Yields the operands of whose rows a scan makes those that it stacks."""
    program = flatten(body.closed)
    (k,) = (k for k, x in enumerate(body.equation.outvars) if x is v)
    taken = {program.invars[x.position]: x.stack for x in body.rows_taken}
    a = program.outvars[k]
    if isinstance(a, jex.Var):
        for x, n in _leading_to(program, a, taken.keys(), ways).items():
            yield from ((y, n + 1) for y in variables([taken[x]]))


def _before_inside(
    e: jex.JaxprEqn, v: jex.Var, ways: Collection[str]
) -> Iterator[tuple[jex.Var, int]]:
    """Yields the operands of which a body makes a result, in any of the branches."""
    k = e.outvars.index(v)
    for body in entered(e):
        program = flatten(body.closed)
        a = program.outvars[k]
        if isinstance(a, jex.Var):
            for x, n in _leading_to(program, a, program.invars, ways).items():
                i = body.operands[program.invars.index(x)]
                if shard_maps.shards_alike(e, i, k):
                    yield from ((y, n + 1) for y in variables([e.invars[i]]))


def _alike(v: jex.Var, of: Any) -> bool:
    aval: Any = v.aval
    return (aval.shape, aval.dtype) == (of.shape, of.dtype)
