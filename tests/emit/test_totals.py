"""Reductions over rows, summed up row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_jaxprs import on_device, program_of

from optax_offload._emit.sums import added, finished, identity
from optax_offload._rows import Sum, summed

ROWS = 4


def in_turn(fn, *arrays):
    """The last equation of a function, over rows that come one after the other."""
    program = program_of(fn, *(on_device(*x.shape, dtype=x.dtype) for x in arrays))
    position = len(program.equations) - 1
    axes = dict.fromkeys(program.invars, 0)
    e = program.equations[position]
    operands = summed(e, axes)
    assert set(operands) <= set(program.invars)
    s = Sum(position, tuple(operands))

    @jax.jit
    def total(*arrays):
        found = identity(program, s)
        for i in range(ROWS):
            rows = {
                v: x[i : i + 1] for v, x in zip(program.invars, arrays, strict=True)
            }
            found = added(program, s, found, rows, {})
        return found, finished(program, s, found)

    return total(*arrays)


SHAPE = ROWS, 3
FLOATS = np.linspace(-2, 3, 12, dtype=np.float32).reshape(SHAPE)
INTEGERS = np.arange(-5, 7, dtype=np.int32).reshape(SHAPE)
BOOLS = INTEGERS % 3 > 0


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jnp.sum, FLOATS),
        (jnp.sum, INTEGERS),
        (jnp.prod, FLOATS),
        (jnp.max, FLOATS),
        (jnp.max, -np.abs(FLOATS) - 1),
        (jnp.min, np.abs(FLOATS) + 1),
        (jnp.max, INTEGERS - 100),
        (jnp.min, INTEGERS + 100),
        (jnp.all, BOOLS),
        (jnp.all, BOOLS | True),
        (jnp.any, BOOLS),
        (jnp.any, BOOLS & False),
    ],
)
def test_as_the_reduction_of_all_rows(fn, x, axis):
    """Whatever the sign: a neutral element changes no total."""
    _, got = in_turn(lambda x: fn(x, axis=axis), x)
    want = fn(jnp.asarray(x), axis=axis)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_products_of_rows():
    """Rows of both that are contracted are added up, in the right place."""
    a, b = FLOATS, FLOATS[:, :2] + 1
    _, got = in_turn(
        lambda a, b: jax.lax.dot_general(a, b, (((0,), (0,)), ((), ()))), a, b
    )
    np.testing.assert_allclose(got, a.T @ b, rtol=1e-5)


def test_narrow_sums_are_taken_in_float32():
    """Of bfloat16 a total would not grow past 256; the result is bfloat16 again."""
    x = jnp.full((ROWS, 128), 1.0, jnp.bfloat16)
    total, got = in_turn(lambda x: jax.lax.reduce_sum(x, axes=(0, 1)), x)
    assert total.dtype == jnp.float32
    assert got.dtype == jnp.bfloat16
    assert float(got) == ROWS * 128
    largest, _ = in_turn(jnp.max, x)
    assert largest.dtype == jnp.bfloat16
