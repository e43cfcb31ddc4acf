"""Reductions over the rows of a gradient, summed up row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._backward.rows import SUMMED_BY, Sum
from optax_offload._jaxpr import Flat, variables

_ADD = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def identity(flat: Flat, s: Sum) -> Any:
    """What a reduction of nothing is."""
    e = flat.equations[s.position]
    aval: Any = e.outvars[0].aval
    by = SUMMED_BY[e.primitive.name]
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
    return jnp.full(aval.shape, value, aval.dtype)


def added(
    flat: Flat,
    s: Sum,
    total: Any,
    rows: Mapping[jex.Var, Any],
    env: Mapping[jex.Var, Any],
) -> Any:
    """A total with what a row adds to it.

    Args:
      flat: The step.
      s: The reduction.
      total: What the rows before add up to.
      rows: The values of the row, each with an axis of one row.
      env: The values of what has no rows.
    """
    e = flat.equations[s.position]
    free = list(dict.fromkeys(variables(e.invars)))
    one = jex.Jaxpr((), free, e.outvars, [e], debug_info=flat.debug_info)
    values = [rows[v] if v in rows else env[v] for v in free]
    (part,) = jax.core.eval_jaxpr(one, (), *values)
    return _ADD[SUMMED_BY[e.primitive.name]](total, part)
