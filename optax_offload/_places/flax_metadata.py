"""Sharding metadata of Flax's boxes and variables, without needing Flax.

A tree holds Flax's classes only where Flax was imported, so they are looked up among
the modules that are there.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from optax_offload._ground import trees
from optax_offload._places import memory

# Pairs of a logical axis and the mesh axis, or axes, or None, that it is sharded over.
AxisRules = Sequence[tuple[str, str | tuple[str, ...] | None]]


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Sharding metadata of a box or variable.

    Attributes:
      spec: Mesh axes or logical axes for each axis of the value, or a whole sharding.
      mesh: The mesh that the metadata names, or None.
      rules: The rules for logical axes that the metadata names, or None.
    """

    spec: PartitionSpec | Sharding
    mesh: Any = None
    rules: AxisRules | None = None


def is_box_of_one(x: Any) -> bool:
    """Returns whether a node is a box of one leaf, which has one sharding."""
    return trees.is_linen_box(x) and len(jax.tree.leaves(x)) == 1


def of_leaves(tree: Any) -> list[Metadata | None]:
    """The metadata of the box or variable around each leaf of a tree."""
    nodes = jax.tree.leaves(
        tree, is_leaf=lambda x: trees.is_linen_box(x) or trees.is_nnx_variable(x)
    )
    return [said for x in nodes for said in [of_node(x)] * len(jax.tree.leaves(x))]


def of_node(x: Any) -> Metadata | None:
    """Returns the metadata of a box or variable; None if there is none."""
    if trees.is_linen_box(x) and hasattr(x, "get_partition_spec"):
        rules = getattr(x, "rules", None)
        return Metadata(x.get_partition_spec(), getattr(x, "mesh", None), rules)
    if trees.is_nnx_variable(x):
        said = x.get_metadata()
        spec = said.get("out_sharding")
        if isinstance(spec, (tuple, list)):
            spec = PartitionSpec(*spec)
        if isinstance(spec, (PartitionSpec, Sharding)):
            return Metadata(spec, said.get("mesh"), said.get("sharding_rules"))
    return None


def mesh_axes(
    spec: PartitionSpec, mesh: Any, rules: AxisRules | None
) -> PartitionSpec | None:
    """The spec with logical axes replaced by mesh axes, None if that is not known.

    Rules are those given or those of ``nn.logical_axis_rules``, and are applied as Flax
    applies them: the first that fits decides, no mesh axis is used twice, and a logical
    axis without a rule is not sharded. Names of mesh axes stay.
    """
    if not rules:
        context = sys.modules.get("flax.core.spmd")
        rules = context.get_logical_axis_rules() if context is not None else ()
    if rules:
        from flax.linen import spmd

        themselves = [(axis, axis) for axis in mesh.axis_names]
        logical = tuple(spec)
        spec = spmd.logical_to_mesh_axes(logical, [*rules, *themselves]) or spec
    return spec if memory.axes_of(spec) <= set(mesh.axis_names) else None
