"""The picture of README, and the pages that tell its numbers."""

import json
import pathlib

import pytest

from benchmarks.memory import picture

ROOT = pathlib.Path(__file__).parent.parent.parent
KEPT = json.loads((ROOT / "benchmarks" / "results" / "picture.json").read_text())
MIB = 2**20


@pytest.mark.parametrize("mode", picture.BARS)
def test_parts_add_up_and_the_table_has_them(mode):
    """To the peak; and the row of the results' table is that of the kept file."""
    row = KEPT["modes"][mode]
    assert sum(row["parts"].values()) == row["peak_bytes"]
    sizes = [row["peak_bytes"], *row["parts"].values(), row["host_bytes"]]
    cells = " | ".join(f"{size / MIB:.1f}" for size in sizes)
    assert f"| {cells} |" in (ROOT / "docs" / "results.md").read_text()


def test_readme_has_the_numbers_of_its_picture():
    """Peaks in MiB, and the version of JAX that they were compiled with."""
    text = (ROOT / "README.md").read_text()
    for mode in ("no offload", "ours", "fused", "residuals"):
        assert f"{KEPT['modes'][mode]['peak_bytes'] / MIB:.0f}" in text
    assert f"JAX {KEPT['jax']}" in text


def test_a_picture_is_drawn(tmp_path):
    """From what was kept, without compiling."""
    picture.plot(KEPT["modes"], tmp_path / "peak.png")
    assert (tmp_path / "peak.png").stat().st_size
