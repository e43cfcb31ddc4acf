"""The arguments that bodies of equations take where they rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._ground import compat, limits
from optax_offload._places import memory
from optax_offload._program import shard_maps
from optax_offload._program.bodies import Body, as_they_are, entered, of_call
from optax_offload._program.call import called
from optax_offload._program.flops import flops_of
from optax_offload._program.graph import Atom, described, in_pairs, variables, within
from optax_offload._program.lowered import Spread
from optax_offload._program.primitives import facts


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The arguments that a body takes where they rest, as positions.

    Attributes:
      updated: The arguments that updates take as state.
      rows: The arguments that scans take rows of; and all of a body that is a step of
        its own, whose layers are loaded where they are used.
      counts: How many rows scans take, of each that may also be computed by rows.
      spread: The spread over a mesh that equations want of some of both.
    """

    updated: frozenset[int]
    rows: frozenset[int]
    counts: Mapping[int, int]
    spread: Mapping[int, Spread]


@dataclasses.dataclass(frozen=True)
class _Variables:
    """The same of all variables of a body."""

    updated: set[jex.Var] = dataclasses.field(default_factory=set)
    rows: set[jex.Var] = dataclasses.field(default_factory=set)
    counts: dict[jex.Var, int] = dataclasses.field(default_factory=dict)
    spread: dict[jex.Var, Spread] = dataclasses.field(default_factory=dict)


def wanted_at_rest(body: jex.Jaxpr, results: Sequence[int | None] = ()) -> Wanted:
    """Finds the operands that a body takes where they rest.

    Args:
      body: The body.
      results: For each of its results the rows, if it is wanted row by row.
    """
    found = _wanted(body, results)
    arguments = list(enumerate(body.invars))
    return Wanted(
        frozenset(i for i, v in arguments if v in found.updated),
        frozenset(i for i, v in arguments if v in found.rows),
        {i: found.counts[v] for i, v in arguments if v in found.counts},
        {i: found.spread[v] for i, v in arguments if v in found.spread},
    )


def wanted_in_turn(turn: Body) -> Wanted:
    """The same of an iteration of a scan; all that a microbatch takes of its layers."""
    found = wanted_at_rest(turn.jaxpr)
    if not is_microbatch(turn):
        return found
    consts = turn.split(range(len(turn.operands))).consts
    return dataclasses.replace(found, rows=found.rows.union(consts))


def is_microbatch(turn: Body) -> bool:
    """Returns whether a scan's body has a backward pass of layers that no scan runs.

    Of so much that a turn of it may well be one layer; of less only where it computes
    enough to be worth what is loaded in each iteration.
    """
    if not compat.SEGMENTS_ARE_FREED:
        return False
    consts = turn.split(turn.jaxpr.invars).consts
    taken, now = sum(memory.movable_nbytes(v.aval) or 0 for v in consts), limits.now
    if taken < now.least_taken_bytes:
        return False
    backward = (
        e for e in turn.jaxpr.eqns if "transpose(" in str(e.source_info.name_stack)
    )
    products = [n for n in map(flops_of, backward) if n]
    worth_it = sum(products) >= now.least_flops_per_byte * taken
    much = taken >= now.much_taken_bytes
    return len(products) >= now.least_products and (much or worth_it)


def row_counts(
    body: jex.Jaxpr, results: Sequence[int | None] = ()
) -> Mapping[jex.Var, int]:
    """The number of rows that scans take, of each variable that may be had by rows.

    These are what scans take rows of, and what leads to it row by row.

    Args:
      body: The equations.
      results: For each of the results the rows, if it is wanted row by row.
    """
    return _wanted(body, results).counts


def rows_of_results(e: jex.JaxprEqn, counts: Mapping[jex.Var, int]) -> int | None:
    """How many rows are wanted of an equation's results; None if not row by row."""
    found = {counts[v] for v in e.outvars if v in counts}
    return found.pop() if len(found) == 1 else None


def inside(e: jex.JaxprEqn, results: Sequence[int | None] = ()) -> Wanted:
    """Finds the operands that the bodies of an equation take where they rest.

    Args:
      e: The equation.
      results: For each of its results the rows, if it is wanted row by row.
    """
    results = results if of_call(e) is not None else ()
    of_scan = e.primitive.name == "scan"
    bodies = [
        (wanted_in_turn(x) if of_scan else wanted_at_rest(x.jaxpr, results), x.operands)
        for x in entered(e)
    ]
    updated = frozenset(at[i] for wanted, at in bodies for i in wanted.updated)
    rows = frozenset(at[i] for wanted, at in bodies for i in wanted.rows)
    by_rows = _by_rows(e)
    counts = {
        at[i]: n
        for wanted, at in bodies
        for i, n in wanted.counts.items()
        if at[i] in by_rows
    }
    spread = {at[i]: x for wanted, at in bodies for i, x in wanted.spread.items()}
    own = enumerate(shard_maps.spread(e))
    spread |= {i: x for i, x in own if x is not None and i in updated | rows}
    return Wanted(updated, rows, counts, spread)


def _by_rows(e: jex.JaxprEqn) -> range:
    """The operands that bodies may take as what is computed row by row."""
    if e.primitive.name == "while":  # What is carried is another value in each turn.
        (turn,) = entered(e)
        return range(turn.first, turn.first + len(turn.consts))
    whole = as_they_are(e) is None and e.primitive.name not in ("scan", "cond")
    return range(0 if whole else len(e.invars))


def _wanted(body: jex.Jaxpr, results: Sequence[int | None]) -> _Variables:
    found = _Variables()
    for a, count in zip(body.outvars, results, strict=False):
        if count is not None:
            _want_rows(found, [a], count)
    for e in reversed(body.eqns):
        what = called(e)
        if what is not None:
            found.updated.update(variables(e.invars[i] for i in what.update.loads))
            continue
        _want_by_rows(found, e)
        if facts(e).hands_on == "value":
            for a, v in in_pairs(e):
                for some in (found.updated, found.rows):
                    if v in some:
                        some.update(variables([a]))
            continue
        for turn in entered(e):
            if turn.xs:
                _want_rows(found, turn.xs, e.params["length"])
        own = inside(e, [found.counts.get(v) for v in e.outvars])
        found.updated.update(variables(e.invars[i] for i in own.updated))
        found.rows.update(variables(e.invars[i] for i in own.rows))
        for i, count in own.counts.items():
            _want_rows(found, [e.invars[i]], count)
        for i, wanted in own.spread.items():
            for v in variables([e.invars[i]]):
                if found.spread.setdefault(v, wanted) != wanted:
                    found.rows.discard(v)
    if compat.SEGMENTS_ARE_FREED and any(map(has_update, body.eqns)):
        found.rows.update(v for v in body.invars if v not in found.spread)
    return found


def _want_rows(found: _Variables, atoms: Iterable[Atom], count: int) -> None:
    for v in variables(atoms):
        found.rows.add(v)
        found.counts.setdefault(v, count)


def _want_by_rows(found: _Variables, e: jex.JaxprEqn) -> None:
    """Wants rows of what an equation computes row by row."""
    count, rule = rows_of_results(e, found.counts), facts(e).rows
    by_rows = rule(e, count) if rule and count else None
    if by_rows is not None:
        pairs = zip(e.invars, by_rows.rows, strict=True)
        _want_rows(found, [a for a, has_rows in pairs if has_rows], count or 0)


def has_update(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation is an offloaded update, or has one in a body."""
    return called(e) is not None or any(called(x) for x in within(e))


def update_refused(e: jex.JaxprEqn) -> NotImplementedError:
    """The error of an update in the body of an equation that is not entered."""
    return NotImplementedError(
        f"an offloaded update is in a {described(e)}. How often and on what such an "
        "equation evaluates its body is not known, so state cannot be streamed into "
        "it. Call update(...) outside of it; or keep its state on the device, with a "
        "rule for 'device' or the plain optimizer"
    )


def loads_itself(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether a step loads what it has stored, as `jax.checkpoint` may."""
    everywhere = (x for e in jaxpr.eqns for x in (e, *within(e)))
    loads = (e for e in everywhere if e.primitive.name == "device_put")
    return any(memory.on_host(a.aval) for e in loads for a in e.invars)
