"""Equations that JAX evaluates and transforms as what they mean.

What they are lowered to is another matter: their transfers are written then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import ad, batching

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.graph import bound

# The results of an equation, given its operands and parameters.
Meaning: TypeAlias = Callable[..., list[Any]]


def primitive(name: str) -> jex.Primitive:
    """A primitive of equations whose parameter ``jaxpr`` says what they mean."""
    made = jex.Primitive(name)
    made.multiple_results = True
    # The jaxpr may have primitives that JAX lowers when it binds them, with
    # `jax_remat3` and `jax_custom_vjp3`: that is when such an equation is lowered.
    made.is_high = lambda *_, **__: False
    made.def_effectful_abstract_eval(_types)
    transform_as(made, plain)
    return made


def plain(*data: Any, jaxpr: jex.ClosedJaxpr, **_: Any) -> list[Any]:
    """The results of an equation that has what it means."""
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *data)


def _types(*_: Any, jaxpr: jex.ClosedJaxpr, **__: Any) -> Any:
    return jaxpr.out_avals, jaxpr.jaxpr.effects


def _run_now(primitive: jex.Primitive, meaning: Meaning) -> Meaning:
    """The rule that evaluates an equation outside of `jax.jit`: compiled, as a whole.

    Its own equations run one by one where jit is disabled, where JAX calls a function
    again to say which equation makes a NaN (`jax_debug_nans`), and where all is on the
    device.

    Args:
      primitive: The primitive of the equation.
      meaning: What it means, given its operands and parameters.
    """

    def now(*data: Any, **params: Any) -> list[Any]:
        def once(*data: Any) -> list[Any]:
            compiled = memory.is_traced(data) and not memory.as_on_device.value
            return (primitive.bind if compiled else meaning)(*data, **params)

        return jax.jit(once)(*data)

    return now


def transform_as(primitive: jex.Primitive, meaning: Meaning) -> None:
    """Has JAX transform an equation as what it means.

    Args:
      primitive: The primitive of the equation.
      meaning: What it means, given its operands and parameters.
    """

    def closed(*types: Any, **params: Any) -> jex.ClosedJaxpr:
        return jax.make_jaxpr(functools.partial(meaning, **params))(*types)

    primitive.def_impl(_run_now(primitive, meaning))
    batching.primitive_batchers[primitive] = functools.partial(batched_as, meaning)
    ad.primitive_jvps[primitive] = functools.partial(jvp_as, meaning)
    compat.check_inside(primitive, closed)


def batched_as(
    meaning: Meaning, given: Sequence[Any], dims: Sequence[Any], **params: Any
) -> Any:
    """The results of an equation of arrays of operands, and their batch axes."""
    one = functools.partial(meaning, **params)
    results = jax.vmap(one, in_axes=tuple(dims))(*given)
    return results, [0] * len(results)


def jvp_as(
    meaning: Meaning, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> Any:
    """The results of an equation, and their tangents."""
    # No tangents are made of values that have none.
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of(*values: Any) -> list[Any]:
        moved = bound(moving, values)
        given = [moved.get(i, x) for i, x in enumerate(primals)]
        return meaning(*given, **params)

    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])
