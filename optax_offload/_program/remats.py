"""Equations of `jax.checkpoint`, which are taken apart where a step is cut."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from optax_offload._program.build import Builder, flatten
from optax_offload._program.graph import (
    Atom,
    Program,
    bound,
    variables,
    whole_and_rows,
    within,
)


def is_checkpoint(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation is of `jax.checkpoint`."""
    return e.primitive.name == "remat2"


def has_scan(e: jex.JaxprEqn) -> bool:
    """Returns whether there is a scan in an equation's bodies."""
    return any(inner.primitive.name == "scan" for inner in within(e))


def opened(
    e: jex.JaxprEqn, operands: Sequence[Atom], loaded: Container[Atom] = ()
) -> Program:
    """Takes an equation of `jax.checkpoint` apart, into what JAX lowers it to.

    The body is behind a barrier, which keeps a compiler from joining it with the first
    time that the same is computed.

    Operands of which scans alone take a row in each iteration, as parameters of layers,
    go around the barrier: there is nothing to join, and behind it they would be copies
    beside the buffer that is written in their place.

    Args:
      e: The equation.
      operands: The atoms that it takes.
      loaded: Others that go around the barrier, as each is loaded where it is taken.
    """
    program = flatten(jex.ClosedJaxpr(e.params["jaxpr"], ()))
    taken = [whole_and_rows(x) for x in program.equations]
    whole = {v for some, _ in taken for v in some} | set(variables(program.outvars))
    rows = {v for _, some in taken for v in some} - whole
    asked = e.params["prevent_cse"]
    asked = (asked,) * len(operands) if isinstance(asked, bool) else asked
    held = [
        i
        for i, (v, a, kept) in enumerate(
            zip(program.invars, operands, asked, strict=True)
        )
        if e.params["differentiated"]
        and kept
        and isinstance(a, jex.Var)
        and a not in loaded
        and v not in rows
    ]
    builder = Builder(program.constants)
    builder.rename(program.invars, operands)
    if held:
        behind = builder.trace(
            lambda *x: lax.optimization_barrier(x), *(operands[i] for i in held)
        )
        builder.rename([program.invars[i] for i in held], behind)
    for x in program.equations:
        builder.add(x)
    return builder.program(program)


def around(
    fn: Callable[..., Sequence[Any]], e: jex.JaxprEqn, values: Sequence[Any]
) -> Sequence[Any]:
    """The results of an equation of `jax.checkpoint` with another body.

    Args:
      fn: The body, a function of the values.
      e: The equation.
      values: The values that it takes, each where it rests. One that is computed row by
        row is computed in the body.
    """
    leaves, tree = jax.tree.flatten(list(values))
    # Each once: several are computed from the same rows.
    operands = {id(x): x for x in leaves}

    def body(*given: Any) -> Sequence[Any]:
        inside = bound(operands, given)
        return fn(*tree.unflatten([inside[id(x)] for x in leaves]))

    found = jax.make_jaxpr(body)(*operands.values())
    jaxpr = jex.Jaxpr(
        constvars=(),
        invars=[*found.jaxpr.constvars, *found.jaxpr.invars],
        outvars=found.jaxpr.outvars,
        eqns=found.jaxpr.eqns,
        effects=found.jaxpr.effects,
        debug_info=e.params["jaxpr"].debug_info.with_unknown_names(),
    )
    params = {**e.params, "jaxpr": jaxpr}
    if isinstance(params["prevent_cse"], tuple):
        asked = dict.fromkeys(operands, False)
        for x, prevent in zip(values, params["prevent_cse"], strict=True):
            for leaf in map(id, jax.tree.leaves(x)):
                asked[leaf] |= prevent
        params["prevent_cse"] = (*(True for _ in found.consts), *asked.values())
    return e.primitive.bind(*found.consts, *operands.values(), **params)
