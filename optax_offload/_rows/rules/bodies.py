"""Equations with bodies: loops, branches, jits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._program import Body, Given, Taken, entered
from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    rule,
)


def _join(a: Sequence[Axis], b: Sequence[Axis]) -> list[Axis]:
    return [y if x is None else x for x, y in zip(a, b, strict=True)]


class _Bodies(RowRule):
    """Equations with bodies, through which batch axes are carried both ways.

    A carry has the axis of its operand or of its result, whichever has one.
    """

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        """The axes, and what follows from them."""
        raise NotImplementedError

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        return self._settled(e, Axes([*ins], [None] * len(e.outvars)), rows)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        return self._settled(e, Axes([None] * len(e.invars), [*outs]), rows).ins

    def _settled(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        before = None
        while before != axes:
            before, axes = axes, self.step(e, axes, rows)
        return axes


@rule("jit", "pjit")
class Jit(_Bodies):
    """One body."""

    parameter = "jaxpr"

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        return rows.through(e.params[self.parameter], axes)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        return {self.parameter: rows.resized(e.params[self.parameter], axes, size)}


@rule("custom_jvp_call", "custom_vjp_call")
class CustomDerivative(Jit):
    """One body, whose derivative is taken by now."""

    parameter = "call_jaxpr"


@rule("cond")
class Cond(_Bodies):
    """Branches, of which one is chosen for all rows."""

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        ins, outs = axes
        if ins[0] is not None:
            raise NotRowLocalError(e.primitive.name)
        for branch in e.params["branches"]:
            of_branch = rows.through(branch, Axes(ins[1:], outs))
            ins, outs = [None, *of_branch.ins], of_branch.outs
        return Axes(ins, outs)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        of_branch = Axes(axes.ins[1:], axes.outs)
        branches = e.params["branches"]
        return {"branches": tuple(rows.resized(b, of_branch, size) for b in branches)}


@rule("custom_linear_solve")
class LinearSolve(_Bodies):
    """Each body takes constants of its own and vectors, to vectors of the same rows."""

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        count = len(e.outvars)
        ins, vectors = axes.ins[:-count], _join(axes.ins[-count:], axes.outs)
        for consts, body in self._bodies(e):
            found = rows.through(body, Axes([*ins[consts], *vectors], vectors))
            ins[consts] = found.ins[:-count]
            vectors = _join(found.ins[-count:], found.outs)
        return Axes([*ins, *vectors], vectors)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        small = {
            body: rows.resized(body, Axes([*axes.ins[at], *axes.outs], axes.outs), size)
            for at, body in self._bodies(e)
        }
        bodies = e.params["jaxprs"]
        return {"jaxprs": type(bodies)(*(small.get(body) for body in bodies))}

    @staticmethod
    def _bodies(e: jex.JaxprEqn) -> Iterator[tuple[slice, jex.ClosedJaxpr]]:
        """Yields where the constants of each body are, and the body."""
        first = 0
        for n, body in zip(e.params["const_lengths"], e.params["jaxprs"], strict=True):
            if body is not None:
                yield slice(first, first + n), body
            first += n


@rule("while")
class While(_Bodies):
    """It goes on for all rows, or for none; or for each row until that row is done."""

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        ins, outs = axes
        (turn,) = entered(e)
        of_cond, of_body = ins[: turn.first], turn.split(ins[turn.first :])
        carry = _join(of_body.carry, outs)
        body = rows.through(turn.closed, Axes([*of_body.consts, *carry], carry))
        of_body = turn.split(body.ins)
        carry = _join(of_body.carry, body.outs)
        cond = rows.through(e.params["cond_jaxpr"], Axes([*of_cond, *carry], [None]))
        of_cond = cond.ins[: turn.first]
        carry = _join(carry, cond.ins[turn.first :])
        if cond.outs != [None]:
            # As `jax.vmap` makes it: what is carried of a row that is done stays, and
            # the predicate's axes are the first ones of all that is carried.
            carry = _join(carry, cond.outs * len(carry))
            if carry != cond.outs * len(carry):
                raise NotRowLocalError(e.primitive.name)
        return Axes([*of_cond, *of_body.consts, *carry], carry)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        (turn,) = entered(e)
        of_cond, of_body = axes.ins[: turn.first], axes.ins[turn.first :]
        for_cond = Axes([*of_cond, *turn.split(of_body).carry], [None])
        for_body = Axes(of_body, axes.outs)
        return {
            "cond_jaxpr": rows.resized(e.params["cond_jaxpr"], for_cond, size),
            "body_jaxpr": rows.resized(turn.closed, for_body, size),
        }


@rule("scan")
class Scan(_Bodies):
    """Values that are scanned over have an axis in front, which rows must not be."""

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        (turn,) = entered(e)
        ins, outs = self._shifted(turn, axes, -1)
        carry = _join(ins.carry, outs.carried)
        body = rows.through(
            turn.closed,
            Axes([*ins.consts, *carry, *ins.xs], [*carry, *outs.stacked]),
        )
        ins, outs = self._shifted(turn, body, 1)
        carry = _join(ins.carry, outs.carried)
        return Axes([*ins.consts, *carry, *ins.xs], [*carry, *outs.stacked])

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        (turn,) = entered(e)
        ins, outs = self._shifted(turn, axes, -1)
        of_body = Axes(
            [*ins.consts, *ins.carry, *ins.xs], [*outs.carried, *outs.stacked]
        )
        return {"jaxpr": rows.resized(turn.closed, of_body, size)}

    def _shifted(
        self, turn: Body, axes: Axes, by: int
    ) -> tuple[Taken[Axis], Given[Axis]]:
        """The axes, with those of what is scanned over some axes further."""

        def there(axis: Axis) -> Axis:
            if axis is None:
                return None
            if axis + by < 0:
                raise NotRowLocalError(turn.equation.primitive.name)
            return axis + by

        ins, outs = turn.split(axes.ins), turn.given(axes.outs)
        return (
            ins._replace(xs=list(map(there, ins.xs))),
            outs._replace(stacked=list(map(there, outs.stacked))),
        )
