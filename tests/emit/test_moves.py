"""Rows of values at rest: taken, and put back in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_offload._emit.moves import TILE, host_buffer, rows_of, with_rows
from optax_offload._places import memory

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


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((64, 256), TILE),
        ((4, 64, 256), (4, *TILE)),
        ((2, 3, 64, 256), (2, 3, *TILE)),
        # Laid out with the first axis beside the last: 14 rows would not fill a tile.
        ((64, 14, 14, 256), (TILE[0], 14, 14, TILE[1])),
    ],
)
def test_tiles_of_a_buffer_are_of_all_other_positions(shape, want):
    """Of some alone a TPU's compiler fails a check of its own, and ends the process."""
    aval = memory.host_type(jnp.zeros(shape))
    closed = jax.make_jaxpr(lambda: host_buffer(aval, 1, 0.0))()
    (tiles,) = (
        e.invars[1].aval.shape
        for e in closed.eqns
        if e.primitive.name == "dynamic_update_slice"
    )
    assert tiles == want
