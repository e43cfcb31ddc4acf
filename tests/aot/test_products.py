"""Counting matrix products, by axes that are short enough to count by hand."""

import pytest

from optax_offload.aot._model import Model
from optax_offload.aot._products import Flops, _Axis, _positions


def axis(inputs, kernel, outputs, **changes):
    """An axis of a convolution; without changes, of stride 1 and no padding."""
    plain = {"stride": 1, "padding": 0, "left_dilation": 1, "kernel_dilation": 1}
    return _Axis(inputs, kernel, outputs, **(plain | changes))


@pytest.mark.parametrize(
    ("found", "positions"),
    [
        (axis(5, 3, 3), 9),
        # Of padding on both sides the first and the last output miss one input.
        (axis(5, 3, 5, padding=1), 13),
        # On one side: outputs that begin there, not after the end.
        (axis(5, 3, 3, padding=2), 1 + 2 + 3),
        (axis(5, 1, 3, stride=2), 3),
        (axis(5, 2, 3, stride=2), 2 + 2 + 1),
        # A kernel whose positions are two apart: at 0 and 2, at 1 and 3, at 2 and 4.
        (axis(5, 2, 3, kernel_dilation=2), 6),
        (axis(5, 2, 5, kernel_dilation=3), 5 + 2),
        # Inputs that are two apart: every other position falls between them.
        (axis(3, 1, 5, left_dilation=2), 3),
        (axis(3, 2, 4, left_dilation=2), 4),
    ],
)
def test_positions_that_meet_an_input(found, positions):
    """Those of the window that fall into padding, or between inputs, are free."""
    assert _positions(found) == positions


def test_products_of_both_widths_take_their_time_one_after_the_other():
    """Each at its own rate; or the bytes, if these take longer."""
    model = Model(
        memory_bytes_per_second=10.0, flops_per_second=2.0, narrow_flops_per_second=4.0
    )
    assert model.compute_seconds(0, Flops(wide=6, narrow=8)) == 3 + 2
    assert model.compute_seconds(70, Flops(wide=6, narrow=8)) == 7
