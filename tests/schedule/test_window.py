"""The model of the link, and the window."""

import pytest

from optax_offload._host.link import LINK, Link
from optax_offload._schedule.updates.window import Window, waits, window

MIB = 2**20


def test_link():
    """Bytes and seconds, by one bandwidth and one latency."""
    link = Link(bytes_per_second=1e9, latency_seconds=1e-3)
    assert link.latency_bytes == 1_000_000
    assert link.bytes_in(2.0) == 2_000_000_000
    assert link.seconds(5e8) == pytest.approx(0.501)
    assert link.seconds(5e8, transfers=10) == pytest.approx(0.51)
    assert LINK.latency_bytes == MIB // 2


@pytest.mark.parametrize(
    ("asked", "state", "nbytes"),
    [(7, 2**40, 7), (None, 0, 16), (None, 2**29, 32), (None, 2**40, 64)],
)
def test_window(asked, state, nbytes):
    """As asked; else a share of the state, within bounds."""
    chosen = window(asked, state)
    assert isinstance(chosen, Window)
    assert chosen.nbytes == (nbytes if asked else nbytes * MIB)
    assert chosen.reason.startswith("as asked" if asked else "a sixteenth")


@pytest.mark.parametrize(
    ("sizes", "most", "want"),
    [
        ([], 1, ()),
        ([5, 5, 5], 10, (0, 0, 1)),
        ([5, 5, 5], 1, (0, 1, 2)),
        ([1, 9, 1, 1], 10, (0, 0, 1, 2)),
        ([20, 1, 1], 10, (0, 1, 1)),
    ],
)
def test_waits(sizes, most, want):
    """As many from the first are gone as it takes; never itself."""
    assert waits(sizes, most) == want
