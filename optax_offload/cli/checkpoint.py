"""The leaves of an Orbax checkpoint, read from its metadata: no array is loaded.

Orbax (0.12) records no memory kind (F49): a leaf is restored to where a template says.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from optax_offload._ground import trees


class SavedLeaf(NamedTuple):
    """A leaf of a checkpoint.

    Attributes:
      path: The path in the saved tree, as in `opt_state/0/mu/w`, without the key that
        Flax's boxes add to it (``value``): as rules see it.
      shape: The shape of the whole array.
      dtype: The name of the dtype.
      nbytes: The bytes of the whole array.
      sharding: The sharding that the array had when it was saved.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharding: str


def leaves(path: str | os.PathLike[str]) -> list[SavedLeaf]:
    """Reads the leaves of a checkpoint.

    Args:
      path: A tree that Orbax saved, a step that has one, or a folder of steps, of which
        the last counts.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: the checkpoint is damaged.
      ImportError: Orbax is not installed.
    """
    found = trees.leaves_with_paths(_metadata(_item(pathlib.Path(path).absolute())))
    paths = _without_boxes([p for p, _ in found])
    arrays = zip(paths, (x for _, x in found), strict=True)
    return [_saved(p, x) for p, x in arrays if hasattr(x, "shape")]


def under(leaves: Sequence[SavedLeaf], prefix: str) -> list[tuple[str, int | None]]:
    """The leaves under a path, as paths from there on, and their bytes.

    Args:
      leaves: The leaves of a checkpoint.
      prefix: The path, as ``opt_state/1``; all leaves are under an empty one.

    Raises:
      ValueError: no leaf is under the path.
    """
    prefix = prefix.strip("/")
    start = f"{prefix}/" if prefix else ""
    found = [(x.path.removeprefix(start), x.nbytes) for x in leaves]
    found = [f for f, x in zip(found, leaves, strict=True) if x.path.startswith(start)]
    if not found:
        tops = sorted({"/".join(x.path.split("/")[:2]) for x in leaves})
        raise ValueError(
            f"the checkpoint has nothing under {prefix!r}; it has {', '.join(tops)}"
        )
    return [*found]


def _item(path: pathlib.Path) -> pathlib.Path:
    steps = sorted(
        (p for p in path.glob("*") if p.is_dir() and p.name.isdigit()),
        key=lambda p: int(p.name),
    )
    step = [path, *steps[-1:]]
    for folder in step[::-1]:
        found = [folder, *sorted(p for p in folder.glob("*") if p.is_dir())]
        items = [p for p in found if (p / "_METADATA").exists()]
        if items:
            return items[0]
    raise FileNotFoundError(
        f"{path} is not an Orbax checkpoint: no _METADATA found in it, in a folder of "
        "it or in its last step"
    )


def _metadata(item: pathlib.Path) -> Any:
    """The tree of a checkpoint, with Orbax's metadata for each leaf."""
    from orbax import checkpoint as ocp

    file = item / "_METADATA"
    damaged = f"{file} is damaged"
    again = "Name another step, or copy the checkpoint again"
    # Orbax logs most of what is wrong, and returns a tree of nothing.
    try:
        said = json.loads(file.read_bytes())
    except ValueError as e:
        raise ValueError(f"{damaged}: it is not JSON ({e}). {again}") from e
    if not isinstance(said, dict) or not isinstance(said.get("tree_metadata"), dict):
        raise ValueError(f"{damaged}: it has no table 'tree_metadata'. {again}")
    try:
        tree = ocp.PyTreeCheckpointer().metadata(item)
    except Exception as e:
        what = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ValueError(f"{damaged}: Orbax cannot read it ({what}). {again}") from e
    for name in ("item_metadata", "tree"):
        tree = getattr(tree, name, tree)
    if not jax.tree.leaves(tree):
        raise ValueError(
            f"{item} is damaged: {file.name} lists {len(said['tree_metadata'])} "
            f"leaves, but Orbax can read none of them. {again}"
        )
    return tree


def _without_boxes(paths: Sequence[str]) -> list[str]:
    """The paths that rules see. What stands alone under ``value`` was in a box."""
    below = collections.Counter(
        "/".join(parts[:i])
        for parts in (path.split("/") for path in paths)
        for i in range(1, len(parts))
    )
    split = [(path, *path.rpartition("/")) for path in paths]
    return [
        head if name == "value" and below[head] == 1 else path
        for path, head, _, name in split
    ]


def _saved(path: str, x: Any) -> SavedLeaf:
    shape = tuple(x.shape or ())
    itemsize = x.dtype.itemsize if x.dtype is not None else 0
    spec = getattr(x.sharding, "partition_spec", None)
    sharding = "single device" if spec is None else f"P{tuple(spec)}"
    nbytes = math.prod(shape) * itemsize
    return SavedLeaf(path, shape, str(x.dtype), nbytes, sharding)
