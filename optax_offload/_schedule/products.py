"""The products of a turn, that transfers are hidden behind, and what it stores."""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import Program, facts, flops_of, variables
from optax_offload._schedule.placing import independent
from optax_offload._schedule.segments import Move, Product, Segment, nbytes

# A device multiplies so much in the time in which it writes a byte.
FLOPS_PER_BYTE = 64
# What is less is moved at any time.
LEAST_TIED_BYTES = 2**18


def products(program: Program, s: Segment) -> list[Product]:
    """The products of a segment, with what they take that is computed.

    In it, or before: nothing else would keep what a layer computes again from being
    computed for all layers of a segment first.
    """
    equations = program.equations
    found: list[Product] = []
    given = {*program.invars, *program.constants, *s.names}
    # The products that a variable needs, and those that were waited for.
    needs: dict[jex.Var, set[int]] = {}
    waited: set[int] = set()
    for i in s.positions:
        e = equations[i]
        work = flops_of(e)
        for v in variables(e.invars) if work else ():
            if v not in given:
                needs.setdefault(v, set())
        taken = [v for v in variables(e.invars) if v in needs]
        need = {n for v in taken for n in needs[v]}
        if work and taken:
            operand = max(taken, key=lambda v: len(needs[v]))
            others = [n for n in range(len(found)) if n not in needs[operand] | waited]
            before = (v for n in others for v in equations[found[n].position].outvars)
            waited |= needs[operand].union(others)
            need.add(len(found))
            found.append(Product(i, operand, work, tuple(before)))
        elif found and not facts(e).again:
            work = FLOPS_PER_BYTE * nbytes(e.outvars)
            found[-1] = found[-1]._replace(work=found[-1].work + work)
        needs |= dict.fromkeys(e.outvars, need)
    return found


def stores(s: Segment) -> Iterable[list[Move]]:
    """What each update of a segment stores, with the gradients that it is made of."""
    for left in (node.left for node in s.updates if node.left):
        for each in independent(left.update):
            taken = variables(left.operands[i] for i in each.inputs)
            gradients = tuple(v for v in taken if v not in s.names)
            made = (left.results[k] for k in each.outputs)
            moves = [Move(v, nbytes([v])) for v in made if memory.on_host(v.aval)]
            moves = [move for move in moves if move.nbytes >= LEAST_TIED_BYTES]
            yield [x._replace(gradients=gradients) for x in moves[:1]] + moves[1:]
