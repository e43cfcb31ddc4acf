"""What an update on the host would take: arithmetic, and the bytes of a program."""

import types

import pytest

from benchmarks.memory.host_update import HOSTS, Host, Traffic, costs, traffic
from optax_offload import aot

# Two million floats a gradient and a moment; the one in device memory, and copied to
# the host; an update in device memory; new state in a buffer of its own, and copied.
PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (g: f32[2097152], mu: f32[2097152]) -> (f32[2097152], f32[2097152]) {
  %g = f32[2097152]{0} parameter(0)
  %mu = f32[2097152]{0:S(5)} parameter(1)
  %start = (f32[2097152]{0:S(5)}, f32[2097152]{0}, u32[]) copy-start(%g)
  %done = f32[2097152]{0:S(5)} copy-done(%start)
  %call = ((f32[2097152]{0:S(5)}, f32[2097152]{0:S(5)}), (f32[2097152]{0:S(5)}, f32[2097152]{0}), u32[]) custom-call-start(%done, %mu), async_execution_thread="host", custom_call_target="HostExecute"
  %called = (f32[2097152]{0:S(5)}, f32[2097152]{0}) custom-call-done(%call)
  %new = f32[2097152]{0:S(5)} get-tuple-element(%called), index=0
  %u = f32[2097152]{0} get-tuple-element(%called), index=1
  %copy = f32[2097152]{0:S(5)} copy(%new)
  ROOT %results = (f32[2097152]{0}, f32[2097152]{0:S(5)}) tuple(%u, %copy)
}
"""  # noqa: E501


def test_what_a_host_computation_reads_is_not_moved():
    """The gradient is, and the update; state only where a copy moves it."""
    compiled = types.SimpleNamespace(as_text=lambda: PROGRAM)
    size = 2**23
    assert traffic(compiled) == Traffic(down=size, up=size, within_host=size)


def machine(link_share, devices=1):
    """A host whose memory is so many times as fast as the link of an H100."""
    chip = aot.CHIPS["h100"]
    memory = link_share * chip.link.bytes_per_second
    return Host("a machine", chip, memory, "made up", devices)


def test_the_link_or_the_memory_is_the_bound():
    """Streaming: 8 bytes each way, 16 in memory. The host: 2 each way, and 24."""
    fast, slow = costs(machine(100), 1e9, 2), costs(machine(1), 1e9, 2)
    assert fast.streaming == pytest.approx(8e9 / (64e9 * 0.8))
    assert fast.on_host == pytest.approx(2e9 / (64e9 * 0.8))
    assert slow.streaming == pytest.approx(16e9 / (64e9 * 0.8))
    assert slow.on_host == pytest.approx(24e9 / (64e9 * 0.6))
    assert fast.in_8_bits == pytest.approx(2.03125e9 / (64e9 * 0.8))


def test_state_and_memory_are_shared_by_the_devices():
    """Each has its part of both, so that only the link gains."""
    alone, one_of_8 = costs(machine(1), 8e9, 2), costs(machine(1, 8), 8e9, 2)
    assert one_of_8.on_host == pytest.approx(alone.on_host)
    fast, one_of_fast = costs(machine(100), 8e9, 2), costs(machine(100, 8), 8e9, 2)
    assert one_of_fast.streaming == pytest.approx(fast.streaming / 8)


def test_sources_are_given():
    """Every machine says where its memory's bandwidth is from."""
    assert all("channels of DDR" in host.memory_source for host in HOSTS)
