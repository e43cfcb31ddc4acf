"""Finds gradients of encoded parameters, which nobody who freezes them meant."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program.graph import nested, variables
from optax_offload._program.primitives import are_codes

_Leaves = frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product with a decoded parameter, as the other operand sees it.

    Attributes:
      leaves: The arguments that were decoded.
      kept: The axes of the other operand that the product keeps.
      size: The number of elements of the parameter.
    """

    leaves: _Leaves
    kept: frozenset[int]
    size: int


def gradients_of_codes(jaxpr: jex.Jaxpr) -> list[int]:
    """Returns the arguments that are codes of which a step computes gradients.

    A product hands a cotangent on by a product with the parameter, and has its gradient
    by one of the same cotangent that sums over the axes that the other keeps. Products
    alone tell: those of a parameter that is trained beside an encoded one, of the same
    size and on the same input, are the same two.

    Args:
      jaxpr: A step. What its results do not need costs nothing, and is not looked at.
    """
    found: set[int] = set()
    jaxpr = compat.without_unused(jaxpr)
    leaves = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars)}
    _look(jaxpr, {}, leaves, found)
    return sorted(found)


def _look(
    jaxpr: jex.Jaxpr,
    known: dict[Any, _Leaves],
    arguments: dict[Any, _Leaves],
    found: set[int],
) -> dict[Any, _Leaves]:
    """Adds what is found in a body to what was; returns which values are decoded.

    Args:
      jaxpr: The body.
      known: Of each of its arguments that is decoded, what that was made of; of
        constants, nothing.
      arguments: The step's arguments, if this is the step itself.
      found: What was found.
    """
    known |= {v: frozenset() for v in jaxpr.constvars}
    products: dict[Any, list[_Product]] = defaultdict(list)
    others: list[tuple[Any, frozenset[int], int]] = []
    for e in jaxpr.eqns:
        if are_codes(e):
            known |= dict.fromkeys(e.outvars, arguments.get(e.invars[0], frozenset()))
            continue
        for body in nested(e):
            # The last operands: a branch takes all but the index.
            operands = e.invars[-len(body.invars) :] if body.invars else []
            inner = {
                v: known[a]
                for v, a in zip(body.invars, operands, strict=False)
                if variables([a]) and a in known
            }
            inner = _look(body, inner, {}, found)
            for v, result in zip(e.outvars, body.outvars, strict=False):
                if variables([result]) and result in inner and inner[result]:
                    known[v] = inner[result]
        if e.primitive.name == "dot_general":
            _multiply(e, known, products, others)
        operands = variables(e.invars)
        if all(v in known for v in operands) and not any(v in known for v in e.outvars):
            made = frozenset().union(*(known[v] for v in operands))
            known |= dict.fromkeys(e.outvars, made)
    for operand, summed, size in others:
        for product in products[operand]:
            if summed == product.kept and size == product.size:
                found |= product.leaves
    return known


def _multiply(
    e: jex.JaxprEqn,
    known: dict[Any, _Leaves],
    products: dict[Any, list[_Product]],
    others: list[tuple[Any, frozenset[int], int]],
) -> None:
    """Notes a product, of a decoded parameter or of two other values."""
    contracted, batch = e.params["dimension_numbers"]
    pairs: Sequence[Any] = list(zip(e.invars, contracted, batch, strict=True))
    decoded = [bool(variables([a])) and bool(known.get(a)) for a in e.invars]
    for i, (a, summed, shared) in enumerate(pairs):
        if decoded[i] or not variables([a]):
            continue
        other: Any = e.invars[1 - i]
        if decoded[1 - i]:
            kept = {*range(len(a.aval.shape))} - {*summed} - {*shared}
            size = math.prod(other.aval.shape)
            products[a].append(_Product(known[other], frozenset(kept), size))
        else:
            result: Any = e.outvars[0]
            size = math.prod(result.aval.shape)
            others.append((a, frozenset(summed), size))
