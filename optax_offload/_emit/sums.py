"""Reductions over the rows of a gradient, summed up row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from optax_offload._emit.moves import as_typed, load_whole
from optax_offload._places import memory
from optax_offload._program import Program, bound, dtype, evaluated, facts, variables
from optax_offload._rows import Sum

_ADD = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def _by(e: jex.JaxprEqn) -> str:
    by = facts(e).summed_by
    assert by is not None
    return by


def identity(program: Program, s: Sum) -> Any:
    """Returns a reduction's neutral element, in the dtype of the running total."""
    e = _widened(program.equations[s.position])
    aval: Any = e.outvars[0].aval
    by = _by(e)
    value: Any = {"add": 0, "mul": 1, "and": -1, "or": 0}.get(by)
    if by in ("max", "min"):
        least = by == "max"
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            value = -jnp.inf if least else jnp.inf
        elif aval.dtype == jnp.bool_:
            value = not least
        else:
            info = jnp.iinfo(aval.dtype)
            value = info.min if least else info.max
    if aval.dtype == jnp.bool_:
        value = bool(value)
    return memory.full(aval, value)


def added(
    program: Program,
    s: Sum,
    total: Any,
    rows: Mapping[jex.Var, Any],
    env: Mapping[jex.Var, Any],
) -> Any:
    """A total with what a row adds to it.

    Args:
      program: The step.
      s: The reduction.
      total: The sum of the rows before.
      rows: The values of the row, each with an axis of one row.
      env: The values of variables without rows.
    """
    before = program.equations[s.position]
    e = _widened(before)
    free = bound(variables(e.invars), variables(before.invars))

    def value(inside: jex.Var) -> Any:
        v = free[inside]
        found = load_whole(rows[v] if v in rows else env[v])
        return lax.convert_element_type(found, dtype(inside))

    (part,) = evaluated([e], value, program.debug_info).values()
    return _ADD[_by(e)](total, part)


def finished(program: Program, s: Sum, total: Any) -> Any:
    """The result of a reduction, given the total of all rows."""
    aval: Any = program.equations[s.position].outvars[0].aval
    total = lax.convert_element_type(total, aval.dtype)
    return as_typed(total, aval)


def _widened(e: jex.JaxprEqn) -> jex.JaxprEqn:
    """The equation as it adds to a total in float32, where its own dtype is narrower.

    XLA accumulates a sum over all rows in float32 too. In bfloat16 a total of ones
    would stay at 256.
    """
    aval: Any = e.outvars[0].aval
    if (
        _by(e) not in ("add", "mul")
        or not jnp.issubdtype(aval.dtype, jnp.floating)
        or jnp.finfo(aval.dtype).bits >= 32
    ):
        return e

    def wide(a: Any) -> jex.Var:
        return jex.Var(a.aval.update(dtype=np.dtype(np.float32)))

    outvars = [wide(v) for v in e.outvars]
    if e.primitive.name == "dot_general":
        wider = {"preferred_element_type": np.dtype(np.float32)}
        return e.replace(outvars=outvars, params=e.params | wider)
    return e.replace(outvars=outvars, invars=[wide(a) for a in e.invars])
