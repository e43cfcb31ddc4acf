"""What is alive at each equation of a step, estimated from its equations alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import Step, facts, flops_of, variables
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.rest import Outer


class Span(NamedTuple):
    """How long a variable is there.

    Attributes:
      var: The variable.
      made: The node that makes it.
      last: The last node that takes it, or the one that makes it.
      over: Whether that may write over it.
    """

    var: jex.Var
    made: int
    last: int
    over: bool = False


def passing(some: Iterable[Span], nodes: int) -> list[int]:
    """The bytes that are computed before each node, and taken by it or later.

    Args:
      some: How long each variable is there that counts.
      nodes: The number of nodes.
    """
    changes = [0] * (nodes + 2)
    for v, made, last, _ in some:
        if last > made:
            changes[made + 1] += memory.nbytes_on_each_device(v.aval)
            changes[last + 1] -= memory.nbytes_on_each_device(v.aval)
    return [*itertools.accumulate(changes)]


def spans(
    nodes: Sequence[Outer], counted: Set[jex.Var] | None = None
) -> Iterator[Span]:
    """Yields how long each variable is there.

    What is not counted is computed where it is taken, of what is.
    """
    last: dict[jex.Var, int] = {}
    for k in reversed(range(len(nodes))):
        made = nodes[k].defines
        until = k
        if counted is not None and counted.isdisjoint(made):
            until = max((last.get(v, k) for v in made), default=k)
        for v in nodes[k].reads:
            last[v] = max(last.get(v, k), until)
    for k, node in enumerate(nodes):
        for v in node.defines:
            if counted is None or v in counted:
                yield Span(v, k, last.get(v, k))


def kept(step: Step, nodes: Sequence[Outer]) -> set[jex.Var]:
    """The variables that a compiler has in memory, and fuses with no reader.

    These are what products make and take, sums, and whatever is taken after a later
    product; but for what only lays out another one, and for what is made, without
    products, of what is there as long anyway.
    """
    equations = step.program.equations
    opaque = [not _is_fused(equations[node.position]) for node in nodes]
    before = [0, *itertools.accumulate(opaque)]
    of_products = {
        v
        for node, is_product in zip(nodes, opaque, strict=True)
        if is_product
        for v in (*node.reads, *node.defines)
    }
    summed = (x for x in nodes if facts(equations[x.position]).summed_by)
    sums = {v for node in summed for v in node.defines}
    found = {
        v
        for v, made, last, _ in spans(nodes)
        if (v in of_products or before[last] > before[made + 1] or v in sums)
        and not _only_laid_out(equations[nodes[made].position])
    }
    until = {span.var: span.last for span in spans(nodes, found)}
    for v, last in until.items():
        if v not in of_products and v not in sums:
            found.remove(v)
            made_of = step.program.made_of([v], lambda _, x: x not in found)
            if any(until.get(x, last) < last for x in made_of.takes):
                found.add(v)
    return found


def in_memory(step: Step, nodes: Sequence[Outer]) -> Iterator[Span]:
    """Yields how long each variable is there that is in memory.

    Arithmetic is written over an operand of its size that nothing takes later, unless
    a loop takes that.
    """
    there = kept(step, nodes)
    sizes = {v: memory.nbytes_on_each_device(v.aval) for v in there}
    written: set[int] = set()
    for span in spans(nodes, there):
        last = nodes[span.last]
        over = (sizes.get(v) for v in last.defines)
        may_be = span.last > span.made and span.last not in written
        if (
            may_be
            and sizes[span.var] in over
            and _is_fused(step.program.equations[last.position])
        ):
            written.add(span.last)
            span = span._replace(over=True)
        yield span


def _only_laid_out(e: jex.JaxprEqn) -> bool:
    return facts(e).layout and facts(e).again and len(variables(e.invars)) == 1


def _is_fused(e: jex.JaxprEqn) -> bool:
    """Returns whether a result is computed where it is taken, or over an operand."""
    known = facts(e)
    may_be = (
        is_arithmetic(e)
        or known.layout
        or known.in_place
        or known.hands_on
        or known.summed_by
    )
    return bool(may_be) and not flops_of(e)
