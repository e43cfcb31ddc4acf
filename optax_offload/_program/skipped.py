"""An update that a branch skips, as one that is made in any case, and a choice.

A step that keeps what it had where a loss is not finite often has its update alone in a
`lax.cond`, with gradients that are made outside of it. There they have to exist whole.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program.bodies import of_platforms
from optax_offload._program.build import Builder, flatten
from optax_offload._program.call import called
from optax_offload._program.flops import flops_of
from optax_offload._program.graph import (
    Program,
    dtype,
    needed,
    shape,
    variables,
    within,
)


def made_and_chosen(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr | None:
    """A step whose updates are made in any case, and then chosen or not.

    Args:
      closed: The step, all of whose values are on the device by their types.

    Returns:
      The step; None if none of its updates is alone in a branch that its loss or its
      gradients decide on. What a count decides on, as that of accumulated gradients,
      is mostly skipped: it stays in its branch, and moves nothing in such a step.
    """
    # Also in a jit, which is taken apart below.
    inside = (x for e in closed.jaxpr.eqns for x in (e, *within(e)))
    if not any(x.primitive.name == "cond" for x in inside):
        return None
    program = flatten(closed)
    builder, found = Builder(program.constants), False
    for e in program.equations:
        if not _skips(program, e):
            builder.add(e)
            continue
        found = True
        index, *operands = builder.read_all(e.invars)
        count = len(e.outvars)
        cases = [
            a
            for branch in e.params["branches"]
            for a in builder.inline(branch, operands)
        ]

        def chosen(index: Any, *values: Any, count: int = count) -> Any:
            first, second = (lambda *x: x[:count]), (lambda *x: x[count:])
            return lax.switch(index, [first, second], *values)

        builder.rename(e.outvars, builder.trace(chosen, index, *cases))
    return builder.program(program).closed(closed) if found else None


def _skips(program: Program, e: jex.JaxprEqn) -> bool:
    """Whether an equation is such a conditional: one branch updates, one keeps."""
    if e.primitive.name != "cond" or of_platforms(e) or compat.has_effects(e):
        return False
    if not any(map(called, within(e))):
        return False
    branches = [flatten(branch) for branch in e.params["branches"]]
    updates = [any(map(called, branch.equations)) for branch in branches]
    if sorted(updates) != [False, True]:
        return False
    keeps, other = sorted(branches, key=lambda x: any(map(called, x.equations)))
    return (
        _keeps(keeps)
        and not any(map(_computes, other.equations))
        and _decided_by_values(program, e)
    )


def _keeps(branch: Program) -> bool:
    """Whether it returns what it is given, and makes scalars at most, as a count."""
    arrays = (v for v in variables(branch.outvars) if shape(v))
    return {*arrays}.issubset(branch.invars)


def _computes(e: jex.JaxprEqn) -> bool:
    """Whether it computes more than an update does around its optimizer."""
    loops = e.primitive.name in ("scan", "while")
    return called(e) is None and (loops or flops_of(e) > 0)


def _decided_by_values(program: Program, e: jex.JaxprEqn) -> bool:
    """Whether which branch is taken depends on numbers, and not on counts alone."""
    equations = program.equations
    wanted = {*variables(e.invars[:1])}
    positions = needed(equations[: equations.index(e)], wanted)
    taken = wanted.union(*(variables(equations[i].invars) for i in positions))
    return any(
        jnp.issubdtype(dtype(v), jnp.inexact)
        for v in taken.intersection(program.invars)
    )
