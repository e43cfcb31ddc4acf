"""The formats in which state is kept at rest, a class for each, and all by their names.

All decode to float32. Those with blocks divide the last axis, so that other axes can
be sharded and sliced as before; each block has a scale of its own. Finite values are
decoded as finite values. Values that a format cannot hold are not clipped: an infinity,
a NaN, and a negative number where the codes have no sign, make their block's scale NaN,
or infinite, and so all that is decoded from it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_offload._low_bit import dynamic_map, packing, weights
from optax_offload._low_bit.codec import Codec

# Scales are no smaller, so that the least code of a block stands for a normal number:
# smaller ones are zero to many processors.
_LEAST_SCALE = 2.0**-104
# The inverse of a scale above 2**126 is no normal number: large ones are first divided.
_LARGE_SCALE = 2.0**64


class _Blocks(Codec):
    """Codes of values that are divided by the largest magnitude of their block.

    Codes have 8 bits, and two of them are a word. In a block without negative values
    only zero has the code of zero, and values under half of the next one have the code
    of that one: a second moment of zero beside a first moment that is not zero makes an
    update of any size. This depends on values alone, and so holds for moments that no
    rule declares as never negative.
    """

    code_bits = 8
    scale_dtype: ClassVar[Any] = jnp.float32
    parts = ("codes", "scales")

    @property
    def bits(self) -> float:
        """The bits of a value at rest, its part of a scale included."""
        return self.code_bits + 8 * jnp.dtype(self.scale_dtype).itemsize / self.block

    @property
    def codes_in_word(self) -> int:
        """The values for which there is one number of ``codes``."""
        return 2

    @property
    def zero(self) -> int:
        """The code of zero; the next one is that of the least positive value."""
        return 0

    def encode(self, x: jax.Array) -> tuple[Any, ...]:
        x = packing.split(x, self.block)
        top, low = jnp.max(x, axis=-1), jnp.min(x, axis=-1)
        # The largest of numbers and a NaN is a number on some CPUs (F69).
        held = jnp.all(x == x if self.signed else x >= 0, axis=-1)
        extreme = jnp.where(top >= -low, top, low)
        extreme = jnp.sign(extreme) * jnp.maximum(jnp.abs(extreme), _LEAST_SCALE)
        extreme = self._before(self._extreme(jnp.where(held, extreme, jnp.nan)))
        scales = self._stored(extreme)
        divisor = self._scale(scales)
        divisor = jnp.where(divisor == 0, 1, divisor)
        unit = jnp.where(jnp.abs(divisor) > _LARGE_SCALE, 1 / _LARGE_SCALE, 1.0)
        divided = (self._before(x) * unit[..., None]) / (divisor * unit)[..., None]
        codes = self._codes(jnp.clip(divided, -1, 1))
        vanished = (codes == self.zero) & (x > 0) & (low >= 0)[..., None]
        codes = jnp.where(vanished, jnp.uint8(self.zero + 1), codes)
        return packing.packed_in(8, packing.joined(codes), self.chunk), scales

    def decode(self, codes: Any, *scales: Any) -> jax.Array:
        (stored,) = scales
        codes = packing.unpacked(codes, self.chunk)
        values = self._values(packing.split(codes, self.block))
        values = values * self._scale(stored)[..., None]
        return self._after(packing.joined(values))

    def _extreme(self, x: Any) -> Any:
        """Returns the value that becomes 1, given that of the largest magnitude."""
        return jnp.abs(x)

    def _stored(self, scale: Any) -> Any:
        return scale

    def _scale(self, stored: Any) -> Any:
        return stored

    def _before(self, x: Any) -> Any:
        return x

    def _after(self, x: Any) -> Any:
        return x

    def _codes(self, x: Any) -> Any:
        """The codes of values in [-1, 1]."""
        raise NotImplementedError

    def _values(self, codes: Any) -> Any:
        """The values in [-1, 1] that codes stand for."""
        raise NotImplementedError


class Int8(_Blocks):
    """The dynamic map of 256 values in blocks of 256 (arXiv 2110.02861).

    The map has a 1 and, of those with a sign, no -1. So a scale is negative where the
    value of the largest magnitude is: it is kept exactly, and what is decoded and
    encoded again has the same codes and scales.
    """

    name = "int8"
    has_unsigned = True
    blocks = (256, 128, 64)

    @property
    def zero(self) -> int:
        """The code of zero; the next one is that of the least positive value."""
        return 127 if self.signed else 0

    def _extreme(self, x: Any) -> Any:
        return x

    def _codes(self, x: Any) -> Any:
        return dynamic_map.encode(x, self.signed)

    def _values(self, codes: Any) -> Any:
        return dynamic_map.decode(codes, self.signed)


class Int8Companded(_Blocks):
    """Even steps of a companded value in groups of 32 (arXiv 2602.23349).

    With a sign 2x / (1 + abs(x)), without one the square root. A scale has 16 bits, as
    there, and float32's range: of a float32 the 8 bits of the exponent and the first 8
    of the fraction. (The 5 bits of a float16's exponent end at 65504 and at 6e-8, and
    the 7 bits of a bfloat16's fraction are so few that the largest value of a group
    need not have the largest code.)
    """

    name = "int8-companded"
    has_unsigned = True
    blocks = (32,)
    blocks_in_chunk = 2
    scale_dtype = jnp.uint16

    def _stored(self, scale: Any) -> Any:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        # Not up to infinity, also when it is squared.
        largest = jnp.uint32(0x7F7FFFFF if self.signed else 0x5F7FFFFF)
        nearest = jnp.minimum(bits + jnp.uint32(0x4000), largest)
        bits = jnp.where(jnp.isfinite(scale), nearest, bits)
        return lax.shift_right_logical(bits, jnp.uint32(15)).astype(jnp.uint16)

    def _scale(self, stored: Any) -> Any:
        bits = lax.shift_left(stored.astype(jnp.uint32), jnp.uint32(15))
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _before(self, x: Any) -> Any:
        return x if self.signed else jnp.sqrt(x)

    def _after(self, x: Any) -> Any:
        return x if self.signed else x * x

    def _codes(self, x: Any) -> Any:
        if not self.signed:
            return jnp.floor(255 * x + 0.5).astype(jnp.uint8)
        codes = jnp.floor(127 * (2 * x / (1 + jnp.abs(x))) + 0.5)
        return lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)

    def _values(self, codes: Any) -> Any:
        if not self.signed:
            return _fractions(codes.astype(jnp.float32), 255)
        codes = lax.bitcast_convert_type(codes, jnp.int8)
        y = _fractions(codes.astype(jnp.float32), 127)
        return y / (2 - jnp.abs(y))


class Float8(_Blocks):
    """float8_e4m3fn in blocks of 256, whose largest magnitude becomes 448."""

    name = "float8"
    blocks = (256, 128, 64)

    def _codes(self, x: Any) -> Any:
        codes = (448 * x).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(codes, jnp.uint8)

    def _values(self, codes: Any) -> Any:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return _fractions(codes.astype(jnp.float32), 448)


def _fractions(x: Any, largest: int) -> Any:
    """Numbers as parts of the largest there is, which is exactly 1.

    XLA makes one factor of an inverse and a scale, and what is rounded so can be a
    little more than the scale: another number when it is encoded again, or none.
    """
    return jnp.where(jnp.abs(x) == largest, jnp.sign(x), x / largest)


class Bfloat16(Codec):
    """The upper half of a float32, rounded to nearest."""

    name = "bfloat16"
    code_bits = 16

    def encode(self, x: jax.Array) -> tuple[Any, ...]:
        codes = x.astype(jnp.bfloat16)
        # What is above bfloat16's largest, by less than half a step, becomes that.
        largest = jnp.finfo(jnp.bfloat16).max
        clipped = jnp.clip(codes, -largest, largest)
        return jnp.where(jnp.isfinite(x), clipped, codes), None

    def decode(self, codes: Any, *scales: Any) -> jax.Array:
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
    code_bits = 16

    def encode(self, x: jax.Array) -> tuple[Any, ...]:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16), None

    def decode(self, codes: Any, *scales: Any) -> jax.Array:
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
        weights.Nf4,
        weights.Nf4Double,
        weights.Int8Linear,
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
