"""Rounding to bfloat16 by chance: up or down, right on average.

The chances of a row come from its own number, so that an update in slices, or row by
row in the backward pass, draws what an update of the whole leaf draws.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def key_of(path: str, step: Any, seed: int = 0) -> jax.Array:
    """The random key of a leaf in a step: the same wherever and whenever it is made."""
    key = jax.random.key(seed)
    key = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
    return jax.random.fold_in(key, step)


def rounded(x: Any, key: jax.Array) -> jax.Array:
    """Float32 values as bfloat16: of its two neighbours one, the nearer more often.

    Args:
      x: Float32 values.
      key: A random key, which is used up.

    Returns:
      bfloat16, equal to ``x`` on average over keys. Infinities and NaN stay, and a
      finite value does not become infinite.
    """
    chances = _bits(key, x.shape).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    upper = (bits + chances) & jnp.uint32(0xFFFF0000)
    down = bits & jnp.uint32(0xFFFF0000)
    infinite = (upper & jnp.uint32(0x7F800000)) == jnp.uint32(0x7F800000)
    value = lax.bitcast_convert_type(jnp.where(infinite, down, upper), jnp.float32)
    return jnp.where(jnp.isfinite(x), value, x).astype(jnp.bfloat16)


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """16 random bits for each value, those of a row from a key of its own."""
    if not shape:
        return jax.random.bits(key, shape, jnp.uint16)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shape[0]))
    return jax.vmap(lambda k: jax.random.bits(k, shape[1:], jnp.uint16))(keys)
