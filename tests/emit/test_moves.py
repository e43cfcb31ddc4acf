"""Rows of values at rest: taken, and put back in their place."""

import jax
import numpy as np
import pytest

from optax_offload._emit.moves import rows_of, with_rows

X = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(("axis", "first", "count"), [(0, 1, 2), (1, 3, 2), (0, 3, 1)])
def test_rows(axis, first, count):
    """They are along an axis, from a position; the others stay as they are."""
    rows = np.take(X, range(first, first + count), axis)
    got = jax.jit(lambda x, i: rows_of(x, i, count, axis))(X, first)
    np.testing.assert_array_equal(got, rows)
    changed = jax.jit(lambda x, r, i: with_rows(x, r, i, axis))(X, -rows, first)
    inside = np.zeros(X.shape, bool)
    inside[(slice(None),) * axis + (slice(first, first + count),)] = True
    np.testing.assert_array_equal(changed, np.where(inside, -X, X))
