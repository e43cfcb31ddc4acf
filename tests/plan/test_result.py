"""Rule files, pictures, and the error where nothing fits."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._plan import state
from optax_offload._plan.cost import Cost
from optax_offload._plan.result import does_not_fit, rule_file_text
from optax_offload._plan.search import CompiledCandidate

MIB, GIB = 2**20, 2**30

TEXT = st.text(st.characters(codec="utf-8"), min_size=1).map(re.escape)
RULES = st.builds(
    oo.Rule,
    TEXT,
    st.sampled_from(["device", "pinned_host"]),
    min_bytes=st.integers(0, 2**40),
    slice_axis=st.sampled_from(["auto", None, 0, 3]),
    optional=st.booleans(),
)


@given(st.lists(RULES, min_size=1, max_size=4), st.none() | st.integers(1, 2**40), TEXT)
def test_rule_files_are_read_as_written(tmp_path_factory, rules, window_bytes, text):
    """Whatever the rules, and whatever is said about them."""
    config = oo.OffloadConfig(rules, window_bytes)
    file = tmp_path_factory.mktemp("rules") / "rules.toml"
    summary = [" ".join(text.split())]
    file.write_text(rule_file_text(config, (), (), summary), encoding="utf-8")
    assert oo.load_config(file) == config


def test_each_rule_has_a_comment():
    """What it moves, why and what it saves."""
    leaves = [state.Leaf(f"0/mu/w{i}", MIB, MIB // 4, None, False) for i in (0, 1)]
    (pattern,) = state.leaf_patterns(leaves)
    config = oo.OffloadConfig([oo.Rule("0/nu/.*", "device"), oo.Rule(pattern.pattern)])
    text = rule_file_text(config, [pattern], (), ["for h100"])
    assert text == (
        "# Rules for optax_offload.offload, found by `optax-offload fit`:\n"
        "# for h100\n\n"
        "# Given.\n"
        "[[rules]]\n"
        "pattern = '0/nu/.*'\n"
        'memory_kind = "device"\n\n'
        "# Moves 2 leaves, the first 0/mu/w0: 512.00 KiB off each device.\n"
        "# Why: updated whole: the largest leaf comes back for that.\n"
        "[[rules]]\n"
        r"pattern = '\d+/mu/w\d+'" + "\n"
    )


H100 = aot.Target("h100")


def error(state=0, used=100, **parts):
    """The error of a step that needs so many GiB of 80, with all state moved."""
    named = {name: n * GIB for name, n in parts.items()}
    everything = CompiledCandidate(0, used * GIB, None, False, 1.0, named)
    return does_not_fit(H100, 80 * GIB, everything, state * GIB)


def test_numbers():
    """By how much, of how much, and of what it is made."""
    found = error(parameters=20, gradients=20, activations=60, state=0)
    assert "on 'h100' even with all state moved: short by 20.00 GiB of 80.00" in str(
        found
    )
    assert "It needs 100.00 GiB: parameters 20.00 GiB, gradients 20.00" in str(found)
    assert (found.used_bytes, found.limit_bytes) == (100 * GIB, 80 * GIB)


def test_only_what_is_enough_is_proposed():
    """More devices always are; the rest where they free more than is missing."""
    devices = "- more devices: parameters, gradients and batch sharded over at least 2"
    few = str(error(parameters=10, gradients=10, activations=10))
    assert few.split("What would help:\n")[1].startswith(devices)
    remat = str(error(activations=60))
    assert "would have to go to 40.00 GiB" in remat
    assert "bfloat16 parameters" not in remat
    assert "- bfloat16 parameters" in str(error(parameters=30, gradients=30))
    assert "rules that let go of the 30.00 GiB of state" in str(error(state=30))
    assert "rules that let go" not in str(error(state=10))


def test_state_that_is_loaded_at_once():
    """It is no activation, and remat would not help."""
    text = str(error(**{"state loaded at once": 60}))
    assert "- an optimizer that nothing joins all state of: 60.00 GiB of it is" in text
    assert "remat" not in text
    assert "joins" not in str(error(**{"state loaded at once": 10}))


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
