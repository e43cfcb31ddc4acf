"""The equations whose bodies are entered, in one list.

What a body means depends on its equation: a solver's bodies are for its matrix, its
transpose and its preconditioner, a kernel's is for one block. So an equation that is
not listed here takes whole values and is left as it is, whatever bodies it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend import core as jex

# Equations that stand for their body, by the parameter that has it: it is evaluated
# once, on their operands as they are.
_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "jit": "jaxpr",
    "pjit": "jaxpr",
}
# Behind a barrier.
_BEHIND = {"remat2": "jaxpr"}
# On the shard of each operand that a device has; on rows; again and again.
_PARTS = {"shard_map": "jaxpr", "scan": "jaxpr", "while": "body_jaxpr"}
_LISTED = _CALLS | _BEHIND | _PARTS


@dataclasses.dataclass(frozen=True)
class Body:
    """A body of an equation.

    Attributes:
      closed: Its equations.
      operands: For each of its arguments the operand that it is, as a position. A row
        or a shard of an operand, and what is carried instead of it, count as it.
    """

    closed: jex.ClosedJaxpr
    operands: range


def of_call(e: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The body that an equation stands for; None if it is no call."""
    return _body(e, _CALLS)


def as_they_are(e: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The body that an equation evaluates once, on its operands as they are, if any."""
    return _body(e, _CALLS | _BEHIND)


def entered(e: jex.JaxprEqn) -> Sequence[Body]:
    """The bodies that an equation evaluates; none of an equation that is not listed.

    The condition of a `while` is not among them: it takes whole values.
    """
    count = len(e.invars)
    if e.primitive.name == "cond":
        return [Body(x, range(1, count)) for x in e.params["branches"]]
    closed = _body(e, _LISTED)
    first = e.params["cond_nconsts"] if e.primitive.name == "while" else 0
    return [] if closed is None else [Body(closed, range(first, count))]


def with_bodies(
    e: jex.JaxprEqn, rewritten: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]
) -> jex.JaxprEqn:
    """An equation with other bodies, of those that it evaluates.

    A body that may close over nothing stays as it was where the other one does.
    """
    name = "branches" if e.primitive.name == "cond" else _LISTED.get(e.primitive.name)
    if name is None:
        return e

    def other(body: jex.Jaxpr | jex.ClosedJaxpr) -> jex.Jaxpr | jex.ClosedJaxpr:
        if isinstance(body, jex.ClosedJaxpr):
            return rewritten(body)
        found = rewritten(jex.ClosedJaxpr(body, ()))
        return body if found.consts else found.jaxpr

    before = e.params[name]
    after = tuple(map(other, before)) if isinstance(before, tuple) else other(before)
    return e.replace(params={**e.params, name: after})


def of_platforms(e: jex.JaxprEqn) -> Sequence[Sequence[str] | None] | None:
    """The platforms of each branch of a conditional that is decided by platform.

    None instead of the platforms is for all others. Of these branches only that of the
    program's platform can be lowered.
    """
    return e.params.get("branches_platforms")


def _body(e: jex.JaxprEqn, listed: dict[str, str]) -> jex.ClosedJaxpr | None:
    name = listed.get(e.primitive.name)
    if name is None:
        return None
    body = e.params[name]
    return body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())
