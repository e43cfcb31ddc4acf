"""The picture of a plan."""

import sys

import pytest

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._plan.cost import Cost

GIB = 2**30
PARTS = ("parameters", "gradients", "activations", "state", "other")


def planned():
    """A plan that brings 15 GiB down to 9."""
    sizes = dict(zip(PARTS, (3 * GIB, 3 * GIB, 2 * GIB, 6 * GIB, GIB), strict=True))
    before = _plan.CompiledCandidate(0, 15 * GIB, None, False, 1.0, sizes)
    less = sizes | {"state": 0}
    after = _plan.CompiledCandidate(6 * GIB, 9 * GIB, None, True, 1.0, less)
    return oo.Plan(
        target=aot.Target("v5e:2x2"),
        budget_bytes=10 * GIB,
        config=oo.OffloadConfig([oo.Rule(".*")]),
        moved=(),
        before=before,
        after=after,
        compiled=(before, after),
        cost=Cost(6 * GIB, 1e9, "", 1.0, 1.0, ""),
        environment={},
    )


def test_the_picture_has_parts_peaks_and_the_budget(tmp_path):
    """In a format that can be read back."""
    pytest.importorskip("matplotlib")
    _plan.save_plot(planned(), tmp_path / "peak.svg")
    drawn = (tmp_path / "peak.svg").read_text()
    for text in (*PARTS, "budget", "as given", "with the plan", "15.0", "9.0", "v5e"):
        assert text in drawn, text
    _plan.save_plot(planned(), tmp_path / "peak.png")
    assert (tmp_path / "peak.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch, tmp_path):
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-offload\[plot\]'"):
        _plan.save_plot(planned(), tmp_path / "peak.png")
