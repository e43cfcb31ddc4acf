"""A leaf that is kept in few bits: a node of a tree, of codes and scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_offload import _trees
from optax_offload._low_bit import chance
from optax_offload._low_bit.codecs import Bfloat16Remainder, Bfloat16Stochastic, Codec


@jax.tree_util.register_pytree_with_keys_class
class Encoded:
    """A leaf of state at rest, with the shape and dtype of what it stands for.

    To `jax.tree` it is a node of its parts, at ``codes``, ``scales`` (where the format
    has them) and ``step`` (where rounding is by chance) below the leaf's path.

    Attributes:
      codec: The format.
      dtype: The dtype of what it stands for.
      codes: An array of the shape it stands for; of codes of 8 bits half as long along
        the last axis, since two are a word of 16 (`packing.py`).
      scales: One for each block along the last axis, or None.
      step: The number of times it was encoded, or None.
    """

    def __init__(self, codec: Codec, dtype: Any, codes: Any, scales: Any, step: Any):
        self.codec, self.dtype = codec, dtype
        self.codes, self.scales, self.step = codes, scales, step

    @classmethod
    def of(cls, x: Any, codec: Codec, path: str, step: Any = None) -> Encoded:
        """A leaf, encoded.

        Args:
          x: The leaf.
          codec: The format.
          path: The leaf's path, by which its chances differ from those of others.
          step: The number of times it was encoded before.
        """
        value = jnp.asarray(x).astype(jnp.float32)
        if isinstance(codec, Bfloat16Stochastic):
            step = jnp.zeros((), jnp.uint32) if step is None else step + 1
            codes = chance.rounded(value, chance.key_of(path, step))
            return cls(codec, x.dtype, codes, None, step)
        return cls(codec, x.dtype, *codec.encode(value), None)

    def decoded(self, param: Any = None) -> jax.Array:
        """The leaf that this stands for.

        Args:
          param: The bfloat16 parameter whose remainder this is, if it is one.
        """
        if isinstance(self.codec, Bfloat16Remainder):
            return self.codec.decode_with(self.codes, param)
        return self.codec.decode(self.codes, self.scales).astype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it stands for."""
        shape, count = self.codes.shape, self.codec.codes_in_word
        return shape if count == 1 else (*shape[:-1], shape[-1] * count)

    @property
    def size(self) -> int:
        """The number of values it stands for."""
        return self.codes.size * self.codec.codes_in_word

    def __repr__(self) -> str:
        if not hasattr(self.codes, "shape"):
            return f"Encoded({self.codec.name}, {self.codes!r})"
        kind = self.codec.name + ("" if self.codec.signed else ", no sign")
        return f"Encoded({kind}, {np.dtype(self.dtype)}{list(self.shape)})"

    def tree_flatten_with_keys(self) -> Any:
        """As `jax.tree_util.register_pytree_with_keys_class` has it."""
        key = jax.tree_util.GetAttrKey
        children = [(key(n), getattr(self, n)) for n in self.codec.parts]
        return children, (self.codec, np.dtype(self.dtype))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Encoded:
        """As `jax.tree_util.register_pytree_with_keys_class` has it."""
        codec, dtype = aux
        parts = dict.fromkeys(_trees.ENCODED_PARTS)
        parts |= dict(zip(codec.parts, children, strict=True))
        return cls(codec, dtype, **parts)


def is_encoded(x: Any) -> bool:
    """Returns whether a node is an encoded leaf."""
    return isinstance(x, Encoded)


def encoded_parts(tree: Any) -> dict[str, str]:
    """The paths of the parts of encoded leaves, each with what it is a part of."""
    nodes, _ = _trees.flatten_with_path(tree, is_leaf=is_encoded)
    return {
        _trees.path_string((*keys, *inside)): f"{x.codec.name} of {np.dtype(x.dtype)}"
        for keys, x in nodes
        if is_encoded(x)
        for inside, _ in _trees.flatten_with_path(x)[0]
    }
