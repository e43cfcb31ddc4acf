"""The formats in which state is kept at rest, a class for each.

All decode to float32. Those with blocks divide the last axis, so that other axes can
be sharded and sliced as before; each block has a scale of its own. What a format cannot
hold is not clipped: an infinity, a NaN, and a negative number where the codes have no
sign, make their block's scale NaN, or infinite, and so all that is decoded from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_offload._low_bit import dynamic_map

# Below this many values a leaf's bytes do not matter, and its codes may (a norm's
# scale); as in bitsandbytes.
LEAST_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Codec:
    """A format: what its codes and scales are, and what they stand for.

    Attributes:
      signed: Whether values can be negative. Without a sign codes are twice as fine.
      has_unsigned: Whether there are codes without a sign.
      block: So many values along the last axis share a scale; 1 where there is none.
      bits: The bits of a value at rest, its part of a scale included.
      parts: What an encoded leaf consists of.
    """

    signed: bool = True
    name: ClassVar[str]
    has_unsigned: ClassVar[bool] = False
    block: ClassVar[int] = 1
    bits: ClassVar[float]
    parts: ClassVar[tuple[str, ...]] = ("codes",)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The codes of float32 values, and the scales of their blocks."""
        raise NotImplementedError

    def decode(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        """The float32 values that codes and scales stand for."""
        raise NotImplementedError


class _Blocks(Codec):
    """Codes of values that are divided by the largest magnitude of their block."""

    scale_dtype: ClassVar[Any] = jnp.float32
    parts = ("codes", "scales")

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = _split(self._before(x), self.block)
        largest = jnp.max(jnp.abs(x), axis=-1)
        if not self.signed:
            largest = jnp.where(jnp.min(x, axis=-1) < 0, jnp.nan, largest)
        scales = self._scale(largest)
        divisor = scales.astype(jnp.float32)
        divisor = jnp.where(divisor == 0, 1, divisor)
        return _joined(self._codes(x / divisor[..., None])), scales

    def decode(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        assert scales is not None
        values = self._values(_split(codes, self.block))
        return self._after(_joined(values * scales.astype(jnp.float32)[..., None]))

    def _scale(self, largest: Any) -> Any:
        return largest.astype(self.scale_dtype)

    def _before(self, x: Any) -> Any:
        return x

    def _after(self, x: Any) -> Any:
        return x

    def _codes(self, x: Any) -> Any:
        raise NotImplementedError

    def _values(self, codes: Any) -> Any:
        raise NotImplementedError


class Int8(_Blocks):
    """The dynamic map of 256 values in blocks of 256 (arXiv 2110.02861)."""

    name = "int8"
    has_unsigned = True
    block = 256
    bits = 8 + 32 / 256

    def _codes(self, x: Any) -> Any:
        return dynamic_map.encode(x, self.signed)

    def _values(self, codes: Any) -> Any:
        return dynamic_map.decode(codes, self.signed)


class Int8Companded(_Blocks):
    """Even steps of a companded value in groups of 32 (arXiv 2602.23349).

    With a sign 2x / (1 + abs(x)), without one the square root. Scales are float16: of
    groups below its least number, 6e-8, nothing is left, and one above 65504 is told as
    above.
    """

    name = "int8-companded"
    has_unsigned = True
    block = 32
    bits = 8 + 16 / 32
    scale_dtype = jnp.float16

    def _before(self, x: Any) -> Any:
        # The root of a negative number is NaN, and so is its group's scale.
        return x if self.signed else jnp.sqrt(x)

    def _after(self, x: Any) -> Any:
        return x if self.signed else x * x

    def _codes(self, x: Any) -> Any:
        if not self.signed:
            return jnp.floor(255 * jnp.clip(x, 0, 1) + 0.5).astype(jnp.uint8)
        x = jnp.clip(x, -1, 1)  # The scale may have been rounded down.
        return jnp.floor(127 * (2 * x / (1 + jnp.abs(x))) + 0.5).astype(jnp.int8)

    def _values(self, codes: Any) -> Any:
        if not self.signed:
            return codes.astype(jnp.float32) / 255
        y = codes.astype(jnp.float32) / 127
        return y / (2 - jnp.abs(y))


class Float8(_Blocks):
    """float8_e4m3fn in blocks of 256, whose largest magnitude becomes 448."""

    name = "float8"
    block = 256
    bits = 8 + 32 / 256

    def _scale(self, largest: Any) -> Any:
        return largest / 448

    def _codes(self, x: Any) -> Any:
        # What is rounded up in the scale must not overflow: 448 is the largest.
        return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn)

    def _values(self, codes: Any) -> Any:
        return codes.astype(jnp.float32)


class Bfloat16(Codec):
    """The upper half of a float32, rounded to nearest."""

    name = "bfloat16"
    bits = 16

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return x.astype(jnp.bfloat16), None

    def decode(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        return codes.astype(jnp.float32)


class Bfloat16Stochastic(Bfloat16):
    """The upper half of a float32, rounded up or down by chance: right on average.

    `Encoded` has the number of its step beside the codes, from which the chance comes.
    """

    name = "bfloat16-stochastic"
    parts = ("codes", "step")


class Bfloat16Remainder(Codec):
    """The lower half of a float32 whose upper half a bfloat16 parameter has.

    For master weights: parameter and codes together are exact in 2 + 2 bytes. The
    parameter is the value rounded to nearest, with halves away from zero.
    """

    name = "bfloat16-remainder"
    bits = 16

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16), None

    def decode(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        raise TypeError("what remains of a value has no value without its parameter")

    def decode_with(self, codes: jax.Array, params: jax.Array) -> jax.Array:
        """The float32 values of which bfloat16 parameters are the upper half."""
        upper = lax.bitcast_convert_type(params, jnp.uint16).astype(jnp.int32)
        bits = lax.shift_left(upper, 16) + codes.astype(jnp.int32)
        return lax.bitcast_convert_type(bits, jnp.float32)

    @staticmethod
    def upper(x: jax.Array) -> jax.Array:
        """The bfloat16 parameters of float32 values."""
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        half = lax.shift_right_logical(bits + jnp.uint32(0x8000), jnp.uint32(16))
        rounded = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
        return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


CODECS: dict[str, type[Codec]] = {
    c.name: c
    for c in (
        Int8,
        Int8Companded,
        Float8,
        Bfloat16,
        Bfloat16Stochastic,
        Bfloat16Remainder,
    )
}


def codec_of(name: str, signed: bool = True) -> Codec:
    """The codec of a name, or an error that names those there are."""
    if name not in CODECS:
        raise ValueError(
            f"codec is {name!r}; it must be one of {', '.join(map(repr, CODECS))}"
        )
    codec = CODECS[name]
    return codec(signed or not codec.has_unsigned)


def why_not(codec: Codec, x: Any, last_axis: int) -> str | None:
    """Why a leaf cannot be kept in a format; None if it can.

    Args:
      codec: The format.
      x: The leaf, or its type.
      last_axis: The length of its last axis on each device.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"{x.dtype} is no floating type"
    if x.size < LEAST_SIZE:
        return f"under {LEAST_SIZE} values"
    if jnp.finfo(x.dtype).bits <= codec.bits:
        return f"{x.dtype} is as small"
    if last_axis % codec.block:
        return f"{codec.block} does not divide its last axis, {last_axis}"
    return None


def _split(x: Any, block: int) -> Any:
    """With an axis more, for the values of a block."""
    shape = (*x.shape[:-1], x.shape[-1] // block, block)
    return lax.reshape(x, shape, out_sharding=_sharded(x, lambda s: (*s, None)))


def _joined(x: Any) -> Any:
    shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return lax.reshape(x, shape, out_sharding=_sharded(x, lambda s: s[:-1]))


def _sharded(x: Any, change: Any) -> Any:
    """In Explicit mode a reshape of a sharded axis has to say what becomes of it."""
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    if not any(part is not None for part in spec):
        return None
    spec = (*spec, *[None] * (x.ndim - len(spec)))
    return sharding.update(spec=jax.P(*change(spec)))
