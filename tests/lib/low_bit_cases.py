"""Parameters whose state is large enough to be encoded, and states taken apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import committed

from optax_offload._ground import trees
from optax_offload._low_bit import Encoded

MOMENTS = r".*/(mu|nu)/.*"
# The second update is of state that was encoded once. Relative to the norm of the plain
# one; about twice what was seen.
BOUNDS = {
    "int8": 0.02,
    "int8-companded": 0.06,
    "float8": 0.05,
    "bfloat16": 0.005,
    "bfloat16-stochastic": 0.01,
}
ENCODED_SHAPES = {"embed": (32, 256), "kernel": (2, 16, 512)}


def make_params(dtype: Any = jnp.float32) -> Any:
    """A matrix and a stacked leaf that are encoded, and a vector that is not."""
    keys = jax.random.split(jax.random.key(7), 2)
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, ENCODED_SHAPES.items(), strict=True)
    }
    params = {"embed": params["embed"], "layers": {"kernel": params["kernel"]}}
    params["layers"]["bias"] = jnp.ones(24)
    return committed(jax.tree.map(lambda x: x.astype(dtype), params))


def encoded_leaves(state: Any) -> dict[str, Encoded]:
    """The encoded leaves of a state, by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, Encoded)
    )
    return {trees.path_string(keys): x for keys, x in leaves if isinstance(x, Encoded)}


def distance(got: Any, want: Any) -> float:
    """The norm of the difference of two trees, over that of the second."""
    got, want = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)])
        for t in (got, want)
    )
    norm = float(np.linalg.norm(got - want))
    return norm / max(float(np.linalg.norm(want)), 1e-30)


def described(tree: Any) -> list[Any]:
    """The shape and dtype of each leaf."""
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
