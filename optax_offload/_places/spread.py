"""Replicated leaves, spread over the devices that would each hold a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_offload._ground import trees
from optax_offload._places import memory

T = TypeVar("T")


def spread(tree: T, axes: str | Sequence[str]) -> T:
    """Shards the leaves of a tree over mesh axes over which they are replicated.

    State is sharded as the parameters that ``init`` is given. So
    ``tx.init(spread(params, "data"))``, of parameters that are replicated over the mesh
    axis ``"data"``, makes state of which each device has a part. In host memory that is
    one copy for all of these devices, in place of one for each, and each moves its part
    alone. The step takes the replicated parameters, as before. In Explicit mode
    `offload` gathers each slice of the state on the device. In Auto mode the compiler
    shards the update, and the step's jit needs ``out_shardings``, or it may return the
    parameters in parts too.

    A leaf is spread along the first axis that the devices divide, but not along the one
    that `offload` slices. A leaf without such an axis comes back as it is.

    Args:
      tree: A pytree of arrays, or of `jax.ShapeDtypeStruct`, on a mesh.
      axes: The name of a mesh axis, or several names.

    Returns:
      A tree of the same structure, each leaf in its memory.

    Raises:
      ValueError: A leaf is not on a mesh with these axes.
      TypeError: A leaf is traced, or is no array.

    Example:
      >>> import jax, jax.numpy as jnp, optax_offload as oo
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=auto)
      >>> replicated = jax.NamedSharding(mesh, jax.P())
      >>> w = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=replicated)
      >>> oo.spread({"w": w}, "data")["w"].sharding.shard_shape(w.shape)
      (32, 128)
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    leaves = trees.leaves_with_paths(tree)
    strangers = [
        path
        for path, x in leaves
        if memory.is_traced(x) or not isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    ]
    if strangers:
        raise TypeError(
            f"{trees.listed(strangers)}: traced, or no array. spread is for jax.Array "
            "and jax.ShapeDtypeStruct, outside of jax.jit"
        )
    elsewhere = [
        path
        for path, x in leaves
        if not isinstance(x.sharding, NamedSharding)
        or not set(names) <= set(x.sharding.mesh.axis_names)
    ]
    if elsewhere:
        raise ValueError(
            f"{trees.listed(elsewhere)}: not on a mesh with the axes {names}. Put "
            "them there first: jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))"
        )
    return jax.tree.unflatten(
        jax.tree.structure(tree), [_spread_leaf(x, names) for _, x in leaves]
    )


def _spread_leaf(x: Any, axes: Sequence[str]) -> Any:
    sharding = x.sharding
    free = [name for name in axes if name not in memory.axes_of(sharding.spec)]
    count = math.prod(sharding.mesh.shape[name] for name in free)
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    fitting = [
        i
        for i in _axes_not_sliced(sharding.mesh, x.ndim)
        if spec[i] is None and x.shape[i] and x.shape[i] % count == 0
    ]
    if count == 1 or not fitting:
        return x
    spec[fitting[0]] = free[0] if len(free) == 1 else tuple(free)
    to = sharding.update(spec=PartitionSpec(*spec))
    if isinstance(x, jax.ShapeDtypeStruct):
        return memory.struct(x, to)
    return jax.device_put(x, to)


def _axes_not_sliced(mesh: Any, ndim: int) -> range:
    """The axes of a leaf but for that along which it is sliced on a mesh.

    That is the first of three or more, and in Explicit mode of two.
    """
    explicit = AxisType.Explicit in mesh.axis_types
    return range(int(ndim >= 3 or (explicit and ndim == 2)), ndim)
