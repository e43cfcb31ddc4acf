"""What every format of a leaf at rest has: the class that they are of."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from optax_offload._places import memory

# Below this many values a leaf's bytes do not matter, and its codes may (a norm's
# scale); as in bitsandbytes.
LEAST_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Codec:
    """A format: what its codes and scales are, and what they stand for.

    Attributes:
      signed: Whether values can be negative. Without a sign codes are twice as fine.
      block: The number of values along the last axis with one scale; 1 for no scale.
      name: The name that rules use.
      has_unsigned: Whether there are codes without a sign.
      blocks: The sizes that blocks can have: the published one, and smaller ones for
        leaves whose last axis it does not divide, as of attention heads.
      blocks_in_chunk: Values along the last axis come in chunks of so many blocks,
        whose codes share words.
      code_bits: The bits of a value's code.
      parts: The arrays of an encoded leaf.
      of_parameters: Whether it is for frozen parameters, and for no state.
    """

    signed: bool = True
    block: int = 0
    name: ClassVar[str]
    has_unsigned: ClassVar[bool] = False
    blocks: ClassVar[tuple[int, ...]] = (1,)
    blocks_in_chunk: ClassVar[int] = 1
    code_bits: ClassVar[int]
    parts: ClassVar[tuple[str, ...]] = ("codes",)
    of_parameters: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "block", self.block or self.blocks[0])

    @property
    def chunk(self) -> int:
        """The values along the last axis of which there must be a multiple."""
        return self.block * self.blocks_in_chunk

    @property
    def bits(self) -> float:
        """The bits of a value at rest, its part of a scale included."""
        return self.code_bits

    def fitting(self, x: Any) -> Codec:
        """The same in the largest blocks that divide the last axis of a leaf."""
        last = self.last_axis(x)
        sized = (dataclasses.replace(self, block=block) for block in self.blocks)
        return next((codec for codec in sized if last % codec.chunk == 0), self)

    @property
    def form(self) -> str:
        """The name, with what codes are read by and their shapes do not tell."""
        return self.name if self.signed else f"{self.name}_unsigned"

    @property
    def codes_in_word(self) -> int:
        """The values for which there is one number of ``codes``."""
        return 1

    def last_axis(self, x: Any) -> int:
        """The length of the last axis on each device, as far as the type says."""
        return (memory.shape_on_each_device(x) or (1,))[-1]

    def shape_of(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what codes of a shape stand for."""
        return (*codes[:-1], codes[-1] * self.codes_in_word) if codes else codes

    def why_not(self, x: Any) -> str | None:
        """Returns why a leaf cannot have this format; None if it can.

        The length of the last axis counts as it is on each device, as far as the type
        tells.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return f"{x.dtype} is no floating type"
        left = self.why_left(x)
        if left is not None:
            return left
        if jnp.finfo(x.dtype).bits <= self.bits:
            return f"{x.dtype} is as small"
        last = self.last_axis(x)
        if last % self.chunk:
            least = self.blocks[-1] * self.blocks_in_chunk
            each = "" if last == (x.shape or (1,))[-1] else " on each device"
            return f"{least} does not divide its last axis, {last}{each}"
        return None

    def why_left(self, x: Any) -> str | None:
        """Returns why a leaf is not worth this format, if it is not."""
        return f"under {LEAST_SIZE} values" if x.size < LEAST_SIZE else None

    def encode(self, x: jax.Array) -> tuple[Any, ...]:
        """The codes of float32 values, and the scales of their blocks."""
        raise NotImplementedError

    def decode(self, codes: Any, *scales: Any) -> jax.Array:
        """The float32 values that codes and scales stand for."""
        raise NotImplementedError
