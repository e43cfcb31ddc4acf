"""Which residuals a TPU stores as rows of stacks, of segments alone."""

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._schedule import Segment
from optax_offload._schedule.turns.segments import StackRow, in_stacks


def residuals(count, *shape, dtype=jnp.float32):
    """Variables of a type."""
    return [jex.Var(jax.core.ShapedArray(shape, dtype)) for _ in range(count)]


def segment(stores=(), loads=()):
    """A segment that stores some and loads others."""
    return Segment((), {v: v for v in loads}, stores=tuple(stores))


def test_like_residuals_are_rows_of_one_stack():
    """In the order in which they are stored, and those of another type of another."""
    a, b, c = residuals(3, 8, 128)
    others = residuals(2, 4, 128)
    stores = [[a, others[0]], [b], [c, others[1]]]
    turns = [*map(segment, stores), segment(), segment(loads=[c, b, a, *others])]
    assert in_stacks(turns) == {
        a: StackRow(a, 0, 3),
        b: StackRow(a, 1, 3),
        c: StackRow(a, 2, 3),
        others[0]: StackRow(others[0], 0, 2),
        others[1]: StackRow(others[0], 1, 2),
    }


def test_no_row_is_stored_in_what_is_read():
    """All of it would be copied: the residuals of a second pass have a stack."""
    first, second = residuals(2, 8, 128), residuals(2, 8, 128)
    a_pass = [[[v] for v in some] for some in (first, second)]
    turns = [
        *map(segment, a_pass[0]),
        segment(),
        segment([second[0]], first),  # One stored beside what is read.
        segment([second[1]]),
        segment(),
        segment(loads=second),
    ]
    found = in_stacks(turns)
    assert found == {
        v: StackRow(some[0], k, 2)
        for some in (first, second)
        for k, v in enumerate(some)
    }
    # A turn loads what the next one takes.
    ahead = [segment([first[0]]), segment([first[1]]), segment(loads=first[:1])]
    assert not in_stacks(ahead)


def test_what_has_no_like_rests_alone():
    """So do vectors, and rows that a TPU cannot move."""
    few = [*residuals(1, 8, 128), *residuals(2, 128)]
    packed = residuals(2, 3, 1, dtype=jnp.int8)
    assert not in_stacks([segment([*few, *packed]), segment(), segment(loads=few)])


def test_what_is_laid_out_in_another_order_rests_alone():
    """In a loop a TPU's compiler takes a stack for row-major, and finds that it is not.

    Of the heads of attention the axis of tokens fills the columns, and not that of 64.
    """
    heads = residuals(2, 4, 256, 16, 64)
    turns = [*map(segment, ([heads[0]], [heads[1]])), segment(), segment(loads=heads)]
    assert not in_stacks(turns)
