"""How far the results of two steps are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ulps(got: Any, want: Any) -> float:
    """The largest difference, in units of the last place of each leaf's maximum.

    It is infinite where leaves that are no floats differ, and no number where one is
    none.
    """

    def of_leaf(x: Any, y: Any) -> float:
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return 0.0 if np.array_equal(x, y) else float("inf")
        unit = float(jnp.finfo(y.dtype).eps)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(np.max(np.abs(y), initial=0), np.finfo(np.float64).tiny)
        return np.max(np.abs(x - y), initial=0) / scale / unit

    return _largest(of_leaf, got, want)


def mean(got: Any, want: Any) -> float:
    """The largest of the leaves' mean differences."""

    def of_leaf(x: Any, y: Any) -> float:
        return np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).mean()

    return _largest(of_leaf, got, want)


def _largest(of_leaf: Callable[[Any, Any], float], got: Any, want: Any) -> float:
    leaves = jax.tree.leaves(jax.tree.map(of_leaf, got, want))
    # Of what is no number, no number, as `max` would not have it.
    return float(np.max(leaves, initial=0))
