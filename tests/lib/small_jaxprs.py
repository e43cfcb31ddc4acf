"""Small jaxprs and programs, and what direct tests of the engine ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import Program, flatten

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_device(*shape: int, dtype: Any = jnp.float32) -> Any:
    """The type of an array on the device."""
    return jax.typeof(jax.ShapeDtypeStruct(shape, dtype))


def on_host(*shape: int, dtype: Any = jnp.float32) -> Any:
    """The type of an array that rests on the host."""
    return memory.host_type(on_device(*shape, dtype=dtype))


def load(x: Any) -> Any:
    """Moves a traced value to the device."""
    return jax.device_put(x, DEVICE)


def store(x: Any) -> Any:
    """Moves a traced value to the host."""
    return jax.device_put(x, HOST)


def closed_of(fn: Callable[..., Any], *types: Any) -> jex.ClosedJaxpr:
    """The jaxpr of a function of such arguments."""
    return jax.make_jaxpr(fn)(*types)


def program_of(fn: Callable[..., Any], *types: Any) -> Program:
    """The program of a function of such arguments."""
    return flatten(closed_of(fn, *types))


def names(equations: Iterable[jex.JaxprEqn]) -> list[str]:
    """The primitives of equations."""
    return [e.primitive.name for e in equations]


def only(equations: Iterable[jex.JaxprEqn], name: str) -> jex.JaxprEqn:
    """The only equation of a primitive."""
    (e,) = (e for e in equations if e.primitive.name == name)
    return e


def values(
    equations: Sequence[jex.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    args: Sequence[Any],
    constants: dict[Any, Any] | None = None,
) -> list[Any]:
    """The values that equations give their results, for such arguments."""
    constants = constants or {}
    info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()
    jaxpr = jex.Jaxpr(
        [*constants], [*invars], [*outvars], [*equations], debug_info=info
    )
    return jax.core.eval_jaxpr(jaxpr, [*constants.values()], *args)


def run(program: Program, *args: Any) -> list[Any]:
    """The results of a program."""
    return values(
        program.equations, program.invars, program.outvars, args, program.constants
    )
