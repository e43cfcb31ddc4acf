"""Equations of `jax.shard_map` around what rests on the host.

JAX takes values in host memory into a `shard_map`: a scan in it then loads rows of the
shard that its device has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.lowered import Spread, spread_as


def around(
    fn: Callable[..., Sequence[Any]], e: jex.JaxprEqn, values: Sequence[Any]
) -> Sequence[Any]:
    """The results of an equation of `jax.shard_map` with another body.

    Args:
      fn: The body, a function of the shards of the values.
      e: The equation.
      values: The values that it takes, each where it rests.
    """
    mapped = jax.shard_map(
        lambda *shards: tuple(fn(*shards)),
        mesh=e.params["mesh"],
        in_specs=e.params["in_specs"],
        out_specs=e.params["out_specs"],
        axis_names=e.params["newly_manual_axes"],
        check_vma=e.params["check_vma"],
    )
    return mapped(*values)


def spread(e: jex.JaxprEqn) -> Sequence[Spread | None]:
    """The spread that an equation wants of each operand, where no type says it.

    None of other equations than `jax.shard_map`, and of those over axes of a mesh in
    Explicit mode: there JAX checks it.
    """
    if e.primitive.name != "shard_map":
        return [None] * len(e.invars)
    mesh, axes = e.params["mesh"], e.params["newly_manual_axes"]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    known = any(types[name] != AxisType.Auto for name in axes)
    return [
        None if known else Spread(NamedSharding(mesh, spec), axes)
        for spec in e.params["in_specs"]
    ]


def spread_as_wanted(
    values: Sequence[Any], wanted: Mapping[int, Spread]
) -> dict[int, Any]:
    """Arguments of a step that rest, spread as equations want them, by position.

    Of others the program does not know how they are spread.
    """
    if not compat.tracing_for_jit_alone():
        return {}
    return {
        i: spread_as(values[i], x)
        for i, x in wanted.items()
        if isinstance(values[i], jax.core.Tracer) and memory.on_host(values[i])
    }


def shards_alike(e: jex.JaxprEqn, operand: int, result: int) -> bool:
    """Returns whether a result has its shards where an operand has them.

    So it is with all of other equations than `jax.shard_map`.
    """
    if e.primitive.name != "shard_map":
        return True
    return e.params["in_specs"][operand] == e.params["out_specs"][result]
