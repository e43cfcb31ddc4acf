"""The modeled time of a compiled program, and what it says of itself."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import BRANCHES, TOP_LEVEL

from optax_offload import aot
from optax_offload.aot._timeline import Model, Timeline


class Program:
    """A compiled program, of which only the text is known."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        """As of `jax.stages.Compiled`."""
        return self.text


def test_figures_are_those_of_the_timeline():
    """Two leaves are loaded, computed with and stored, by the figures of a chip."""
    found = aot.step_time(Program(TOP_LEVEL), "v5e:1x1")
    expected = Timeline.of(TOP_LEVEL, Model.of(aot.Target("v5e:1x1")))
    assert found.seconds == expected.seconds
    assert found.compute_seconds == expected.compute_seconds
    assert found.load_bytes == found.store_bytes == 2 * 2**22
    assert found.load_seconds == pytest.approx(2 * (2**22 / 15e9 + 1e-5))
    assert found.link_seconds == expected.link_seconds
    waiting = expected.seconds - expected.compute_seconds
    assert found.waiting_seconds == waiting
    assert found.waiting_share == waiting / expected.seconds
    assert found.over_floor == expected.seconds / expected.least_seconds


def test_loads_are_no_stores():
    """Two leaves are loaded, and one is stored."""
    one = [x for x in TOP_LEVEL.splitlines() if "%store.b" not in x]
    text = "\n".join(one).replace("%stored.b", "%new.b")
    target = aot.Target("h100")
    found = aot.step_time(Program(text), target)
    link = target.chip.link
    assert (found.load_bytes, found.store_bytes) == (2 * 2**22, 2**22)
    assert found.load_seconds == pytest.approx(2 * link.seconds(2**22))
    assert found.store_seconds == pytest.approx(link.seconds(2**22))
    assert found.least_link_seconds == 2 * 2**22 / link.bytes_per_second
    assert found.compute_seconds < found.least_link_seconds
    assert found.over_floor == found.seconds / found.least_link_seconds
    assert str(found).splitlines()[1].startswith("loads 8.00 MiB in ")
    # The store begins as the first load ends, and one negation later.
    both = found.load_seconds + found.store_seconds - found.link_seconds
    assert 0.9 < both / found.store_seconds < 1


def test_a_measured_link():
    """It takes the place of the documented one, and its source says so."""
    documented = aot.step_time(Program(TOP_LEVEL), "h100")
    found = aot.step_time(Program(TOP_LEVEL), "h100", link_bytes_per_second=1e9)
    assert found.least_link_seconds == pytest.approx(2 * 2**22 / 1e9)
    assert found.least_link_seconds > documented.least_link_seconds
    assert str(found.assumptions[0]) == "link, each way: 1 GB/s (given)"
    assert "PCIe 5.0" in str(documented.assumptions[0])


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_no_bandwidth(rate):
    """It is refused, with what to give."""
    with pytest.raises(ValueError, match=r"must be more than 0, such as .*measure_lin"):
        aot.step_time(Program(TOP_LEVEL), "h100", link_bytes_per_second=rate)


def test_an_unknown_target():
    """The chips that are known are named."""
    with pytest.raises(ValueError, match="names no chip"):
        aot.step_time(Program(TOP_LEVEL), "abacus")


def test_text_says_that_it_is_a_model():
    """And all that it assumes, each with its source."""
    found = aot.step_time(Program(BRANCHES), aot.Target("h100"))
    lines = str(found).splitlines()
    assert lines[0].startswith("modeled, not measured: a step of ")
    assert lines[2:] == [f"assumed {a}" for a in found.assumptions]
    assert all(a.source for a in found.assumptions)


def test_a_program_without_anything():
    """No division by nothing."""
    empty = "HloModule jit_f, is_scheduled=true\n\nENTRY %main () -> () {\n"
    found = aot.step_time(Program(empty + "  ROOT %a = () tuple()\n}\n"), "h100")
    assert (found.seconds, found.waiting_share, found.over_floor) == (0.0, 0.0, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 1.0  # type: ignore[misc]


@pytest.mark.aot
def test_a_compiled_product():
    """It takes what its operations take at the chip's rate for float32."""
    target = aot.Target("h100")
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found = aot.step_time(aot.compile(jnp.dot, x, x, target=target), target)
    assert found.seconds == pytest.approx(2 * 4096**3 / 495e12, rel=0.01)
    assert found.link_seconds == 0.0
