"""What is alive at each equation of a step, estimated from its equations alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._flops import of_equation
from optax_offload._program import Step, facts
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.rest import Outer


def passing(
    step: Step, nodes: Sequence[Outer], counted: Collection[jex.Var] | None = None
) -> list[int]:
    """The bytes that are computed before each node, and taken by it or later.

    Args:
      step: The step.
      nodes: Its equations, in order.
      counted: The variables that count; None for all.
    """
    changes = [0] * (len(nodes) + 2)
    for v, made, last in _spans(step, nodes):
        if last > made and (counted is None or v in counted):
            changes[made + 1] += _memory.nbytes_on_each_device(v.aval)
            changes[last + 1] -= _memory.nbytes_on_each_device(v.aval)
    return [*itertools.accumulate(changes)]


def kept(step: Step, nodes: Sequence[Outer]) -> set[jex.Var]:
    """The variables that a compiler has in memory, and fuses with no reader.

    These are what products make and take, and whatever is taken after a later product.
    """
    equations = step.program.equations
    opaque = [not _is_fused(equations[node.position]) for node in nodes]
    before = [0, *itertools.accumulate(opaque)]
    of_products = {
        v
        for node, is_product in zip(nodes, opaque, strict=True)
        if is_product
        for v in (*node.reads, *step.defines(node.position))
    }
    return {
        v
        for v, made, last in _spans(step, nodes)
        if v in of_products or before[last] > before[made + 1]
    }


def _spans(step: Step, nodes: Sequence[Outer]) -> Iterator[tuple[jex.Var, int, int]]:
    """Yields each variable, with the node that makes it and the last that takes it."""
    last: dict[jex.Var, int] = {}
    for k, node in enumerate(nodes):
        last |= dict.fromkeys(node.reads, k)
    for k, node in enumerate(nodes):
        for v in step.defines(node.position):
            yield v, k, last.get(v, k)


def _is_fused(e: jex.JaxprEqn) -> bool:
    """Returns whether a compiler computes an equation where its result is taken."""
    known = facts(e)
    return not of_equation(e) and bool(
        is_arithmetic(e) or known.layout or known.hands_on or known.summed_by
    )
