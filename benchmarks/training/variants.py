"""The ways of keeping state and parameters that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import optax_offload as oo
from benchmarks.common.steps import MOMENTS, as_it_is
from optax_offload._ground import trees
from optax_offload._low_bit import codecs
from optax_offload._low_bit.convert import low_bit_decode
from optax_offload._low_bit.encoded import Encoded, is_encoded

CODECS = ("int8", "int8-companded", "float8", "bfloat16", "bfloat16-stochastic")
MASTER = oo.Rule(r".*master/.*", codec="bfloat16-remainder")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way of keeping state and parameters.

    Attributes:
      optimizer: Makes the optimizer, given adamw.
      dtype: Of the parameters; what is computed with them is float32.
      perturbed: Whether the parameters begin a hundredth part away, at random.
      encoded: Whether the moments are.
    """

    optimizer: Callable[[Any], Any]
    dtype: Any = jnp.float32
    perturbed: bool = False
    encoded: bool = True


class Linear8(codecs.Codec):
    """Even steps of a block's largest magnitude: what one would write first."""

    name = "linear 8-bit"
    has_unsigned: ClassVar[bool] = True
    blocks = (256,)
    code_bits = 8
    parts = ("codes", "scales")

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        blocks = x.reshape(*x.shape[:-1], -1, self.block)
        scales = jnp.max(jnp.abs(blocks), axis=-1)
        codes = blocks / jnp.where(scales == 0, 1, scales)[..., None] * self._steps
        dtype = jnp.int8 if self.signed else jnp.uint8
        return jnp.round(codes).astype(dtype).reshape(x.shape), scales

    def decode(self, codes: jax.Array, *scales: jax.Array) -> jax.Array:
        blocks = codes.reshape(*codes.shape[:-1], -1, self.block)
        values = blocks.astype(jnp.float32) / self._steps * scales[0][..., None]
        return values.reshape(codes.shape)

    @property
    def _steps(self) -> int:
        return 127 if self.signed else 255


def linear(inner: Any) -> optax.GradientTransformation:
    """As `low_bit`, with linear codes for all state that can have them."""

    def encode(state: Any) -> Any:
        def encoded(keys: Any, x: Any) -> Any:
            path = trees.path_string(keys)
            codec = Linear8("nu" not in path.split("/"))
            if x.ndim == 0 or codec.why_not(x):
                return x
            return Encoded.of(x, codec, path)

        return trees.map_with_path(encoded, state)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, low_bit_decode(state), params)
        return updates, encode(state)

    return optax.GradientTransformation(
        lambda params: encode(inner.init(params)), update
    )


def in_float32(inner: Any) -> optax.GradientTransformation:
    """So that moments of bfloat16 parameters are float32, as in the other variants."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


def with_codec(codec: Any) -> Variant:
    """Both moments in a format."""
    return Variant(lambda adamw: oo.low_bit(adamw, MOMENTS, codec))


def bfloat16(optimizer: Callable[[Any], Any], encoded: bool = False) -> Variant:
    """Parameters in bfloat16."""
    return Variant(optimizer, jnp.bfloat16, encoded=encoded)


VARIANTS = {
    "float32": Variant(as_it_is, encoded=False),
    "float32, begun 1 % away": Variant(as_it_is, perturbed=True, encoded=False),
    **{name: with_codec(name) for name in CODECS},
    "linear 8-bit": Variant(linear),
    "bfloat16 parameters": bfloat16(in_float32),
    "bfloat16 parameters, stochastic_round": bfloat16(
        lambda adamw: optax.chain(in_float32(adamw), oo.stochastic_round())
    ),
    "bfloat16 parameters, remainder": bfloat16(
        lambda adamw: oo.low_bit(oo.master_weights(adamw), MASTER)
    ),
    "bfloat16 parameters, remainder, int8": bfloat16(
        lambda adamw: oo.low_bit(
            oo.master_weights(adamw),
            [MASTER, oo.Rule(MOMENTS, codec="int8")],
        ),
        encoded=True,
    ),
    "bfloat16 parameters, stochastic_round, int8": bfloat16(
        lambda adamw: optax.chain(
            oo.low_bit(in_float32(adamw), MOMENTS), oo.stochastic_round()
        ),
        encoded=True,
    ),
}


def encoded_share(state: Any) -> float:
    """The part of the values of a state that is encoded, master weights aside."""
    found: dict[bool, int] = {True: 0, False: 0}
    for x in jax.tree.leaves(state, is_leaf=is_encoded):
        if isinstance(getattr(x, "codec", None), codecs.Bfloat16Remainder):
            continue
        found[is_encoded(x)] += x.size
    return found[True] / sum(found.values())
