"""The dynamic map of 8-bit optimizers (Dettmers et al. 2021, arXiv 2110.02861).

256 values in [-1, 1], or in [0, 1] without a sign. In each of seven decades, from
1e-6 to 1, are values that divide it evenly, twice as many in each as in the one below;
then there are 0 and 1. The table is not looked up but computed, which is
elementwise: a TPU gathers one number at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DECADES = 7


def encode(x: Any, signed: bool) -> Any:
    """The positions in the map that are nearest to values in [-1, 1], as uint8."""
    least = 0 if signed else 1  # The lowest decade has 2**least values.
    a = jnp.abs(x)
    exponent = jnp.full(x.shape, least, jnp.int32)
    unit = jnp.full(x.shape, 10.0 ** (1 - DECADES), jnp.float32)
    for decade in range(1, DECADES):
        reached = a >= _border(decade, least)
        exponent = jnp.where(reached, decade + least, exponent)
        unit = jnp.where(reached, 10.0 ** (decade + 1 - DECADES), unit)
    count = lax.shift_left(jnp.ones_like(exponent), exponent)
    within = jnp.floor((a / unit - 0.1) / 0.9 * count.astype(jnp.float32))
    within = jnp.clip(within.astype(jnp.int32), 0, count - 1)
    at = jnp.where(a < _border(0, least), 0, count + within - least)
    one = a >= (_last(DECADES - 1, least) + 1) / 2
    if not signed:
        return jnp.where(one, 255, at).astype(jnp.uint8)
    at = jnp.where(one & (x > 0), 128, at)
    return jnp.where(x < 0, 127 - at, 127 + at).astype(jnp.uint8)


def decode(codes: Any, signed: bool) -> Any:
    """The values of the map at these positions, as float32."""
    least = 0 if signed else 1
    at = codes.astype(jnp.int32) - (127 if signed else 0)
    magnitude = (jnp.abs(at) + least).astype(jnp.float32)
    # Powers of two are exact: the exponent is that of the number itself.
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    count = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    unit = jnp.full(codes.shape, 10.0 ** (1 - DECADES), jnp.float32)
    for decade in range(1, DECADES):
        reached = count >= 2.0 ** (decade + least)
        unit = jnp.where(reached, 10.0 ** (decade + 1 - DECADES), unit)
    value = unit * (0.1 + 0.9 * ((magnitude - count + 0.5) / count))
    value = jnp.where(magnitude == 2.0 ** (DECADES + least), 1.0, value)
    value = jnp.where(at == 0, 0.0, value)
    return jnp.where(at < 0, -value, value)


def _first(decade: int, least: int) -> float:
    return 10.0 ** (decade + 1 - DECADES) * (0.1 + 0.45 / 2 ** (decade + least))


def _last(decade: int, least: int) -> float:
    return 10.0 ** (decade + 1 - DECADES) * (1 - 0.45 / 2 ** (decade + least))


def _border(decade: int, least: int) -> float:
    """Returns the border between this decade's first value and the one below it."""
    below = 0.0 if decade == 0 else _last(decade - 1, least)
    return (below + _first(decade, least)) / 2


def table(signed: bool) -> jax.Array:
    """All 256 values, in order."""
    return decode(jnp.arange(256, dtype=jnp.uint8), signed)
