"""Tables of text."""

import pytest

from optax_offload._report import rendering
from optax_offload._report.rows import ReportRow


def test_columns_are_as_wide_as_their_cells():
    """Words to the left, numbers to the right, nothing at the ends of lines."""
    lines = [["name", "n", "why"], ["a", "1", ""], ["long name", "1000", "x"]]
    assert rendering.table(lines, right=(1,)) == (
        "name          n  why\n"
        "--------------------\n"
        "a             1\n"
        "long name  1000  x"
    )


def test_a_row_says_where_a_leaf_is():
    """A misplaced one is marked; what has no path, kind or shape has a word for it."""
    row = ReportRow(
        "", (), "float32", 4000, 4000, 4000, "pinned_host", "device", "rule 0"
    )
    text = rendering.text(
        [row], [["total", "device", "3.91 KiB", "3.91 KiB", "3.91 KiB"]], ""
    )
    line = text.splitlines()[2]
    for cell in (
        "(the tree itself)",
        "scalar",
        "3.91 KiB",
        "pinned_host",
        "device (!)",
    ):
        assert cell in line
    assert "rule 0" in line
    assert rendering.text([], [], "host: 3").endswith("\n\nhost: 3")


def test_bars_of_a_subtree_named_total(tmp_path):
    """Names may be the same: each has a bar."""
    pytest.importorskip("matplotlib")
    bars = [("total", {"device": 2**20}), ("total", {"device": 2**21, "disk": 5})]
    rendering.plot(bars, tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.count("<!-- total -->") == 2
    assert "<!-- disk -->" in drawn
