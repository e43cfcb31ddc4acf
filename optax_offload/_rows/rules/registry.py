"""The registry of slicing rules, and what rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program import shape

Axis = int | None


class NotRowLocalError(Exception):
    """An equation mixes rows, or is not known not to. The message names it."""


class Axes(NamedTuple):
    """The batch axes of an equation, None for values that are the same for all rows.

    Attributes:
      ins: One for each operand.
      outs: One for each result.
    """

    ins: list[Axis]
    outs: list[Axis]


class Rows(Protocol):
    """The part of an analysis that its rules can see."""

    @property
    def count(self) -> int:
        """The number of rows in all."""
        ...

    def through(self, body: jex.ClosedJaxpr, axes: Axes) -> Axes:
        """The batch axes of a body's arguments and results, from those known."""
        ...

    def resized(self, body: jex.ClosedJaxpr, axes: Axes, size: int) -> jex.ClosedJaxpr:
        """A body for so many rows."""
        ...


class RowRule:
    """A rule says how equations of a primitive treat rows.

    Attributes:
      arithmetic: Whether a result of known values is computed again for each slice,
        rather than whole beforehand and kept.
    """

    arithmetic = False

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        """Batch axes of the results, and of operands that need one for that.

        Raises:
          NotRowLocalError: the equation mixes rows.
        """
        raise NotRowLocalError(e.primitive.name)

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        """Batch axes of the operands, given those that the results have to have.

        Raises:
          NotRowLocalError: the results cannot have them.
        """
        raise NotRowLocalError(e.primitive.name)

    def resize(
        self, e: jex.JaxprEqn, axes: Axes, rows: Rows, size: int
    ) -> dict[str, Any]:
        """The parameters of the equation that change for so many rows."""
        return {}


RULES: dict[str, RowRule] = {}
R = TypeVar("R", bound=RowRule)


def rule(*primitives: str) -> Callable[[type[R]], type[R]]:
    """Enters a rule for primitives, by name."""

    def enter(cls: type[R]) -> type[R]:
        of_all = cls()
        for name in primitives:
            RULES[name] = of_all
        return cls

    return enter


def rule_of(e: jex.JaxprEqn) -> RowRule:
    """The rule of an equation; of a primitive without one, a rule that refuses.

    Equations with effects are refused too, since these would happen for every slice.
    """
    if compat.has_effects(e):
        return _REFUSED
    return RULES.get(e.primitive.name, _REFUSED)


def is_arithmetic(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation's result is computed again for each slice."""
    return rule_of(e).arithmetic and len(e.outvars) == 1


def is_elementwise(e: jex.JaxprEqn) -> bool:
    """Returns whether each number of a result is computed from one of each operand."""
    return is_arithmetic(e) and all(
        shape(a) in ((), shape(e.outvars[0])) for a in e.invars
    )


_REFUSED = RowRule()


def resized(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size along an axis."""
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def only(axes: Sequence[Axis], e: jex.JaxprEqn) -> int:
    """The one axis that is among these."""
    found = {axis for axis in axes if axis is not None}
    if len(found) != 1:
        raise NotRowLocalError(e.primitive.name)
    return found.pop()


def arrays(e: jex.JaxprEqn, axis: int) -> list[Axis]:
    """The same axis for all operands but those that are the same for all rows.

    These are scalars, and where `jax.vmap` made the equation what has a single row.
    """

    def of(sizes: tuple[int, ...]) -> Axis:
        return axis if sizes and sizes[axis] != 1 else None

    return [of(shape(a)) for a in e.invars]


class Unary(RowRule):
    """Only the first operand has rows."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        """The axis of the results; None if they have no such rows."""
        raise NotImplementedError

    def back(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        """The axis of the operand, from that of the results."""
        candidates = range(len(shape(e.invars[0])))
        fits = (x for x in candidates if shape(e.invars[0])[x] == rows.count)
        return next((x for x in fits if self.to(e, x, rows) == axis), None)

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis, *rest = ins
        to = None if axis is None else self.to(e, axis, rows)
        if to is None or any(x is not None for x in rest):
            raise NotRowLocalError(e.primitive.name)
        return Axes([*ins], [to] * len(e.outvars))

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = self.back(e, only(outs, e), rows)
        if axis is None:
            raise NotRowLocalError(e.primitive.name)
        return [axis, *[None] * (len(e.invars) - 1)]
