"""The formats of frozen parameters, which no step replaces: a base under adapters.

A scale is the largest magnitude of a block along the last axis. Values that are not
finite make it NaN, and so all that is decoded from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from optax_offload._low_bit import packing
from optax_offload._low_bit.codec import Codec
from optax_offload._places import memory

# Below this many rows of the last axis a leaf is taken for the norms or the biases of
# all layers, which are few bytes, and where each value counts. No model of today has as
# many layers, nor adapters this rank.
LEAST_ROWS = 128

# The values of NF4 (QLoRA, arXiv 2305.14314, appendix E): so that a normal variable has
# each equally often.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True)
class _OfWeights(Codec):
    """Codes of values that are divided by the scale of their block.

    Attributes:
      span: The values along the last axis whose codes share words: the largest of
        ``spans`` that divides it. Of the first all words of a span are 128, the lanes
        of a TPU's registers.
      tail: The last axes, which are one in codes and scales: heads and their width,
        where that alone makes narrow words.
      spans: The lengths that a span can have.
    """

    span: int = 0
    tail: tuple[int, ...] = ()
    spans: ClassVar[tuple[int, ...]]
    # Of 64 with 8 bits too. With one scale for 128 values, as many as a TPU has lanes,
    # its compiler makes an array of a float32 for each value.
    blocks = (64,)
    parts = ("codes", "scales")
    of_parameters = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "span", self.span or self.spans[-1])

    @property
    def chunk(self) -> int:
        """The values along the last axis of which there must be a multiple."""
        return self.span

    @property
    def bits(self) -> float:
        """The bits of a value at rest, its part of a scale included."""
        return self.code_bits + 16 / self.block

    @property
    def form(self) -> str:
        """The name, with the values whose codes share words."""
        return f"{self.name}_{self.span}"

    @property
    def codes_in_word(self) -> int:
        """The values for which there is one number of ``codes``."""
        return 16 // self.code_bits

    def fitting(self, x: Any) -> Codec:
        """The same in the longest spans that divide the last axis, or some as one."""
        shape, here = x.shape or (1,), _shape_here(x) or (1,)
        fits: list[tuple[int, int]] = []
        for count in range(1, len(shape) + 1):
            rows = math.prod(shape[: len(shape) - count])
            whole = shape[len(shape) - count + 1 :]
            sharded = here[len(here) - len(whole) :] != whole
            if count > 1 and (rows < LEAST_ROWS or sharded):
                break
            length = math.prod(here[len(here) - count :])
            fits += [(span, -count) for span in self.spans if length % span == 0]
        if not fits:
            return self
        span, count = max(fits)
        tail = shape[count:] if count < -1 else ()
        return dataclasses.replace(self, span=span, tail=tuple(tail))

    def last_axis(self, x: Any) -> int:
        """The length of the last axis on each device, or of those that are one."""
        return math.prod((_shape_here(x) or (1,))[-(len(self.tail) or 1) :])

    def shape_of(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what codes of a shape stand for."""
        return (*codes[:-1], *self.tail) if self.tail else super().shape_of(codes)

    def folded(self, x: Any) -> Any:
        """A leaf with its tail as one axis."""
        return packing.joined(x, len(self.tail) - 1) if self.tail else x

    def why_left(self, x: Any) -> str | None:
        if x.size < LEAST_ROWS * (x.shape or (1,))[-1]:
            return f"under {LEAST_ROWS} rows, as norms and biases have"
        return super().why_left(x)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        x = packing.split(self.folded(x), self.block)
        largest = jnp.max(jnp.abs(x), axis=-1)
        # The largest of numbers and a NaN is a number on some CPUs (F69).
        finite = jnp.all(jnp.isfinite(x), axis=-1)
        scales = self._stored(jnp.where(finite, largest, jnp.nan))
        divisor = self._scales(*scales)
        divisor = jnp.where(divisor == 0, 1, divisor)[..., None]
        codes = packing.joined(self._codes(jnp.clip(x / divisor, -1, 1)))
        return packing.packed_in(self.code_bits, codes, self.span), *scales

    def decode(self, codes: jax.Array, *scales: Any) -> jax.Array:
        codes = packing.unpacked_from(self.code_bits, codes, self.span)
        values = packing.split(self._values(codes), self.block)
        values = packing.joined(values * self._scales(*scales)[..., None])
        return packing.split(values, *self.tail[:0:-1]) if self.tail else values

    def _stored(self, scales: Any) -> tuple[Any, ...]:
        """The scales of blocks, as they are kept."""
        # No finite one becomes infinite.
        largest = jnp.finfo(jnp.bfloat16).max
        return (jnp.minimum(scales, largest.astype(scales.dtype)).astype(jnp.bfloat16),)

    def _scales(self, *stored: Any) -> Any:
        """The float32 scales that are kept so."""
        (scales,) = stored
        return scales.astype(jnp.float32)

    def _codes(self, x: Any) -> Any:
        """The codes of values in [-1, 1]."""
        raise NotImplementedError

    def _values(self, codes: Any) -> Any:
        """The values in [-1, 1] that codes stand for."""
        raise NotImplementedError


class Nf4(_OfWeights):
    """The 16 values of NF4 in blocks of 64: 0.531 bytes a value.

    Decoding selects among the values by the bits of a code, 15 selections of constants.
    A look-up in a table reads memory for each value on a TPU, and compilers fuse it
    with nothing there.
    """

    name = "nf4"
    code_bits = 4
    spans = (512, 256, 128, 64)

    def _codes(self, x: Any) -> Any:
        codes = jnp.zeros(x.shape, jnp.uint16)
        for low, high in itertools.pairwise(NF4):
            codes += (x > (low + high) / 2).astype(jnp.uint16)
        return codes

    def _values(self, codes: Any) -> Any:
        chosen: list[Any] = [jnp.float32(value) for value in NF4]
        for bit in range(4):
            is_set = (codes & jnp.uint16(1 << bit)) != 0
            pairs = zip(chosen[::2], chosen[1::2], strict=True)
            chosen = [jnp.where(is_set, high, low) for low, high in pairs]
        return chosen[0]


class Nf4Double(Nf4):
    """NF4 whose scales have 8 bits, as in QLoRA's double quantization: 0.516 bytes.

    A scale is a part of the largest one of its row, which is kept in float32: the
    square of so many of 255 steps, which are finer where scales are small. (QLoRA's are
    of float8, in blocks of 256 and around their mean, which is that of a whole leaf; of
    a row alone each layer can be decoded by itself.)
    """

    name = "nf4-double"
    parts = ("codes", "scales", "tops")
    blocks_in_chunk = 2
    spans = (512, 256, 128)

    @property
    def bits(self) -> float:
        """The bits of a value at rest, without the float32 of each row."""
        return self.code_bits + 8 / self.block

    def _stored(self, scales: Any) -> tuple[Any, ...]:
        finite = jnp.all(scales == scales, axis=-1)
        tops = jnp.where(finite, jnp.max(scales, axis=-1), jnp.nan)
        divisor = jnp.where(tops == 0, 1, tops)[..., None]
        steps = jnp.floor(255 * jnp.sqrt(scales / divisor) + 0.5)
        # A block is all zero only if it was.
        steps = jnp.maximum(steps, scales > 0).astype(jnp.uint8)
        return packing.packed_in(8, steps, self.span // self.block), tops

    def _scales(self, *stored: Any) -> Any:
        steps, tops = stored
        steps = packing.unpacked_from(8, steps, self.span // self.block)
        parts = steps.astype(jnp.float32) / 255
        return parts * parts * tops[..., None]


class Int8Linear(_OfWeights):
    """Even steps to either side of zero in blocks of 64: 1.031 bytes a value.

    Of weights, which are near to normal, the error is three fifths of that of state's
    ``"int8"``, whose 256 values lie closer around zero, as moments do.
    """

    name = "int8-linear"
    code_bits = 8
    spans = (256, 128, 64)

    def _codes(self, x: Any) -> Any:
        return jnp.floor(127 * x + 127.5).astype(jnp.uint16)

    def _values(self, codes: Any) -> Any:
        return (codes.astype(jnp.float32) - 127) / 127


def _shape_here(x: Any) -> tuple[int, ...]:
    """The shape on each device, as far as is known."""
    sharding = None if memory.is_traced(x) else getattr(x, "sharding", None)
    if sharding is None:
        return memory.shape_on_each_device(x)
    return sharding.shard_shape(x.shape)
