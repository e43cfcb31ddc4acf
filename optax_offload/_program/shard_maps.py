"""Equations of `jax.shard_map` around what rests on the host.

JAX takes values in host memory into a `shard_map`: a scan in it then loads rows of the
shard that its device has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding

from optax_offload import _memory
from optax_offload._lowered import sharded_as


def around(
    fn: Callable[..., Sequence[Any]], e: jex.JaxprEqn, values: Sequence[Any]
) -> Sequence[Any]:
    """The results of an equation of `jax.shard_map` with another body.

    Args:
      fn: The body, a function of the shards of the values.
      e: The equation.
      values: The values that it takes, each where it rests.
    """
    params = e.params
    mesh, specs, axes = (params[k] for k in ("mesh", "in_specs", "newly_manual_axes"))
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    unknown = all(types[name] == AxisType.Auto for name in axes)
    with e.ctx.manager:
        given = [
            sharded_as(x, NamedSharding(mesh, spec), axes)
            if unknown and _memory.on_host(x)
            else x
            for x, spec in zip(values, specs, strict=True)
        ]
        mapped = jax.shard_map(
            lambda *shards: tuple(fn(*shards)),
            mesh=mesh,
            in_specs=specs,
            out_specs=params["out_specs"],
            axis_names=axes,
            check_vma=params["check_vma"],
        )
        return mapped(*given)
