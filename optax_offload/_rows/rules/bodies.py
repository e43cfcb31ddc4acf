"""Equations with bodies: loops, branches, jits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload import _compat
from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    Rows,
    Rule,
    rule,
)


def _join(a: Sequence[Axis], b: Sequence[Axis]) -> list[Axis]:
    return [y if x is None else x for x, y in zip(a, b, strict=True)]


class _Bodies(Rule):
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
        of_cond, consts = self._counts(e.params)
        carry = _join(ins[consts:], outs)
        body = rows.through(
            e.params["body_jaxpr"], Axes([*ins[of_cond:consts], *carry], carry)
        )
        carry = _join(body.ins[consts - of_cond :], body.outs)
        cond = rows.through(
            e.params["cond_jaxpr"], Axes([*ins[:of_cond], *carry], [None])
        )
        carry = _join(carry, cond.ins[of_cond:])
        if cond.outs != [None]:
            # As `jax.vmap` makes it: what is carried of a row that is done stays, and
            # the predicate's axes are the first ones of all that is carried.
            carry = _join(carry, cond.outs * len(carry))
            if carry != cond.outs * len(carry):
                raise NotRowLocalError(e.primitive.name)
        body_consts = body.ins[: consts - of_cond]
        return Axes([*cond.ins[:of_cond], *body_consts, *carry], carry)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        of_cond, consts = self._counts(e.params)
        for_cond = Axes([*axes.ins[:of_cond], *axes.ins[consts:]], [None])
        for_body = Axes(axes.ins[of_cond:], axes.outs)
        return {
            "cond_jaxpr": rows.resized(e.params["cond_jaxpr"], for_cond, size),
            "body_jaxpr": rows.resized(e.params["body_jaxpr"], for_body, size),
        }

    @staticmethod
    def _counts(params: Mapping[str, Any]) -> tuple[int, int]:
        """Counts the condition's operands, and all the operands before the carry."""
        of_cond = params["cond_nconsts"]
        return of_cond, of_cond + params["body_nconsts"]


@rule("scan")
class Scan(_Bodies):
    """Values that are scanned over have an axis in front, which rows must not be."""

    def step(self, e: jex.JaxprEqn, axes: Axes, rows: Rows) -> Axes:
        ins, outs = axes
        consts, count = _compat.scan_counts(e.params)
        carried = consts + count
        carry = _join(ins[consts:carried], outs[:count])
        xs = [_shifted(x, -1, e) for x in ins[carried:]]
        ys = [_shifted(y, -1, e) for y in outs[count:]]
        body = rows.through(
            e.params["jaxpr"], Axes([*ins[:consts], *carry, *xs], [*carry, *ys])
        )
        carry = _join(body.ins[consts:carried], body.outs[:count])
        xs = [_shifted(x, 1, e) for x in body.ins[carried:]]
        ys = [_shifted(y, 1, e) for y in body.outs[count:]]
        return Axes([*body.ins[:consts], *carry, *xs], [*carry, *ys])

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        consts, count = _compat.scan_counts(e.params)
        carried = consts + count
        xs = [_shifted(axis, -1, e) for axis in axes.ins[carried:]]
        ys = [_shifted(axis, -1, e) for axis in axes.outs[count:]]
        of_body = Axes([*axes.ins[:carried], *xs], [*axes.outs[:count], *ys])
        return {"jaxpr": rows.resized(e.params["jaxpr"], of_body, size)}


def _shifted(axis: Axis, by: int, e: jex.JaxprEqn) -> Axis:
    if axis is None:
        return None
    if axis + by < 0:
        raise NotRowLocalError(e.primitive.name)
    return axis + by
