"""A leaf that is kept in few bits: a node of a tree, of codes and scales."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from optax_offload._ground import trees
from optax_offload._low_bit import chance
from optax_offload._low_bit.codec import Codec
from optax_offload._low_bit.codecs import Bfloat16Remainder, Bfloat16Stochastic
from optax_offload._places.rules import PARAMETER_CODECS


@jax.tree_util.register_pytree_with_keys_class
class Encoded:
    """A leaf at rest, of state or a parameter, with the shape and dtype it stands for.

    To `jax.tree` it is a node of its parts, those that its format has, at ``codes_``
    and the format's form, ``scales``, ``tops`` and ``step`` below the leaf's path. So
    a checkpoint says what its codes are, and no loader takes them for others.

    Attributes:
      codec: The format.
      dtype: The dtype of what it stands for.
      codes: An array of the shape it stands for; of codes of 8 bits half as long along
        the last axis, since two are a word of 16 (`packing.py`), of 4 bits a quarter.
        Of parameters the last axes can be one.
      scales: One for each block along the last axis, or None.
      tops: What all scales of a row are parts of, or None.
      step: The number of times it was encoded, where rounding is by chance, or None.
    """

    codes: Any
    scales: Any
    tops: Any
    step: Any

    def __init__(self, codec: Codec, dtype: Any, parts: Sequence[Any]):
        if "flax.serialization" in sys.modules:
            _tell(sys.modules["flax.serialization"])
        self.codec, self.dtype = codec, dtype
        self.scales = self.tops = self.step = None
        for name, part in zip(codec.parts, parts, strict=True):
            setattr(self, name, part)

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
            return cls(codec, x.dtype, (codes, step))
        parts = [part for part in codec.encode(value) if part is not None]
        return cls(codec, x.dtype, parts)

    def decoded(self, param: Any = None) -> jax.Array:
        """The leaf that this stands for.

        Args:
          param: The bfloat16 parameter whose remainder this is, if it is one.
        """
        if isinstance(self.codec, Bfloat16Remainder):
            return self.codec.decode_with(self.codes, param)
        scales = [x for x in (self.scales, self.tops) if x is not None]
        value = self.codec.decode(self.codes, *scales)
        if self.codec.of_parameters and self.dtype == jnp.float16:
            # A scale that is rounded to bfloat16 may be more than float16 has.
            largest = jnp.finfo(jnp.float16).max.astype(np.float32)
            value = jnp.clip(value, -largest, largest)
        return value.astype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it stands for."""
        return self.codec.shape_of(tuple(self.codes.shape))

    @property
    def size(self) -> int:
        """The number of values it stands for."""
        return math.prod(self.shape)

    def __jax_array__(self) -> Any:
        """Raises: what is used as an array was not decoded by whoever was given it."""
        raise TypeError(f"{self!r} is used as an array. {self._who_decodes}")

    def __getattr__(self, name: str) -> NoReturn:
        """Raises: says who decodes it where an array would have the attribute."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        # What the class has is here if it found an attribute missing.
        if hasattr(jax.Array, name) and not hasattr(type(self), name):
            message = f"{self!r} is used as an array, for {name!r}. {self._who_decodes}"
        raise AttributeError(message)

    @property
    def _who_decodes(self) -> str:
        """Two sentences on how to have it as an array."""
        at_once = "oo.low_bit_decode(tree) decodes all of it at once"
        if self.codec.of_parameters:
            return (
                "Make it an argument of a function under oo.jit or oo.stream: they "
                "decode their arguments, not what functions close over. " + at_once
            )
        names = ", ".join(map(repr, PARAMETER_CODECS))
        return (
            f"{self.codec.name} is for optimizer state, and no step decodes it for a "
            f"model. Frozen parameters may have one of {names}. {at_once}"
        )

    def __repr__(self) -> str:
        if not hasattr(self.codes, "shape"):
            return f"Encoded({self.codec.name}, {self.codes!r})"
        kind = self.codec.name + ("" if self.codec.signed else ", no sign")
        return f"Encoded({kind}, {np.dtype(self.dtype)}{list(self.shape)})"

    def tree_flatten_with_keys(self) -> Any:
        """As `jax.tree_util.register_pytree_with_keys_class` has it."""
        names = [trees.CODES + self.codec.form, *self.codec.parts[1:]]
        values = [getattr(self, name) for name in self.codec.parts]
        keys = map(jax.tree_util.GetAttrKey, names)
        return list(zip(keys, values, strict=True)), (self.codec, np.dtype(self.dtype))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Encoded:
        """As `jax.tree_util.register_pytree_with_keys_class` has it."""
        codec, dtype = aux
        return cls(codec, dtype, children)


@functools.cache
def _tell(serialization: Any) -> None:
    """Has `flax.serialization` save an encoded leaf as the parts that it has.

    It takes any type that it does not know for a leaf, and can save no such leaf.
    """
    serialization.register_serialization_state(
        Encoded, _as_dict, _from_dict, override=True
    )


def _as_dict(x: Encoded) -> dict[str, Any]:
    parts, _ = x.tree_flatten_with_keys()
    return {key.name: part for key, part in parts}


def _from_dict(like: Encoded, saved: Any) -> Encoded:
    names = [*_as_dict(like)]
    if not isinstance(saved, dict) or sorted(saved) != sorted(names):
        found = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"{like!r} has the parts {', '.join(names)}; what was saved is {found}. "
            "Restore it into a tree of the form that was saved, and give the result to "
            "oo.place with the new rules"
        )
    return Encoded(like.codec, like.dtype, [saved[name] for name in names])


def is_encoded(x: Any) -> bool:
    """Returns whether a node is an encoded leaf."""
    return isinstance(x, Encoded)


def encoded_parts(tree: Any) -> dict[str, str]:
    """The paths of the parts of encoded leaves, each with what it is a part of."""
    nodes, _ = trees.flatten_with_path(tree, is_leaf=is_encoded)
    return {
        trees.path_string((*keys, *inside)): f"{x.codec.name} of {np.dtype(x.dtype)}"
        for keys, x in nodes
        if is_encoded(x)
        for inside, _ in trees.flatten_with_path(x)[0]
    }
