"""What an update on the host would take, by arithmetic."""

import pytest

from benchmarks.memory.host_update import HOSTS, Host, costs
from optax_offload import aot


def machine(link_share, devices=1):
    """A host whose memory is so many times as fast as the link of an H100."""
    chip = aot.CHIPS["h100"]
    memory = link_share * chip.link.bytes_per_second
    return Host("a machine", chip, memory, "made up", devices)


def test_the_link_or_the_memory_is_the_bound():
    """Streaming: 8 bytes each way, 16 in memory. The host: 2 each way, and 24."""
    fast, slow = costs(machine(100), 1e9, 2), costs(machine(1), 1e9, 2)
    assert fast["streaming"] == pytest.approx(8e9 / (64e9 * 0.8))
    assert fast["on the host"] == pytest.approx(2e9 / (64e9 * 0.8))
    assert slow["streaming"] == pytest.approx(16e9 / (64e9 * 0.8))
    assert slow["on the host"] == pytest.approx(24e9 / (64e9 * 0.6))
    assert fast["in 8 bits"] == pytest.approx(2.03125e9 / (64e9 * 0.8))


def test_state_and_memory_are_shared_by_the_devices():
    """Each has its part of both, so that only the link gains."""
    alone, one_of_8 = costs(machine(1), 8e9, 2), costs(machine(1, 8), 8e9, 2)
    assert one_of_8["on the host"] == pytest.approx(alone["on the host"])
    fast, one_of_fast = costs(machine(100), 8e9, 2), costs(machine(100, 8), 8e9, 2)
    assert one_of_fast["streaming"] == pytest.approx(fast["streaming"] / 8)


def test_sources_are_given():
    """Every machine says where its memory's bandwidth is from."""
    assert all("channels of DDR" in host.memory_source for host in HOSTS)
