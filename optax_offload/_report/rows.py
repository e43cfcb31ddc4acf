"""One row of a report: a leaf, its bytes, where it is and where it was planned."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from optax_offload._low_bit import codec_of
from optax_offload._places import memory
from optax_offload._places.rules import Placement


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One leaf of a tree.

    Attributes:
      path: The path that rules match.
      shape: The global shape.
      dtype: The name of the dtype.
      nbytes: The bytes of the leaf, each element counted once however often it is
        replicated.
      nbytes_per_device: The bytes of the largest shard, whichever memory of a device
        it belongs to.
      nbytes_per_host: The bytes of all shards that belong to this process' devices:
        a replicated leaf counts once for each of them.
      copies_per_host: The number of these devices that hold the same part of the leaf:
        1 for one that is sharded over all of them, or on one.
      planned: The memory kind that the rules give the leaf; None without rules.
      actual: The memory kind that the leaf has; None for a value that is no array,
        which has none.
      why: The reason for the planned memory kind.
      codec: The format that the leaf is a part of, and what it stands for, such as
        "int8 of float32"; None for what is as it is.
      named: The form that the rules name where the leaf has another, such as "float32,
        where the rules say int8"; None where it is as they say.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    nbytes_per_device: int
    nbytes_per_host: int
    planned: str | None
    actual: str | None
    why: str
    codec: str | None = None
    named: str | None = None
    copies_per_host: int = 1

    @property
    def misplaced(self) -> bool:
        """Returns whether the leaf is not where it was planned.

        A value that is no array is in no memory: a step takes it to the device, and a
        number is too small to count.
        """
        if self.actual is None and (self.planned == "device" or not self.shape):
            return False
        return self.planned not in (None, self.actual)


def row_of(
    path: str,
    x: Any,
    placement: Placement,
    codec: str | None = None,
    named: str | None = None,
) -> ReportRow:
    """The row of a leaf: an array, a `jax.ShapeDtypeStruct` or a Python number."""
    nbytes, nbytes_per_device, nbytes_per_host = _sizes(x)
    return ReportRow(
        path=path,
        shape=tuple(np.shape(x)),
        dtype=str(jax.typeof(x).dtype),
        nbytes=nbytes,
        nbytes_per_device=nbytes_per_device,
        nbytes_per_host=nbytes_per_host,
        planned=placement.memory_kind or None,
        actual=memory.memory_kind_of(x),
        why=placement.why + _why_not_encoded(x, placement, codec),
        codec=codec,
        named=named,
        copies_per_host=_copies_here(x),
    )


def _why_not_encoded(x: Any, placement: Placement, codec: str | None) -> str:
    wanted = placement.rule and placement.rule.codec
    if codec is not None or wanted is None or not hasattr(x, "dtype"):
        return ""
    why_not = codec_of(wanted).fitting(x).why_not(x)
    return f"; not {wanted}: {why_not or 'state of before this rule'}"


def _sizes(x: Any) -> tuple[int, int, int]:
    """The bytes of a leaf in all, of its shard on a device, and of those here."""
    nbytes = memory.nbytes(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or not nbytes:
        return nbytes, nbytes, nbytes
    shard = math.prod(sharding.shard_shape(x.shape))
    shard_bytes = shard * (nbytes // math.prod(x.shape))
    return nbytes, shard_bytes, shard_bytes * _devices_here(sharding)


def _copies_here(x: Any) -> int:
    """Counts the devices of this process that hold the same part of a leaf."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return 1
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        parts = math.prod(x.shape) // max(math.prod(sharding.shard_shape(x.shape)), 1)
        return max(_devices_here(sharding) // max(parts, 1), 1)
    parts_here = {
        tuple((part.start, part.stop) for part in index)
        for index in sharding.addressable_devices_indices_map(x.shape).values()
        if index is not None
    }
    return max(_devices_here(sharding) // max(len(parts_here), 1), 1)


def _devices_here(sharding: jax.sharding.Sharding) -> int:
    """Counts a sharding's devices in this process; all of an abstract mesh."""
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.size
    return len(sharding.addressable_devices)
