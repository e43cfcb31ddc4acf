"""The shardings that a trainer has, with the memory kinds that `offload` gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from optax_offload._ground import trees
from optax_offload._places import flax_metadata, templates


def state_shardings(
    fn: Callable[..., Any],
    *args: Any,
    shardings: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_rules: flax_metadata.AxisRules | None = None,
) -> Any:
    """Adds the memory kinds that `offload` gives to a trainer's shardings.

    JAX moves results to where ``out_shardings`` say, and shardings that were made
    without `offload` move all of its state back to the device. Use the result as
    ``in_shardings`` and ``out_shardings`` of `jax.jit`, in `jax.device_put` and
    `place`, and in templates of checkpoint libraries. ``fn`` is traced and never run.
    The memory kinds are those of its results: ``"pinned_host"`` for leaves that a rule
    of `offload` moves to the host, ``"device"`` for all others, such as leaves smaller
    than the rule's ``min_bytes``. Kinds that the given shardings name do not count.

    A leaf gets its sharding from the first of these that has one:

    - ``shardings``;
    - the Flax box or variable around it, if a mesh is known and the spec fits the
      leaf's shape;
    - as in `eval_shape`, the argument, or the leaf given, whose path ends alike; else
      it is replicated.

    Args:
      fn: The function that makes the state: the ``init`` of an optimizer, or one that
        makes a whole ``TrainState``.
      *args: Its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
      shardings: The trainer's shardings: a tree like the result, or a prefix of it, of
        shardings, of `PartitionSpec`, of Flax boxes around either, or of arrays and
        structs that have a sharding. None where the library decides.
      mesh: The mesh of specs and metadata. None takes that of `jax.set_mesh`.
      axis_rules: Pairs of a logical axis and a mesh axis (or several, or None), as
        ``nn.logical_axis_rules`` takes them. None takes those that are set there.

    Returns:
      A tree of shardings like the result of ``fn``. A Flax Linen box of one leaf is
      one sharding, as in ``nn.get_sharding``, which fits boxed and unboxed states.

    Raises:
      ValueError: ``shardings`` is no prefix of the result, no mesh is known for a
        `PartitionSpec`, or an axis is neither in the mesh nor in a rule.
      TypeError: ``shardings`` has a leaf of another type, or ``mesh`` is no mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> params = {"w": jnp.ones((256, 128)), "b": jnp.ones(128)}
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> places = oo.state_shardings(tx.init, params, shardings=jax.P(), mesh=mesh)
      >>> places[0].mu["w"].memory_kind, places[0].mu["b"].memory_kind
      ('pinned_host', 'device')
    """
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"mesh is {mesh!r}; it must be a jax.sharding.Mesh or AbstractMesh"
        )
    result = templates.trace(fn, args)
    given = templates.spread("shardings", shardings, result, is_leaf=trees.is_linen_box)
    said = [_said(x) for x in given]
    _check_types(given, said, result)
    asked = _on_mesh(said, result, mesh, axis_rules)
    metadata = [
        m if m is not None and s is None and _mesh_of(m, mesh) is not None else None
        for m, s in zip(flax_metadata.of_leaves(result.shapes), asked, strict=True)
    ]
    fitting = [
        _fitting(s, aval)
        for s, aval in zip(
            _on_mesh(metadata, result, mesh, axis_rules), result.types, strict=True
        )
    ]
    chosen = templates.choose(
        result,
        [s or m for s, m in zip(asked, fitting, strict=True)],
        args,
        None if mesh is None else NamedSharding(mesh, PartitionSpec()),
    )
    # Every node is one leaf, or a box of one.
    structure = jax.tree.structure(result.shapes, is_leaf=flax_metadata.is_box_of_one)
    return jax.tree.unflatten(structure, chosen)


def _said(x: Any) -> flax_metadata.Metadata | None:
    """Returns the sharding that a leaf of ``shardings`` gives; None for none."""
    if trees.is_linen_box(x):
        inside = [_said(leaf) for leaf in jax.tree.leaves(x)]
        whole = inside[0] if len(inside) == 1 else None
        return whole or flax_metadata.of_node(x)
    if isinstance(x, (Sharding, PartitionSpec)):
        return flax_metadata.Metadata(x)
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, Sharding):
        return flax_metadata.Metadata(sharding)
    return None


def _check_types(
    given: Sequence[Any],
    said: Sequence[flax_metadata.Metadata | None],
    result: templates.Result,
) -> None:
    strangers = [
        f"{path!r} ({type(x).__name__})"
        for path, x, s in zip(result.paths, given, said, strict=True)
        if s is None and not (x is None or isinstance(x, jax.ShapeDtypeStruct))
    ]
    if strangers:
        raise TypeError(
            "shardings has leaves that are not shardings: "
            + ", ".join(strangers)
            + ". Allowed are a jax.sharding.Sharding, a jax.P, a Flax box around one, "
            "an array or struct, and None, where the library decides"
        )


def _mesh_of(said: flax_metadata.Metadata, mesh: Any) -> Any:
    """The mesh that a spec is for: as asked, as it says itself, or as is set."""
    if mesh is not None:
        return mesh
    if said.mesh is not None:
        return said.mesh
    ambient = jax.sharding.get_mesh()
    return None if ambient.empty else ambient


def _on_mesh(
    said: Sequence[flax_metadata.Metadata | None],
    result: templates.Result,
    mesh: Any,
    axis_rules: flax_metadata.AxisRules | None,
) -> list[Sharding | None]:
    """Returns the sharding of each leaf, or raises an error that names all leaves."""
    shardings: list[Sharding | None] = []
    without_mesh: list[str] = []
    unknown: list[str] = []
    for path, x in zip(result.paths, said, strict=True):
        sharding = None
        asked = None if x is None else x.spec
        if isinstance(asked, Sharding):
            sharding = asked
        elif x is not None and asked is not None:
            of_leaf = _mesh_of(x, mesh)
            rules = axis_rules or x.rules
            spec = of_leaf and flax_metadata.mesh_axes(asked, of_leaf, rules)
            if of_leaf is None:
                without_mesh.append(path)
            elif spec is None:
                unknown.append(f"{path!r} ({asked}; the mesh has {of_leaf.axis_names})")
            else:
                sharding = NamedSharding(of_leaf, spec)
        shardings.append(sharding)
    if without_mesh:
        raise ValueError(
            "shardings has a PartitionSpec and no mesh is known, for "
            f"{', '.join(map(repr, without_mesh))}. Give mesh=mesh, or call it within "
            "jax.set_mesh(mesh)"
        )
    if unknown:
        raise ValueError(
            f"axes that the mesh does not have: {', '.join(unknown)}. If they are "
            'logical axes, give axis_rules=[("embed", "data"), ...] or call it within '
            "nn.logical_axis_rules(...)"
        )
    return shardings


def _fitting(sharding: Sharding | None, aval: Any) -> Sharding | None:
    """The sharding that metadata names, unless it does not fit the leaf.

    Adafactor's rows and columns come in the boxes of the kernels they are of, and have
    other shapes.
    """
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > aval.ndim:
        return None
    try:
        sharding.shard_shape(aval.shape)
    except ValueError:  # It does not divide.
        return None
    return sharding
