"""The arguments that bodies of equations take where they rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.extend import core as jex

from optax_offload import _compat, _memory
from optax_offload._lowered import Spread
from optax_offload._program import shard_maps
from optax_offload._program.bodies import entered
from optax_offload._program.call import called
from optax_offload._program.graph import described, in_pairs, variables, within
from optax_offload._program.primitives import facts


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The arguments that a body takes where they rest, as positions.

    Attributes:
      updated: The arguments that updates take as state.
      rows: The arguments that scans take rows of; and all of a body that is a step of
        its own, whose layers are loaded where they are used.
      spread: The spread over a mesh that equations want of some of both.
    """

    updated: frozenset[int]
    rows: frozenset[int]
    spread: Mapping[int, Spread]


def wanted_at_rest(body: jex.Jaxpr) -> Wanted:
    """Finds the operands that a body takes where they rest."""
    updated: set[jex.Var] = set()
    rows: set[jex.Var] = set()
    spread: dict[jex.Var, Spread] = {}
    for e in reversed(body.eqns):
        what = called(e)
        if what is not None:
            updated.update(variables(e.invars[i] for i in what.update.loads))
            continue
        if facts(e).hands_on == "value":
            for a, v in in_pairs(e):
                for some in (updated, rows):
                    if v in some:
                        some.update(variables([a]))
            continue
        rows.update(a for body in entered(e) for a in variables(body.xs))
        found = inside(e)
        updated.update(variables(e.invars[i] for i in found.updated))
        rows.update(variables(e.invars[i] for i in found.rows))
        for i, wanted in found.spread.items():
            for v in variables([e.invars[i]]):
                if spread.setdefault(v, wanted) != wanted:
                    rows.discard(v)
    if _compat.SEGMENTS_ARE_FREED and any(map(has_update, body.eqns)):
        rows.update(v for v in body.invars if v not in spread)
    arguments = list(enumerate(body.invars))
    return Wanted(
        frozenset(i for i, v in arguments if v in updated),
        frozenset(i for i, v in arguments if v in rows),
        {i: spread[v] for i, v in arguments if v in spread},
    )


def inside(e: jex.JaxprEqn) -> Wanted:
    """Finds the operands that the bodies of an equation take where they rest."""
    bodies = [(wanted_at_rest(x.closed.jaxpr), x.operands) for x in entered(e)]
    updated = frozenset(at[i] for wanted, at in bodies for i in wanted.updated)
    rows = frozenset(at[i] for wanted, at in bodies for i in wanted.rows)
    spread = {at[i]: x for wanted, at in bodies for i, x in wanted.spread.items()}
    own = enumerate(shard_maps.spread(e))
    spread |= {i: x for i, x in own if x is not None and i in updated | rows}
    return Wanted(updated, rows, spread)


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
    return any(_memory.on_host(a.aval) for e in loads for a in e.invars)
