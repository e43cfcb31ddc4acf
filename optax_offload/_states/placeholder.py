"""Placeholders in a tree for leaves that are on disk."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from optax_offload._states.files import StateFiles
from optax_offload._states.manifest import Entry


class OnDisk(jax.ShapeDtypeStruct):
    """The placeholder of a leaf: its shape, dtype and sharding, and where its value is.

    Attributes:
      files: The files of the state that the leaf is part of.
      entry: The entry of the leaf in the manifest.
      memory_kind: Always ``"disk"``.
    """

    def __init__(self, like: Any, sharding: Sharding, files: StateFiles, entry: Entry):
        """Takes shape and dtype of an array or a struct."""
        super().__init__(
            like.shape, like.dtype, sharding=sharding, weak_type=entry.weak_type
        )
        for name, value in {"files": files, "entry": entry}.items():
            object.__setattr__(self, name, value)

    files: StateFiles
    entry: Entry
    memory_kind = "disk"

    @property
    def path(self) -> str:
        """The path of the leaf in the tree that was offloaded."""
        return self.entry.path

    @property
    def directory(self) -> str:
        """The directory that `offload_states` was given."""
        return str(self.files.directory)

    def __repr__(self) -> str:
        return (
            f"OnDisk({self.path!r}, {self.dtype}{list(self.shape)}, {self.directory!r})"
        )

    __str__ = __repr__

    # As structs compare, two leaves of the same shape would be the same leaf.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            f"{self!r} has no value in memory: bring it back with "
            "optax_offload.reload_states(tree)"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to its process. In another, make a template with "
            "optax_offload.eval_shape(...), and call optax_offload.reload_states("
            f"template, directory={self.directory!r})"
        )

    def __copy__(self) -> OnDisk:
        return self

    def __deepcopy__(self, _: Any) -> OnDisk:
        return self
