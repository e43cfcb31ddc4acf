"""The equations whose bodies are entered, in one list, and what turns of these take.

What a body means depends on its equation: a solver's bodies are for its matrix, its
transpose and its preconditioner, a kernel's is for one block. So an equation that is
not listed here takes whole values and is left as it is, whatever bodies it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory

T = TypeVar("T")

# Equations that stand for their body, by the parameter that has it: it is evaluated
# once, on their operands as they are.
_CALLS = {
    # The first time that what `jax.checkpoint` holds is computed, for a gradient: by
    # the name of JAX 0.11 and before, and of 0.12.
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
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


class Taken(NamedTuple, Generic[T]):
    """What turns take.

    Attributes:
      consts: What each takes as it is.
      carry: What the first one takes, and the others get from the one before.
      xs: What each takes a row of.
    """

    consts: Sequence[T]
    carry: Sequence[T]
    xs: Sequence[T]


class Row(NamedTuple):
    """A row that a turn takes or gives.

    Attributes:
      position: The position of what it is a row of, among operands or results.
      stack: What it is a row of.
      row: The argument or result of the body that it is.
    """

    position: int
    stack: Any
    row: Any

    @property
    def rests(self) -> bool:
        """Whether what it is a row of rests on the host, and it is on the device."""
        return memory.on_host(self.stack.aval) and not memory.on_host(self.row.aval)


class Given(NamedTuple, Generic[T]):
    """What turns give.

    Attributes:
      carried: What the last one hands on.
      stacked: What each gives a row of.
    """

    carried: Sequence[T]
    stacked: Sequence[T]


@dataclasses.dataclass(frozen=True)
class Body:
    """A body of an equation, which is evaluated once in each turn.

    Attributes:
      equation: The equation.
      closed: The equations of a turn.
      first: The position of the operand that is its first argument.
      counts: How many of its arguments are constants, and how many are carried. The
        others are rows.
      stacks: How many of its results are rows of what is stacked: the last ones.
    """

    equation: jex.JaxprEqn
    closed: jex.ClosedJaxpr
    first: int
    counts: tuple[int, int]
    stacks: int = 0

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """The equations, without what they close over."""
        return self.closed.jaxpr

    @property
    def operands(self) -> range:
        """For each of its arguments the operand that it is, as a position.

        A row or a shard of an operand, and what is carried instead of it, count as it.
        """
        return range(self.first, len(self.equation.invars))

    def split(self, arguments: Sequence[T]) -> Taken[T]:
        """What is known of each of its arguments, as turns take them."""
        consts, carried = self.counts
        carry = arguments[consts : consts + carried]
        return Taken(arguments[:consts], carry, arguments[consts + carried :])

    def given(self, results: Sequence[T]) -> Given[T]:
        """What is known of each result, of a turn or of the equation."""
        carried = len(results) - self.stacks
        return Given(results[:carried], results[carried:])

    @property
    def consts(self) -> Sequence[Any]:
        """Operands that each turn takes as they are."""
        return self.split(self.equation.invars[self.first :]).consts

    @property
    def carry(self) -> Sequence[Any]:
        """Operands of the first turn, which the others get from the one before."""
        return self.split(self.equation.invars[self.first :]).carry

    @property
    def xs(self) -> Sequence[Any]:
        """Operands of which each turn takes a row."""
        return self.split(self.equation.invars[self.first :]).xs

    @property
    def carried(self) -> Sequence[jex.Var]:
        """Results that the last turn hands on."""
        return self.given(self.equation.outvars).carried

    @property
    def stacked(self) -> Sequence[jex.Var]:
        """Results of which each turn gives a row."""
        return self.given(self.equation.outvars).stacked

    @property
    def rows_taken(self) -> list[Row]:
        """The rows that a turn takes."""
        rows = self.split(self.jaxpr.invars).xs
        of = self.split(self.operands).xs
        return list(map(Row, of, self.xs, rows))

    @property
    def rows_given(self) -> list[Row]:
        """The rows that a turn gives."""
        rows = self.given(self.jaxpr.outvars).stacked
        of = range(len(self.carried), len(self.equation.outvars))
        return list(map(Row, of, self.stacked, rows))

    @property
    def loads(self) -> list[Row]:
        """The rows that are loaded for a turn: it takes them on the device."""
        return [x for x in self.rows_taken if x.rests]

    @property
    def stores(self) -> list[Row]:
        """The rows that are stored for a turn: it leaves them on the device."""
        return [x for x in self.rows_given if x.rests]


def of_call(e: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The body that an equation stands for; None if it is no call."""
    return _body(e, _CALLS)


def takers(e: jex.JaxprEqn, operand: int) -> Sequence[str]:
    """The names of the equations that take an operand, of an equation or its calls.

    Args:
      e: The equation.
      operand: The position of the operand.
    """
    closed = of_call(e)
    if closed is None:
        return [e.primitive.name]
    v, found = closed.jaxpr.invars[operand], list[str]()
    for inner in closed.jaxpr.eqns:
        for i, a in enumerate(inner.invars):
            if a is v:
                found += takers(inner, i)
    return found


def as_they_are(e: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The body that an equation evaluates once, on its operands as they are, if any."""
    return _body(e, _CALLS | _BEHIND)


def entered(e: jex.JaxprEqn) -> Sequence[Body]:
    """The bodies that an equation evaluates; none of an equation that is not listed.

    The condition of a `while` is not among them: it takes whole values.
    """
    count = len(e.invars)
    if e.primitive.name == "cond":
        return [Body(e, x, 1, (count - 1, 0)) for x in e.params["branches"]]
    closed = _body(e, _LISTED)
    if closed is None:
        return []
    if e.primitive.name == "scan":
        counts = compat.scan_counts(e.params)
        return [Body(e, closed, 0, counts, len(e.outvars) - counts[1])]
    if e.primitive.name == "while":
        first, consts = e.params["cond_nconsts"], e.params["body_nconsts"]
        return [Body(e, closed, first, (consts, count - first - consts))]
    return [Body(e, closed, 0, (count, 0))]


def with_bodies(
    e: jex.JaxprEqn, rewritten: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]
) -> jex.JaxprEqn:
    """An equation with other bodies, of those that it evaluates.

    A body that may close over nothing stays as it was where the other one does. Where
    all do, the equation is the same.
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
    bodies = before if isinstance(before, tuple) else (before,)
    after = tuple(map(other, bodies))
    if all(x is y for x, y in zip(after, bodies, strict=True)):
        return e
    return e.replace(params={**e.params, name: after if bodies is before else after[0]})


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
