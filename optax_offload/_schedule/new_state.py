"""New state that rests on the host, wherever in a step an update makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Caller,
    Output,
    called,
    entered,
    facts,
    handed_on,
    variables,
)


class NewState(NamedTuple):
    """New state that rests on the host, a result of an equation.

    Attributes:
      output: The output of the update that it is.
      caller: The caller of this.
    """

    output: Output
    caller: Caller


def made_by(e: jex.JaxprEqn) -> dict[int, NewState]:
    """The results of an equation that are new state at rest, by position."""
    what = called(e)
    if what is not None:
        outputs = enumerate(what.update.outputs)
        return {
            k: NewState(x, what.caller)
            for k, x in outputs
            if x.stored and not x.is_update
        }
    found: dict[int, NewState] = {}
    for body in (x.closed.jaxpr for x in entered(e)):
        made = made_in(body.eqns)
        for inner in body.eqns:
            made |= {v: made[a] for a, v in handed_on(inner) if a in made}
        found |= {
            k: made[a]
            for k, a in enumerate(body.outvars)
            if isinstance(a, jex.Var) and a in made
        }
    return found


def made_in(equations: Sequence[jex.JaxprEqn]) -> dict[jex.Var, NewState]:
    """The variables that are new state at rest, as equations give it."""
    return {e.outvars[k]: x for e in equations for k, x in made_by(e).items()}


def taken_as_state(equations: Sequence[jex.JaxprEqn]) -> list[jex.Var]:
    """What updates take as state that is to rest on the host."""
    calls = [(called(e), e.invars) for e in equations]
    return [
        v
        for what, operands in calls
        if what is not None
        for v in variables(operands[i] for i in what.caller.planned)
    ]


def returned(
    equations: Sequence[jex.JaxprEqn], results: Sequence[Atom]
) -> set[jex.Var]:
    """The results of a program, and the variables that are handed on as these."""
    found = set(variables(results))
    for e in reversed(equations):
        found.update(a for a, v in handed_on(e) if v in found and stays(e))
    return found


def stays(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation hands on state as it is, and where it is."""
    to_host = any(memory.on_host(v.aval) for v in e.outvars)
    moved = e.primitive.name == "device_put" and not to_host
    return facts(e).hands_on == "value" and not moved
