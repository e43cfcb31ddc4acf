"""Random keys in loops that run once, and in functions with rules of their own.

`jax.debug_key_reuse` takes every loop for one that runs again, in which a key from
outside is used twice, and a key that comes out of a function whose rules it does not
know for a used one. So these have the data of keys, and make them keys inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax

from optax_offload._places import memory
from optax_offload._program.graph import Atom

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of random keys in a tree.

    Attributes:
      impls: The implementation of each key, by the position of its leaf.
    """

    impls: Mapping[int, Any]

    @classmethod
    def of(cls, tree: Any) -> Places:
        """The places of a tree's keys."""
        leaves = enumerate(jax.tree.leaves(tree))
        return cls({i: jax.random.key_impl(x) for i, x in leaves if memory.is_key(x)})

    @classmethod
    def of_types(cls, atoms: Sequence[Atom]) -> Places:
        """The places of keys among variables."""
        found: dict[int, Any] = {}
        for i, a in enumerate(atoms):
            if memory.is_key(a.aval):
                jax.eval_shape(
                    lambda x, i=i: found.update({i: jax.random.key_impl(x)}), a.aval
                )
        return cls(found)

    def keys(self, data: T) -> T:
        """A tree with keys where it has their data."""
        leaves, structure = jax.tree.flatten(data)
        for i, impl in self.impls.items():
            leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
        return jax.tree.unflatten(structure, leaves)


def key_data(tree: T) -> T:
    """A tree with the data of its keys."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if memory.is_key(x) else x, tree
    )
