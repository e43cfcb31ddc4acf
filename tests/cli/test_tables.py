"""What a person is shown."""

import dataclasses
import io
import pathlib
import re

from rich.console import Console

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._plan import state
from optax_offload._plan.alternatives import alternatives
from optax_offload._plan.variants import Variant
from optax_offload.aot import Target
from optax_offload.cli import diagnosis, tables
from optax_offload.cli.checkpoint import SavedLeaf
from optax_offload.cli.explanation import Explanation, PlacedLeaf
from optax_offload.cli.text import say


def shown(print_it, *args):
    """What a function prints on a console of 120 columns."""
    console = Console(file=io.StringIO(), width=120)
    print_it(console, *args)
    return console.file.getvalue()


def in_a_terminal(print_it, *args):
    """The lines that a function prints in a terminal of 80 columns."""
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    print_it(console, *args)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def whole(text, lines):
    """True if a text stands in one line, and is no part of a longer word."""
    word = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    return any(word.search(line) for line in lines)


def test_numbers_are_set_to_the_right():
    """Those of columns that end in a space."""
    made = tables.table("", ("name", "size "), [("a", 1), ("bbb", 1000)])
    lines = shown(lambda console: console.print(made)).splitlines()
    rows = [line.rstrip() for line in lines if line.strip()][-2:]
    assert rows[0].endswith("    1")
    assert rows[1].endswith(" 1000")
    assert len(rows[0]) == len(rows[1])


def test_paths_that_look_like_markup():
    """Are shown as they are."""
    made = tables.table("[title]", ("path",), [("['w'][0]",), ("[bold]x",)])
    text = shown(lambda console: console.print(made))
    assert "['w'][0]" in text
    assert "[bold]x" in text


def test_leaves_of_a_checkpoint():
    """One line each, and their sum."""
    leaves = [
        SavedLeaf("mu/w", (256, 128), "float32", 131072, "P('x',)"),
        SavedLeaf("count", (), "int32", 4, "single device"),
    ]
    text = shown(tables.print_leaves, "saved/", leaves)
    assert "256x128" in text
    assert "scalar" in text
    assert "2 leaves, 128.00 KiB. Orbax records no memory kinds" in text


def test_the_sum_of_leaves_is_of_all_of_them():
    """Not of the largest alone."""
    leaves = [SavedLeaf(name, (256,), "float32", 1024, "") for name in ("a", "b", "c")]
    assert "3 leaves, 3.00 KiB. Orbax" in shown(tables.print_leaves, "saved/", leaves)


def test_a_plan_is_shown_beside_the_step_as_given():
    """In the columns of these names, parts and peaks alike."""
    plan = a_plan(parts={"state": 7 * 2**30})
    after = dataclasses.replace(plan.after, parts={"parameters": 3 * 2**30})
    text = shown(tables.print_plan, dataclasses.replace(plan, after=after))
    head, *rows = text[text.index("each device  ") :].splitlines()
    assert re.split(" {2,}", head.strip()) == [
        "each device",
        "as given",
        "with the plan",
    ]
    found = [re.split(" {2,}", row.strip()) for row in rows]
    assert ["state", "7.00 GiB", "0 B"] in found
    assert ["parameters", "0 B", "3.00 GiB"] in found
    assert ["peak", "8.00 GiB", "5.00 GiB"] in found


def test_targets_have_sources():
    """Each chip's numbers, and where they are from."""
    text = shown(tables.print_targets)
    for row in tables.target_rows():
        assert f" {row['name']} " in text
        assert row["link_source"][:30] in text


def a_plan(*, first="way 8", second="way 5", parts=None):
    """A plan of two ways, of 8 and 5 GiB."""
    parts = parts or {"parameters": 2**30}
    time = aot.StepTime(1.0, 0.5, 0, 0, 0, 2**30, 2**30, 0.0, (aot.Assumption(*"abc"),))
    before, after = (
        _plan.CompiledCandidate(
            moved_bytes=0,
            used_bytes=n * 2**30,
            peak=None,
            fits=n < 6,
            seconds=1.0,
            parts=parts,
            what=what,
            time=time,
            variant=Variant(window_bytes=n),
            host_bytes=(8 - n) * 2**30,
        )
        for n, what in ((8, first), (5, second))
    )
    budget = _plan.Budget(6 * 2**30)
    target = Target("h100")
    return oo.Plan(
        target=target,
        budget_bytes=6 * 2**30,
        config=oo.OffloadConfig(
            [oo.Rule(".*", "device")], parameters=["layers/.*", "head/.*"]
        ),
        moved=(),
        before=before,
        after=after,
        compiled=(before, after),
        alternatives=alternatives((before, after), (), budget, target, after),
        environment={"XLA_CLIENT_MEM_FRACTION": "0.90", "X": "1"},
        outside=("1 gradient of 2.00 MiB left outside: the step returns it",),
    )


def test_a_plan(tmp_path):
    """What is chosen, what fills the device, and what else there is."""
    plan = a_plan(parts={"parameters": 2**30, "gradients": 2**30})
    text = " ".join(shown(tables.print_plan, plan).split())
    first = (
        "not fused: 1 gradient of 2.00 MiB left outside: the step returns it if all "
    )
    assert text.startswith(f"{first}were fused: up to 1.00 GiB less h100, 6.00 GiB of ")
    assert "GiB on each device: fits with way 5" in text
    assert "parameters moved to host memory: layers/.* head/.* each device" in text
    told = "set XLA_CLIENT_MEM_FRACTION=0.90; a process takes 0.75 of a GPU by default"
    assert f"{told} set X=1" in text
    assert "fused: each layer" not in text
    assert "-> way 5" in text
    assert "2.00 GiB more than each device has" in text
    assert "modeled, not measured" in text
    assert "- a: b (c)" in text
    assert "left outside: the step returns it" in text
    assert plan.as_dict()["outside"] == list(plan.outside)
    text = shown(tables.print_training, plan, tmp_path / "my.toml")
    assert "in the training script:" in text
    assert "params = oo.place(params, config.parameters)" in text
    assert "tx = " not in text, "its state stays as it is"


LONG = (
    "12.33 GiB of 58.11 GiB of state, all parameters, residuals on the host; fused, "
    "late gradients on the host; int8 moments; window 16.00 MiB"
)


def test_a_plan_at_80_columns():
    """No number is cut, and no word of what a way does."""
    parts = {"state loaded at once (by 'concatenate' in f)": 100 * 2**30 + 2**28}
    plan = a_plan(second=LONG, parts=parts)
    lines = in_a_terminal(tables.print_plan, plan)
    for cells in plan.alternatives.cells():
        for number in cells[1:6]:
            assert whole(number, lines), number
    for word in re.findall(r"[\w.]+", LONG):
        assert whole(word, lines), word
    assert whole("100.25 GiB", lines)


def test_explanations_and_checkpoints_at_80_columns():
    """Paths break at their slashes only, and sizes do not."""
    path = "opt_state/1/0/mu/decoder/layers_123/attention/query_projection/kernel"
    rule = "rule 12 '.*/(mu|nu)/.*layers_[0-9]+.*|.*/kernel'"
    leaves = [PlacedLeaf(path, 1023 * 2**20 + 2**18, "pinned_host", rule, "int8")]
    explained = in_a_terminal(
        tables.print_explanation, "rules.toml", Explanation(tuple(leaves), ())
    )
    saved = SavedLeaf(path, (128, 4096, 4096), "float32", 2**33, "P('data', None)")
    reported = in_a_terminal(tables.print_leaves, "runs/1", [saved])
    for lines, sizes in ((explained, ["1023.25 MiB"]), (reported, ["8.00 GiB"])):
        for name in [*path.split("/"), *sizes]:
            assert whole(name, lines), name
    assert whole("128x4096x4096", reported)
    assert whole("12", explained)
    in_a_terminal(tables.print_targets)


def test_layers_with_numbers_are_one_line():
    """With how many they are; not what differs in anything else."""
    saved = [
        SavedLeaf(f"0/mu/layers_{i}/w{2 + (i == 9)}", (8, 8), "float32", 256, "P()")
        for i in range(12)
    ]
    saved += [SavedLeaf("0/nu/layers_0/w2", (4,), "float32", 16, "P()")]
    found = [path for path, _ in tables.collapsed(saved)]
    assert found == ["0/mu/layers_*/w* (12 leaves)", "0/nu/layers_0/w2"]
    assert [path for path, _ in tables.collapsed(saved[:9])] == [
        "0/mu/layers_*/w2 (9 leaves)"
    ]


def test_wide_terminals_get_80_columns():
    """Lines are no longer, however wide one is."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    say(console, "word " * 40)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_findings_at_80_columns():
    """A word is never cut; a line to paste is never broken."""
    captured = pathlib.Path(__file__).parent.parent / "machine" / "captured"
    found = diagnosis.diagnosis_of(
        captured / "h100_two_nodes.txt", None, measure_link=False, directory=None
    )
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    diagnosis.print_diagnosis(console, found)
    lines = console.file.getvalue().splitlines()
    pasted = [line for finding in found.findings for line in finding.do]
    for line in lines:
        assert len(line) <= 80 or line.strip(" $") in pasted, line
    for finding in found.findings:
        for word in f"{finding.seen} {finding.means}".split():
            assert whole(word.strip(".,;()'"), lines), word
    assert all(any(line.endswith(p) for line in lines) for p in pasted)


def test_the_page_explains_what_is_printed():
    """Each line or part of a plan that it names is there."""
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "reading-output.md"
    rows = re.findall(
        r"^\| (`.*?) \|", page.read_text().partition("## A Plan")[2], re.M
    )
    named = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    plan = a_plan(
        first="state on the host; fused, backward twice",
        second="state on the host; fused, late gradients on the host",
        parts={"state loaded at once (by 'f')": 1, "other temporaries": 1},
    )
    leaves = [state.Leaf("mu/w", 2**20, 2**20, 0, True)]
    plan = dataclasses.replace(
        plan,
        moved=tuple(state.leaf_patterns(leaves)),
        environment={"XLA_CLIENT_MEM_FRACTION": "0.9"},
        alternatives=dataclasses.replace(
            plan.alternatives, not_compiled=("not compiled: 1 way that failed",)
        ),
    )
    text = shown(tables.print_plan, plan) + shown(
        tables.print_training, plan, "my.toml"
    )
    assert len(named) > 10
    for name in named:
        for piece in name.split("..."):
            assert piece.strip() in text, name
