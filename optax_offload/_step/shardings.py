"""Shardings given to a jit, with the memory kinds that its function gives."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from optax_offload._ground import trees
from optax_offload._ground.errors import warn
from optax_offload._places import memory


def with_kinds(prefix: Any, kinds: Any) -> Any:
    """The shardings in the memory kinds that values have, whatever kinds they name.

    A kind that is named cannot be told from one that is not:
    `NamedSharding(mesh, spec).memory_kind` is "device" on every mesh of devices.

    Args:
      prefix: what `jax.jit` takes as `in_shardings` or `out_shardings`: a tree prefix
        of shardings, formats (with layouts), partition specs (which become shardings
        on the mesh that is set), or None.
      kinds: a tree with the memory kind of each value.

    Returns:
      A tree prefix; longer than the given one where values below one entry of it are
      in different memories.
    """

    def below(entry: Any, subtree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(subtree)
        if all(_fits(entry, kind) for kind in leaves):
            return entry
        entries = [_with_kind(entry, kind) for kind in leaves]
        return jax.tree.unflatten(treedef, entries)

    return jax.tree.map(below, prefix, kinds, is_leaf=_is_none)


def fit(prefix: Any, kinds: Any) -> bool:
    """Returns whether the shardings name the memory kinds that values have, or none."""
    fits: list[bool] = []

    def below(entry: Any, subtree: Any) -> None:
        fits.extend(_fits(entry, kind) for kind in jax.tree.leaves(subtree))

    jax.tree.map(below, prefix, kinds, is_leaf=_is_none)
    return all(fits)


def asked_for_host(prefix: Any, kinds: Any) -> list[str]:
    """The paths of values on the device whose sharding names a host memory."""
    paths: list[str] = []

    def below(keys: Any, entry: Any, subtree: Any) -> None:
        paths.extend(
            trees.path_string((*keys, *more))
            for more, kind in trees.flatten_with_path(subtree)[0]
            if kind == "device" and not _fits(entry, kind)
        )

    trees.map_with_path(below, prefix, kinds, is_leaf=_is_none)
    return paths


def warn_of_host(given: Any, kinds: Any) -> None:
    """Warns of results on the device whose sharding names a host memory.

    Args:
      given: The `out_shardings` that were given.
      kinds: A tree with the memory kind of each result.
    """
    paths = asked_for_host(given, kinds)
    if paths:
        warn(
            "out_shardings name a host memory for results that the function left on "
            f"the device, where they stay: {trees.listed(paths)}. Move them in the "
            "function: jax.device_put(x, jax.memory.Space.Host)"
        )


def names_partition_specs(prefix: Any) -> bool:
    """Returns whether a mesh has to be set for the shardings to mean something."""
    return any(isinstance(x, PartitionSpec) for x in jax.tree.leaves(prefix))


def _is_none(x: Any) -> bool:
    return x is None


def _fits(entry: Any, kind: str) -> bool:
    if isinstance(entry, Format):
        return _fits(entry.sharding, kind)
    if isinstance(entry, PartitionSpec):
        return kind == "device"
    if not isinstance(entry, Sharding):
        return True
    # A type says only on which side a value is; which host kind is the sharding's say.
    return (memory.memory_kind_of(entry) == "device") == (kind == "device")


def _with_kind(entry: Any, kind: str) -> Any:
    if _fits(entry, kind):
        return entry
    if isinstance(entry, Format):
        return Format(entry.layout, _with_kind(entry.sharding, kind))
    if isinstance(entry, PartitionSpec):
        return NamedSharding(jax.sharding.get_mesh(), entry, memory_kind=kind)
    if kind == "device" and isinstance(getattr(entry, "mesh", None), AbstractMesh):
        # Which kind is the default one, an abstract mesh does not know.
        return entry.with_memory_kind(None)
    return entry.with_memory_kind(kind)
