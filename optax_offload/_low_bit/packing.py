"""Codes of 8 bits, two in a word of 16, and of 4 bits, four in one.

A TPU's compiler tiles arguments of 8 bits in 32 rows, and in loops in 8, and makes a
leaf anew, whole and on the device, between them (F68); those of 16 it does not. The
words of a chunk have the first half of its codes in their lower bytes and the second in
the upper ones, so that none changes its lane. Codes of 4 bits are the quarters of a
chunk likewise, from the lowest bits up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def packed_in(bits: int, codes: Any, chunk: int) -> Any:
    """Words of codes of 8 or 4 bits: two or four times fewer along the last axis."""
    count = 16 // bits
    parts = split(codes, chunk // count, count).astype(jnp.uint16)
    words = parts[..., 0, :]
    for i in range(1, count):
        words |= lax.shift_left(parts[..., i, :], jnp.uint16(bits * i))
    return joined(words)


def unpacked(words: Any, chunk: int) -> Any:
    """The uint8 codes that `packed_in` was given, of 8 bits."""
    words = split(words, chunk // 2)
    upper = lax.shift_right_logical(words, jnp.uint16(8))
    halves = (words & jnp.uint16(0xFF), upper)
    codes = [lax.expand_dims(x, (x.ndim - 1,)) for x in halves]
    return joined(lax.concatenate(codes, words.ndim - 1).astype(jnp.uint8), 2)


def unpacked_from(bits: int, words: Any, chunk: int) -> Any:
    """The codes that `packed_in` was given, as uint16.

    Each is a shift of a word that is broadcast, so that a compiler fuses all of it with
    what uses the codes. What is concatenated, as by `unpacked`, is made on its own.
    """
    count, rank = 16 // bits, words.ndim
    words = lax.expand_dims(split(words, chunk // count), (rank,))
    shifts = lax.broadcasted_iota(jnp.uint16, (count, 1), 0) * jnp.uint16(bits)
    shifts = lax.expand_dims(shifts, range(rank))
    return joined(jnp.right_shift(words, shifts) & jnp.uint16(2**bits - 1), 2)


def split(x: Any, *sizes: int) -> Any:
    """With axes more: the last of the first size, those before it of the others."""
    inner = sizes[::-1]
    count = x.shape[-1]
    for size in sizes:
        count //= size
    more = (None,) * len(inner)
    return _reshaped(x, (*x.shape[:-1], count, *inner), lambda spec: (*spec, *more))


def joined(x: Any, axes: int = 1) -> Any:
    """With so many of the last axes joined to the one before them."""
    first = x.ndim - 1 - axes
    length = 1
    for size in x.shape[first:]:
        length *= size
    shape = (*x.shape[:first], length)
    return _reshaped(x, shape, lambda spec: spec[: first + 1])


def _reshaped(x: Any, shape: tuple[int, ...], change: Any) -> Any:
    """Reshapes with a sharding, which Explicit mode needs where an axis is sharded."""
    sharding = jax.typeof(x).sharding
    spec = tuple(sharding.spec)
    if all(part is None for part in spec):
        return lax.reshape(x, shape)
    spec = (*spec, *[None] * (x.ndim - len(spec)))
    return lax.reshape(
        x, shape, out_sharding=sharding.update(spec=jax.P(*change(spec)))
    )
