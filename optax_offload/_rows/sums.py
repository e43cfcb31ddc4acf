"""Reductions over the rows, which can be summed up row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._program import facts, shape, variables


class Sum(NamedTuple):
    """An equation that reduces over the rows, which can be summed up row by row.

    Attributes:
      position: The position of the equation.
      operands: Its operands that have rows.
    """

    position: int
    operands: tuple[jex.Var, ...]


def makes_number(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation reduces arrays to a number."""
    return facts(e).summed_by is not None and not any(map(shape, e.outvars))


def summed(e: jex.JaxprEqn, axes: Mapping[jex.Var, int]) -> list[jex.Var]:
    """The operands with rows of an equation that reduces over them."""
    known = [v for v in variables(e.invars) if v in axes]
    if facts(e).summed_by is None or not known:
        return []
    if e.primitive.name == "dot_general":
        return _contracted(e, axes)
    if axes[known[0]] not in e.params["axes"]:
        return []
    return known


def _contracted(e: jex.JaxprEqn, axes: Mapping[jex.Var, int]) -> list[jex.Var]:
    """The operands of a product whose rows are summed up in it."""
    (left, right), _ = e.params["dimension_numbers"]
    a, b = e.invars
    if not (isinstance(a, jex.Var) and isinstance(b, jex.Var)):
        return []
    if a not in axes or b not in axes or axes[a] not in left:
        return []
    return [a, b] if right[left.index(axes[a])] == axes[b] else []
