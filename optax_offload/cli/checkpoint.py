"""The leaves of an Orbax checkpoint, read from its metadata: no array is loaded.

Orbax (0.12) records no memory kind (F49): a restored leaf goes where the template says.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from optax_offload import _trees


class SavedLeaf(NamedTuple):
    """A leaf of a checkpoint.

    Attributes:
      path: The path in the saved tree, as in `opt_state/0/mu/w`.
      shape: The shape of the whole array.
      dtype: The name of the dtype.
      nbytes: The bytes of the whole array.
      sharding: How the array was sharded when it was saved.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharding: str


def leaves(path: str | os.PathLike[str]) -> list[SavedLeaf]:
    """Reads the leaves of a checkpoint.

    Args:
      path: What Orbax saved as one tree, a step that has one, or a folder of steps, of
        which the last counts.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ImportError: Orbax is not installed.
    """
    from orbax import checkpoint as ocp

    item = _item(pathlib.Path(path).absolute())
    metadata = ocp.PyTreeCheckpointer().metadata(item)
    tree = metadata
    for name in ("item_metadata", "tree"):
        tree = getattr(tree, name, tree)
    found = [(p, x) for p, x in _trees.leaves_with_paths(tree) if hasattr(x, "shape")]
    return [_saved(p, x) for p, x in found]


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
            f"nothing is under {prefix!r} in the checkpoint; there is {', '.join(tops)}"
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
        f"{path}: no Orbax checkpoint: there is no _METADATA in it, in a folder of it, "
        "or in its last step"
    )


def _saved(path: str, x: Any) -> SavedLeaf:
    shape = tuple(x.shape or ())
    itemsize = x.dtype.itemsize if x.dtype is not None else 0
    spec = getattr(x.sharding, "partition_spec", None)
    sharding = "single device" if spec is None else f"P{tuple(spec)}"
    nbytes = math.prod(shape) * itemsize
    return SavedLeaf(path, shape, str(x.dtype), nbytes, sharding)
