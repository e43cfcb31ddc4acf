"""The figures of the census, of programs on a modeled device."""

import pytest
from hlo_texts import LOOP, NOTED, TOP_LEVEL, WAITING, gpu_slices

from benchmarks.link.census import how, summary
from optax_offload._host.link import Link
from optax_offload.aot._timeline import Model, TimedMove, Timeline

# A transfer of 4 MiB takes 1 ms and 0.1 ms of latency, an operation that reads and
# writes as much 1 ms.
MODEL = Model(
    link=Link(bytes_per_second=2**22 * 1e3, latency_seconds=1e-4),
    memory_bytes_per_second=2**23 * 1e3,
    flops_per_second=1e12,
)


def figures(text, *names):
    """These figures of a program."""
    row = summary(Timeline.of(text, MODEL))
    return [row[name] for name in names]


def test_a_store_beside_a_load():
    """Each direction has two transfers; 0.1 ms of one of each is at once."""
    names = ("synchronous", "copies", "kernels", "most_in_flight")
    assert figures(TOP_LEVEL, *names) == [0, 4, 0, (2, 2, 2)]
    names = ("efficiency", "both_ways", "exposed_seconds", "over_floor")
    wanted = [2 / 4.3, 0.1 / 2.2, 2.3e-3, 4.3 / 2]
    assert figures(TOP_LEVEL, *names) == pytest.approx(wanted)


def test_waiting_at_once():
    """Of a load, a store and a copy within host memory, and nothing at once."""
    names = ("synchronous", "both_ways", "efficiency")
    assert figures(WAITING, *names) == pytest.approx([3, 0, 1 / 3.3])


def test_a_loop():
    """In its place all its time counts, also what it computes."""
    efficiency, places = figures(LOOP, "efficiency", "places")
    assert efficiency == pytest.approx(1 / 2.2)
    (loop,) = places
    assert loop["efficiency"] == pytest.approx(1 / 3.2)
    moves = {"load: dynamic-slice": 1, "store: dynamic-update-slice": 1}
    assert loop["transfers"] == moves


@pytest.mark.parametrize(("position", "by"), [("", [2, 0]), (NOTED, [0, 2])])
def test_kernels_and_copy_engines(position, by):
    """Each transfer is one of theirs."""
    assert figures(gpu_slices(position), "kernels", "copies") == by


def test_a_transfer_for_a_person():
    """Fusions are kernels, and need no other word."""
    rest = (1, False)
    assert how(TimedMove("m", "load", "fusion", True, *rest)) == "load: sync fusion"
    kernel = TimedMove("m", "store", "copy", True, *rest)
    assert how(kernel) == "store: sync copy kernel"


def test_nothing_moves():
    """Then no link is used, well or not."""
    text = "HloModule jit_f, is_scheduled=true\n\nENTRY %main () -> () {\n"
    text += "  ROOT %a = () tuple()\n}\n"
    names = ("efficiency", "both_ways", "over_floor", "places")
    assert figures(text, *names) == [None, None, 1.0, []]
