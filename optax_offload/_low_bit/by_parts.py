"""Parameters, encoded part by part on their way to host memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_offload._low_bit.codec import Codec
from optax_offload._low_bit.encoded import Encoded
from optax_offload._places import memory

# The values of a part: with what it takes to encode them, less than 64 MiB.
PART_VALUES = 2**22

Index = tuple[slice, ...]


def encoded_struct(x: Any, codec: Codec, sharding: Sharding) -> Encoded:
    """What stands for a leaf, encoded and sharded as the leaf would be."""
    parts = jax.eval_shape(lambda x: Encoded.of(x, codec, ""), x)
    return jax.tree.map(
        lambda part: memory.struct(part, for_part(sharding, part.ndim)), parts
    )


def encoded_by_parts(
    x: np.ndarray,
    codec: Any,
    sharding: Sharding,
    tell: Callable[[int], None] = lambda nbytes: None,
) -> tuple[Encoded, bool]:
    """A leaf of the host, encoded, and whether all of its values are finite.

    No more than a part of it is on the device, or is read where it is a memory map.

    Args:
      x: The leaf.
      codec: The format, which fits it.
      sharding: How the leaf is to be sharded, and in which memory.
      tell: Is told of the bytes of each part that is encoded.
    """
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    template = encoded_struct(jax.ShapeDtypeStruct(x.shape, dtype), codec, sharding)
    if codec.tail:
        x = x.reshape(*x.shape[: -len(codec.tail)], -1)
        codec = dataclasses.replace(codec, tail=())
    made: dict[Any, list[np.ndarray]] = {}
    finite = True
    # Of rows that several devices share along the last axis each is encoded once: a
    # scale may be of all blocks of a row.
    for index in (
        for_part(sharding, x.ndim).addressable_devices_indices_map(x.shape).values()
    ):
        rows = tuple(index or ())[:-1]
        key = _key(rows, x.shape)
        if key not in made:
            parts, held = _encoded(x[(*rows, ...)], codec, template, tell)
            made[key] = parts
            finite = finite and held

    def part(number: int, like: Any) -> jax.Array:
        def value(index: Index) -> np.ndarray:
            rows, last = index[: x.ndim - 1], index[x.ndim - 1 :]
            return made[_key(rows, x.shape)][number][(..., *last)]

        return memory.array_from(like.shape, like.sharding, value)

    likes, structure = jax.tree.flatten(template)
    arrays = [part(i, like) for i, like in enumerate(likes)]
    return jax.tree.unflatten(structure, arrays), finite


def encoded_on_device(x: jax.Array, codec: Any) -> tuple[Encoded, Any]:
    """A leaf of one device, encoded there in parts, and whether its values are finite.

    A TPU's compiler makes float32 values of all that it encodes at once, and more.
    """
    rows = codec.folded(x)
    lead, last = rows.shape[:-1], rows.shape[-1]
    of_rows = dataclasses.replace(codec, tail=())

    def encode(row: Any) -> Any:
        return of_rows.encode(row.astype(jnp.float32)), jnp.all(jnp.isfinite(row))

    count = max(PART_VALUES // max(last, 1), 1)
    parts, finite = lax.map(encode, rows.reshape(-1, last), batch_size=count)
    parts = [part.reshape(*lead, *part.shape[1:]) for part in parts]
    return Encoded(codec, x.dtype, parts), finite


def for_part(sharding: Sharding, rank: int) -> Sharding:
    """The sharding of a leaf for a part of it, of this rank."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(*sharding.spec[:rank]))


def _encoded(
    x: np.ndarray, codec: Codec, template: Encoded, tell: Callable[[int], None]
) -> tuple[list[np.ndarray], bool]:
    """The parts of encoded rows, and whether all values are finite."""
    rank = x.ndim
    likes = jax.tree.leaves(template)
    lasts = [like.shape[rank - 1 :] for like in likes]
    made = [
        np.empty((*x.shape[:-1], *last), like.dtype)
        for last, like in zip(lasts, likes, strict=True)
    ]
    finite = True
    for index in _indices(x.shape[:-1], max(PART_VALUES // max(x.shape[-1], 1), 1)):
        rows = np.ascontiguousarray(x[index])
        flat = rows.reshape(-1, x.shape[-1])
        parts, held = _encode(codec, flat)
        for whole, part, last in zip(made, parts, lasts, strict=True):
            whole[index] = np.asarray(part).reshape((*rows.shape[:-1], *last))
        finite = finite and bool(held)
        tell(rows.nbytes)
    return made, finite


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, x: Any) -> tuple[tuple[Any, ...], Any]:
    value = x.astype(jnp.float32)
    return codec.encode(value), jnp.all(jnp.isfinite(value))


def _indices(shape: tuple[int, ...], most: int) -> Iterator[Index]:
    """Yields the indices of parts of so many elements, which are all of a shape."""
    if math.prod(shape) <= most:
        yield tuple(slice(None) for _ in shape)
        return
    length, *rest = shape
    inside = math.prod(rest)
    step = max(most // inside, 1)
    starts = range(0, length, step)
    below = list(_indices(tuple(rest), most)) if inside > most else [()]
    for start, index in itertools.product(starts, below):
        yield (slice(start, min(start + step, length)), *index)


def _key(rows: Index, shape: tuple[int, ...]) -> Any:
    return tuple(s.indices(n)[:2] for s, n in zip(rows, shape, strict=False))
