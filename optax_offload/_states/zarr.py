"""A leaf on disk as a Zarr v3 array of its bytes, each chunk with a CRC-32C."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optax_offload._states.manifest import Entry

# The largest chunk. A chunk is a file and a checksum, and is copied at once to be
# encoded.
MOST_CHUNK_BYTES = 16 * 2**20


def tensorstore() -> Any:
    """The library that reads and writes, or an error that says how to install it."""
    try:
        import tensorstore
    except ImportError as e:
        raise ImportError(
            "states go to disk through tensorstore, which is not installed: "
            'pip install "optax-offload[disk]"'
        ) from e
    return tensorstore


def open_array(state: Path, entry: Entry, create: bool) -> Any:
    """Starts to open the array of a leaf; returns tensorstore's future of it."""
    metadata = {
        "shape": [*entry.shape, entry.itemsize],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [*entry.chunk, entry.itemsize]},
        },
        # All files of a leaf in one directory: of many small leaves, directories are
        # what takes longest to remove.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(state / str(entry.number))},
        # On reading, metadata that says otherwise is an error.
        "metadata": metadata,
        # A chunk that is missing is an error, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore().open(spec, open=True, create=create, context=_context())


@functools.cache
def _context() -> Any:
    # Metadata is read again each time: a directory of the same name may be another.
    return tensorstore().Context({"cache_pool": {"total_bytes_limit": 0}})


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A chunk that divides a shard, so that no two processes write the same one."""
    chunk = [max(n, 1) for n in shard]
    for axis, length in enumerate(chunk):
        size = itemsize * math.prod(chunk)
        if size <= MOST_CHUNK_BYTES:
            break
        parts = (n for n in range(1, length + 1) if length % n == 0)
        chunk[axis] = next(
            (length // n for n in parts if size // n <= MOST_CHUNK_BYTES), 1
        )
    return tuple(chunk)


def chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The positions of all chunks in a shard."""
    axes = [
        [slice(start, start + step) for start in range(0, length, step)]
        for length, step in zip(shape, chunk, strict=True)
    ]
    return itertools.product(*axes)


def bytes_of(x: jax.Array) -> np.ndarray:
    """The bytes of an array that is on one device, as a last axis.

    As bytes every dtype is the same, and negative zeros and NaNs are what they are.
    """
    # JAX keeps the NumPy copy of an array with it. This one is let go of at once.
    x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
    value = np.asarray(x, order="C")
    return value.reshape(*value.shape, 1).view(np.uint8)
