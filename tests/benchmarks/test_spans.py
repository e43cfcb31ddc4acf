"""What is read from a profile: transfers, kernels, and how they overlap."""

import pytest

from benchmarks.common.spans import kinds_of, shares
from optax_offload.aot._timeline import length


@pytest.mark.parametrize(
    ("name", "details", "kinds"),
    [
        (
            "MemcpyH2D",
            "kind_src:pinned kind_dst:device size:8 dest:0 async:1",
            ["load"],
        ),
        ("MemcpyD2H", "kind_src:device kind_dst:pinned size:8", ["store"]),
        ("MemcpyD2D", "kind_src:pinned kind_dst:device size:8", ["load"]),
        ("MemcpyD2D", "kind_src:pinned kind_dst:pinned size:8", ["load", "store"]),
        ("MemcpyD2D", "kind_src:device kind_dst:device size:8", ["kernel"]),
        ("MemcpyH2D", "", ["load"]),
        ("MemcpyD2H", "", ["store"]),
        ("MemcpyD2D", "", []),
        ("loop_add_fusion", "", ["kernel"]),
    ],
)
def test_kinds(name, details, kinds):
    """The memories decide: XLA copies slices by the call for copies on the device."""
    assert kinds_of(name, details) == kinds


def test_length_counts_overlaps_once():
    """Where spans overlap, time is counted once."""
    assert length([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert length([]) == 0


def test_shares():
    """Loads 0 to 4, stores 3 to 6, kernels 2 to 5."""
    found = shares({"load": [(0, 2), (2, 4)], "store": [(3, 6)], "kernel": [(2, 5)]})
    assert found == {
        "load_seconds": 4,
        "store_seconds": 3,
        "kernel_seconds": 3,
        "transfer_seconds": 6,
        "both_ways_seconds": 1,
        "hidden_seconds": 3,
        "hidden_share": 0.5,
    }


def test_no_transfers_have_no_share():
    """There is nothing to divide by."""
    assert "hidden_share" not in shares({"load": [], "store": [], "kernel": [(0, 1)]})
