"""Rule files, pictures, and the error where nothing fits."""

import dataclasses
import re
import sys

import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._places import rule_files
from optax_offload._places.step_options import Options
from optax_offload._plan import candidates, state
from optax_offload._plan.alternatives import (
    Alternatives,
    NothingFitsError,
    alternatives,
)
from optax_offload._plan.budget import Budget
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.search import PassedOver
from optax_offload._plan.variants import Variant

MIB, GIB = 2**20, 2**30

TEXT = st.text(st.characters(codec="utf-8"), min_size=1).map(re.escape)
COMMON = {
    "min_bytes": st.integers(0, 2**40),
    "slice_axis": st.sampled_from(["auto", None, 0, 3]),
    "optional": st.booleans(),
}
RULES = st.builds(oo.Rule, TEXT, st.just("device"), **COMMON) | st.builds(
    oo.Rule,
    TEXT,
    st.just("pinned_host"),
    **COMMON,
    fraction=st.floats(0, 1, exclude_min=True),
)


OPTIONS = st.builds(
    Options,
    st.booleans(),
    st.sampled_from(["auto", "host", "recompute", "device"]),
    st.sampled_from(["device", "host"]),
)


@settings(deadline=None)
@given(
    st.lists(RULES, min_size=1, max_size=4),
    st.none() | st.integers(1, 2**40),
    TEXT,
    st.lists(RULES, max_size=2),
    OPTIONS,
)
def test_rule_files_are_read_as_written(
    tmp_path_factory, rules, window_bytes, text, parameters, options
):
    """Whatever the rules, and whatever is said about them."""
    config = oo.OffloadConfig(rules, window_bytes, parameters, options)
    file = tmp_path_factory.mktemp("rules") / "rules.toml"
    summary = [" ".join(text.split())]
    written = rule_files.config_text(config, summary, [summary] * len(rules))
    file.write_text(written, encoding="utf-8")
    assert oo.load_config(file) == config


def test_each_rule_has_a_comment():
    """What it moves, why and what it saves."""
    leaves = [state.Leaf(f"0/mu/w{i}", MIB, MIB // 4, None, False) for i in (0, 1)]
    (pattern,) = state.leaf_patterns(leaves)
    config = oo.OffloadConfig([oo.Rule("0/nu/.*", "device"), oo.Rule(pattern.pattern)])
    plan = dataclasses.replace(planned(), config=config, moved=(pattern,))
    head, _, rules = plan.rule_file().partition("\n\n")
    assert head.splitlines()[:2] == [
        "# Rules for optax_offload.offload, found by `optax-offload fit`:",
        "# for h100:8, 80.00 GiB on each device",
    ]
    assert rules == (
        "# Given.\n"
        "[[rules]]\n"
        "pattern = '0/nu/.*'\n"
        'memory_kind = "device"\n\n'
        "# Moves 2 leaves, the first 0/mu/w0: 512.00 KiB off each device.\n"
        "# Why: updated whole, so the largest leaf visits the device.\n"
        "[[rules]]\n"
        r"pattern = '\d+/mu/w\d+'" + "\n"
    )


@pytest.mark.parametrize(
    ("residuals", "seconds", "told"),
    [(30, 1.0, False), (30, 2.0, True), (3, 2.0, False)],
)
def test_advice(residuals, seconds, told):
    """Of a plan that is slow, where residuals are much of the peak as given."""
    plan = planned()
    time = aot.StepTime(seconds, seconds, 0, 0, 0, 0, 0, 0, ())
    before = dataclasses.replace(
        plan.before,
        used_bytes=100 * MIB,
        parts={"residuals": residuals * MIB},
        time=dataclasses.replace(time, seconds=1.0),
    )
    after = dataclasses.replace(plan.after, time=time)
    plan = dataclasses.replace(plan, before=before, after=after)
    assert [x.startswith("residuals are 30.00 MiB of") for x in plan.advice()] == (
        [True] * told
    )


def test_a_plan_that_places_two_trees():
    """The file and the lines to paste name both, and what the codec is of."""
    leaf = state.Leaf("layers/w", MIB, MIB, 0, True, "nf4")
    plan = dataclasses.replace(
        planned(),
        config=oo.OffloadConfig(
            [oo.Rule(".*", "device")],
            parameters=[oo.Rule("layers/w", codec="nf4", optional=True)],
        ),
        frozen=tuple(state.leaf_patterns([leaf])),
        placed=("adapters", "base"),
    )
    placing = [f"{x} = oo.place({x}, config.parameters)" for x in ("adapters", "base")]
    assert plan.training()[-3:-1] == placing
    head, _, rules = plan.rule_file().partition("# Parameters: ")
    assert rules == (
        f"{'; '.join(placing)}.\n"
        "[[parameters]]\n"
        "pattern = 'layers/w'\n"
        "optional = true\n"
        'codec = "nf4"\n'
    )
    assert (
        "# kept as nf4: 1 leaf of frozen parameters, 1.00 MiB of each device. " in head
    )


H100 = aot.Target("h100")


def candidate(used, host=0, seconds=1.0, variant=None, **parts):
    """A candidate of so many GiB, that fits 80, and a host of 100."""
    named = {name: n * GIB for name, n in parts.items()}
    time = aot.StepTime(seconds, seconds, 0, 0, 0, host * GIB, 0, 0.0, ())
    return CompiledCandidate(
        moved_bytes=host * GIB,
        host_bytes=host * GIB,
        used_bytes=used * GIB,
        peak=None,
        fits=used <= 80 and host <= 100,
        seconds=1.0,
        parts=named,
        what=f"{used} GiB",
        time=time,
        variant=variant or Variant(window_bytes=used),
    )


def test_parameters_that_may_be_frozen():
    """The option is named where what is no parameter takes more than is missing."""
    others = {candidates.OTHERS: 110}
    assert "- --frozen REGEX (frozen=...), if" in str(error(candidate(120, **others)))
    assert "--frozen" not in str(error(candidate(120, **{candidates.OTHERS: 30})))


NO_TABLE = Alternatives((), (), ())


def error(*compiled, host=None):
    """The error where the device has 80 GiB."""
    budget = Budget(80 * GIB, host and host * GIB)
    return NothingFitsError(H100, budget, compiled, NO_TABLE)


def test_numbers():
    """By how much, of how much, and of what it is made."""
    parts = {"parameters": 20, "gradients": 20, "residuals": 60}
    found = error(candidate(120), candidate(100, **parts))
    text = str(found)
    assert (
        "does not fit on 'h100', whatever is moved. The smallest way (100 GiB)" in text
    )
    assert "100.00 GiB on each device, 20.00 GiB more than the budget of 80.00" in text
    assert "80.00 GiB: parameters 20.00 GiB, gradients 20.00 GiB" in text
    assert (found.used_bytes, found.limit_bytes) == (100 * GIB, 80 * GIB)
    assert found.alternatives is NO_TABLE
    assert "not tried" not in text
    assert "more than the 64.00 GiB of each host were not tried" in str(
        error(candidate(100), host=64)
    )


def test_only_what_is_enough_is_proposed():
    """More devices always are; the rest where they free more than is missing."""
    devices = "- at least 2 devices (now 1), with parameters, gradients and batch shar"
    few = str(error(candidate(100, parameters=10, gradients=10, residuals=10)))
    assert few.split("What would help:\n")[1].startswith(devices)
    remat = str(error(candidate(100, residuals=60)))
    assert "would have to shrink to 40.00 GiB" in remat
    assert "bfloat16 parameters" not in remat
    weights = candidate(100, parameters=30, gradients=30)
    assert "- bfloat16 parameters" in str(error(weights))
    assert "also move the 30.00 GiB of state" in str(error(candidate(100, state=30)))
    assert "rules that also move" not in str(error(candidate(100, state=10)))


def test_state_that_is_loaded_at_once():
    """It is no activation, and remat would not help."""
    name = "state loaded at once (by 'concatenate' in f)"
    text = str(error(candidate(100, **{name: 60})))
    assert (
        "- an optimizer that does not join all of its state: 60.00 GiB of it is" in text
    )
    assert "remat" not in text
    assert "- an optimizer" not in str(error(candidate(100, **{name: 10})))


def test_host_memory_that_is_too_small():
    """What fits the device is named, with what it needs of the host."""
    found = str(error(candidate(100), candidate(70, host=200), host=100))
    assert "too small: a step that fits 'h100' needs at least 200.00 GiB on" in found
    assert "(70 GiB), which has 100.00 GiB" in found
    assert "--allow" not in found
    budget = Budget(80 * GIB, 100 * GIB)
    compiled = [candidate(100), candidate(70, host=200)]
    codecs = ("int8", "bfloat16-remainder")
    for some in (compiled, compiled[:1]):  # Where no more was tried too.
        found = str(NothingFitsError(H100, budget, some, table(*some), codecs))
        assert "--allow int8,bfloat16-remainder (allow='int8,bfloat16-rem" in found


def test_the_way_that_needs_least_of_the_host_is_named():
    """Of those that fit the device, whatever they take of it."""
    ways = candidate(60, host=250), candidate(70, host=200), candidate(100, host=10)
    found = str(error(*ways, host=100))
    assert "needs at least 200.00 GiB on each host (70 GiB)" in found


def test_more_devices_are_those_of_all_hosts():
    """As many more as each has too little."""
    compiled = (candidate(100),)
    budget = Budget(80 * GIB)
    found = NothingFitsError(aot.Target("h100:8"), budget, compiled, NO_TABLE)
    assert "at least 10 devices (now 8)" in str(found)


def table(*compiled, passed=(), best=None):
    """The alternatives of these, with a device of 80 GiB and a host of 100."""
    return alternatives(compiled, passed, Budget(80 * GIB, 100 * GIB), H100, best)


def test_alternatives_say_why_they_are_not_chosen():
    """From what needs most to what needs least, the chosen one marked."""
    plain = candidate(120, seconds=2.0, variant=Variant())
    best, slow, host = (
        candidate(70, 50, 2.5),
        candidate(30, 60, 5.0),
        candidate(60, 110, 2.2),
    )
    found = table(plain, slow, best, host, best=best)
    assert [(row.what, row.chosen, row.why) for row in found.rows] == [
        ("120 GiB", False, "40.00 GiB more than each device has"),
        ("70 GiB", True, "chosen"),
        ("60 GiB", False, "10.00 GiB more than each host has"),
        ("30 GiB", False, "fits; 2.00 times the chosen"),
    ]
    assert [row.over_plain for row in found.rows] == [1.0, 1.25, 1.1, 2.5]
    assert found.rows[1].link_bytes == 50 * GIB
    assert [line.startswith("-> ") for line in str(found).splitlines()] == [
        row.chosen for row in found.rows
    ]
    assert found.cells()[1][:6] == (
        "70 GiB",
        "70.00 GiB",
        "50.00 GiB",
        "50.00 GiB",
        "2500 ms",
        "1.25",
    )


def test_alternatives_are_told_of_whole_hosts():
    """All of its devices count; of equal peaks first what moves less, both ways."""
    less, more = candidate(70, 50), candidate(70, 110, variant=Variant())
    assert less.time is not None
    both = dataclasses.replace(less.time, store_bytes=40 * GIB)
    less = dataclasses.replace(less, time=both)
    passed = [PassedOver(Variant(frozenset([0])), "host", 0, 120 * GIB, 1.0)]
    budget = Budget(80 * GIB, 100 * GIB)
    target = aot.Target("h100:8")
    found = alternatives([more, less], passed, budget, target, less)
    assert [row.link_bytes for row in found.rows] == [90 * GIB, 110 * GIB]
    assert [row.host_bytes for row in found.rows] == [8 * 50 * GIB, 8 * 110 * GIB]
    assert [row.why for row in found.rows] == [
        "chosen",
        "80.00 GiB more than each host has",
    ]
    (line,) = found.not_compiled
    assert "more than the 800.00 GiB of each host, at least 960.00 GiB" in line


def test_the_nearest_is_marked_where_nothing_fits():
    """By the larger of what is missing, as a share."""
    found = table(candidate(160), candidate(100), candidate(60, 150))
    assert [row.why for row in found.rows] == [
        "80.00 GiB more than each device has",
        "nearest: 20.00 GiB more than each device has",
        "50.00 GiB more than each host has",
    ]


def test_what_was_not_compiled_is_told():
    """A line for each reason, with the one that comes nearest."""
    every = Variant(frozenset([0]))
    passed = [
        PassedOver(every, "host", 0, 150 * GIB, 1.0),
        PassedOver(every, "host", 0, 120 * GIB, 1.0),
        PassedOver(every, "peak", 90 * GIB, 0, 1.0),
        PassedOver(every, "slower", 0, 0, 3.0),
        PassedOver(every, "more", 0, 0, 3.0),
    ]
    best = candidate(70, variant=Variant())
    found = table(best, passed=passed, best=best)
    assert found.not_compiled == (
        "not compiled: 2 ways that need more than the 100.00 GiB of each host, at "
        "least 120.00 GiB (such as: state on the host)",
        "not compiled: 1 way predicted to need at least 90.00 GiB on each device "
        "(state on the host)",
        "not compiled: 1 way that would move more than one that fits "
        "(state on the host)",
        "not compiled: 1 way predicted to be no faster than the chosen, at best "
        "3000 ms (state on the host)",
    )


PARTS = ("parameters", "state", "gradients", "residuals", "other temporaries")


def planned(**options):
    """A plan that brings 150 GiB down to 70."""
    before = candidate(150, seconds=2.0, parameters=100, state=50, variant=Variant())
    after = candidate(70, 80, 2.5, parameters=50, residuals=20)
    compiled = (before, after)
    return oo.Plan(
        target=aot.Target("h100:8"),
        budget_bytes=80 * GIB,
        config=oo.OffloadConfig([oo.Rule(".*")], parameters=["layers/.*"]),
        moved=(),
        before=before,
        after=after,
        compiled=compiled,
        alternatives=table(*compiled, best=after),
        environment={"NAME": "1"},
        tokens=5000,
        **options,
    )


def test_a_plan_in_a_notebook():
    """Its peak and the chosen way stand out, and not the one that needs most."""
    plan = planned()
    assert "<b>70.00 GiB</b>" in plan._repr_html_()
    assert plan._repr_html_().startswith("<p>for h100:8, 80.00 GiB on each device")
    assert repr(plan.alternatives).startswith(
        "<Alternatives: -> 70.00 GiB on each device, "
    )
    assert "<b>chosen</b>" in plan.alternatives._repr_html_()
    assert repr(table(candidate(120, variant=Variant()))).startswith(
        "<Alternatives: no way fits"
    )


def test_a_plan_is_told():
    """What it does, needs and takes; and the lines of a training script."""
    text = str(planned())
    for line in (
        "peak as given, compiled for this memory: 150.00 GiB",
        "chosen: 70 GiB",
        "host memory: 640.00 GiB on each host for its 8 devices (set a limit with",
        "modeled step: 2500 ms, 1.25 times the step as given, 0% of it waiting",
        "2,000 tokens a second",
        "set NAME=1",
        "-> 70.00 GiB on each device",
    ):
        assert line in text, line
    assert "of 700.00 GiB" in str(planned(host_memory_bytes=700 * GIB))
    assert "interrupted" in str(planned(complete=False))
    assert planned().training("my.toml") == [
        'config = oo.load_config("my.toml")',
        "tx = oo.offload(optax.adamw(...), config)  # your own",
        "params = oo.place(params, config.parameters)",
        "step = oo.jit(train_step, **config.step)",
    ]
    assert "[[parameters]]\npattern = 'layers/.*'" in planned().rule_file()


def test_a_plan_is_empty_if_nothing_moves_and_nothing_is_encoded():
    """Then its ``offload`` is the optimizer itself."""
    for rule, empty in (
        (oo.Rule(".*", "device"), True),
        (oo.Rule(".*", "device", codec="int8"), False),
        (oo.Rule(".*"), False),
    ):
        plan = dataclasses.replace(planned(), config=oo.OffloadConfig([rule]))
        assert plan.empty is empty
        inner = optax.sgd(1.0)
        assert (plan.offload(inner) is inner) is empty


def test_the_picture_has_parts_peaks_times_and_the_budget(tmp_path):
    """In a format that can be read back."""
    pytest.importorskip("matplotlib")
    _plan.save_plot(planned(), tmp_path / "peak.svg")
    drawn = (tmp_path / "peak.svg").read_text()
    for text in (*PARTS, "budget", "as given", "with the plan", "150.0", "70.0"):
        assert text in drawn, text
    for text in ("modeled step (ms)", "150 GiB", "70 GiB", "h100:8"):
        assert text in drawn, text
    _plan.save_plot(planned(), tmp_path / "peak.png")
    assert (tmp_path / "peak.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_is_drawn_once(tmp_path):
    """State loaded at once is no second part of the state that stays."""
    pytest.importorskip("matplotlib")
    before = candidate(150, **{"state": 50, "state loaded at once (by 'f')": 100})
    plan = dataclasses.replace(planned(), before=before)
    _plan.save_plot(plan, tmp_path / "peak.svg")
    drawn = (tmp_path / "peak.svg").read_text()
    assert "<!-- 150.0 -->" in drawn
    assert "<!-- 250.0 -->" not in drawn


def test_without_matplotlib(monkeypatch, tmp_path):
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-offload\[plot\]'"):
        _plan.save_plot(planned(), tmp_path / "peak.png")
