"""The chips: one row each, and nothing in it that cannot be."""

import pathlib
import re

import pytest

from optax_offload import aot
from optax_offload._host.link import LINK
from optax_offload.aot import chips

ROOT = pathlib.Path(__file__).parents[2]
each_chip = pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=chips.CHIPS)


@each_chip
def test_figures_are_plausible_and_have_sources(chip):
    """Each is of the right size for its unit, and says where it is from."""
    assert 2**33 <= chip.memory_bytes < 2**38
    assert 1e10 < chip.link.bytes_per_second < 1e12
    if not chip.link_source.startswith("measured"):
        assert chip.link.latency_seconds == LINK.latency_seconds
    assert 5e12 < chip.flops_per_second < 1e16
    assert 5e12 < chip.float32_flops_per_second <= chip.flops_per_second
    assert 1e11 < chip.memory_bytes_per_second < 1e13
    sources = [v for name, v in vars(chip).items() if name.endswith("_source")]
    assert len(sources) == 4
    assert all(len(source) > 10 for source in sources)


@each_chip
def test_a_target_finds_its_chip(chip):
    """With however many devices."""
    size = "" if chip.platform == "gpu" else ":" + "x".join("2" * chip.dimensions)
    assert aot.Target(chip.name).chip is aot.Target(chip.name + size).chip is chip
    assert aot.Target(chip.name).platform == chip.platform
    assert aot.Target(chip.name).memory_bytes == chip.memory_bytes


def test_no_figure_is_repeated():
    """Memory sizes and bandwidths of chips stand in one file of the package."""
    figures = {
        f"{number:d}"
        for chip in chips.GPUS.values()
        for number in (chip.memory_bytes, int(chip.memory_bytes_per_second / 1e9))
    }
    figures |= {str(int(x.memory_bytes_per_second / 1e9)) for x in chips.TPUS.values()}
    files = [*ROOT.glob("optax_offload/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(files) > 40
    repeated = {
        (path.name, number)
        for path in files
        if path.name != "chips.py"
        for number in re.findall(r"\b\d{3,}\b", path.read_text())
        if number
        in figures
        - {"300", "320", "600", "768", "1200"}  # Round, and so in other uses.
    }
    assert not repeated
