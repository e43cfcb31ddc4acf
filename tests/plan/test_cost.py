"""Budgets, what a process sets, and the cost of moving."""

import dataclasses

import pytest

from optax_offload import aot
from optax_offload._plan import cost

COST = cost.Cost(
    bytes_each_way=40 * 10**9,
    link_bytes_per_second=50e9,
    link_source="measured",
    flops=200e12,
    flops_per_second=1000e12,
    flops_source="a document",
    tokens=4096,
    link_utilization=0.8,
    compute_utilization=0.4,
)


def test_by_hand():
    """40 GB at 40 GB/s is a second, 200 TFLOP at 400 TFLOP/s half of one."""
    assert COST.link_seconds == pytest.approx(1.0)
    assert COST.compute_seconds == pytest.approx(0.5)
    assert COST.slowdown() == pytest.approx(3.0)
    assert COST.slowdown_if_hidden() == pytest.approx(2.0)


def test_larger_batches_make_it_vanish():
    """The link does not grow with the batch."""
    assert COST.slowdown(10) == pytest.approx(1.2)
    assert COST.slowdown_if_hidden(10) == 1.0
    slowdowns = [now for _, now, _ in COST.table()]
    assert slowdowns == sorted(slowdowns, reverse=True)


def test_each_line_has_its_inputs():
    """So that a person can follow it."""
    link, compute, now, hidden = COST.lines()
    for text in ("37.25 GiB each way", "50 GB/s", "0.80", "1.000 s", "measured"):
        assert text in link
    for text in ("200.0 TFLOP", "1000 TFLOP/s", "0.40", "0.500 s", "a document"):
        assert text in compute
    assert "(0.500 + 1.000) s" in now
    assert "3.00 times" in now
    assert "max(0.500, 1.000) s: 2.00 times" in hidden


def test_fused():
    """The transfers may be hidden; backward passes that run twice never are."""
    fused = dataclasses.replace(COST, fused=True, flops_again=40e12)
    assert fused.again_seconds == pytest.approx(0.1)
    assert fused.slowdown() == pytest.approx(3.2)
    assert fused.slowdown_if_hidden(10) == pytest.approx(1.2)
    _, _, again, most, hidden = fused.lines()
    assert again == "backward passes that run twice: 40.0 TFLOP more: 0.100 s"
    assert "at most: (0.500 + 0.100 + 1.000) s, the transfers if none is hidden" in most
    assert "max(0.500 + 0.100, 1.000) s: 2.00 times" in hidden


def test_nothing_moved_costs_nothing():
    """And a step of no products is all link."""
    still = cost.Cost(0, 1.0, "", 1.0, 1.0, "")
    assert (still.slowdown(), still.slowdown_if_hidden()) == (1.0, 1.0)
    assert "nothing is moved" in str(still)
    assert cost.Cost(1, 1.0, "", 0.0, 1.0, "").slowdown() == float("inf")
    assert cost.Cost(0, 1.0, "", 0.0, 1.0, "").slowdown() == 1.0


H100 = aot.Target("h100")


def test_default_budget():
    """The memory less the reserve that the docstring names."""
    assert cost.default_budget_bytes(H100) == int(84942979072 * 0.9)
    v5e = aot.Target("v5e:2x2")
    assert cost.default_budget_bytes(v5e) == int(v5e.memory_bytes * 0.98)


@pytest.mark.parametrize("bytes_", [0, -1, 84942979073])
def test_budgets_that_are_none(bytes_):
    """The message has what is allowed."""
    message = (
        rf"budget_bytes is {bytes_}; it must be at least 1 and at most what 'h100' "
        r"has, 84942979072 \(79\.11 GiB\)"
    )
    with pytest.raises(ValueError, match=message):
        cost.checked_budget_bytes(bytes_, H100)


def test_a_budget_is_taken_as_it_is():
    """Without one, the default."""
    assert cost.checked_budget_bytes(7, H100) == 7
    assert cost.checked_budget_bytes(None, H100) == cost.default_budget_bytes(H100)


@pytest.mark.parametrize(
    ("target", "used", "moved", "expected"),
    [
        ("h100", 0.5, 0, {}),
        ("h100", 0.74, 0, {"XLA_CLIENT_MEM_FRACTION": "0.76"}),
        ("h100", 0.895, 0, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ("h100", 0.5, 90, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "99"}),
        ("h100:8", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("h100:16", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("v5e:2x2", 0.9, 90, {}),
    ],
)
def test_environment(target, used, moved, expected):
    """What JAX does not give by itself has to be asked for."""
    target = aot.Target(target)
    used_bytes = round(used * target.memory_bytes)
    assert cost.environment(target, used_bytes, moved * 2**30) == expected
