"""What a person is shown."""

import io

from rich.console import Console

import optax_offload as oo
from optax_offload import _plan
from optax_offload._plan.cost import Cost
from optax_offload.aot import Target
from optax_offload.cli import tables
from optax_offload.cli.checkpoint import SavedLeaf


def shown(print_it, *args):
    """What a function prints on a console of 120 columns."""
    console = Console(file=io.StringIO(), width=120)
    print_it(console, *args)
    return console.file.getvalue()


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


def test_targets_have_sources():
    """Each chip's numbers, and where they are from."""
    text = shown(tables.print_targets)
    for row in tables.target_rows():
        assert f" {row['name']} " in text
        assert row["link_source"][:30] in text


def test_updates_in_the_backward_pass():
    """What they bring alone, and that the step has to be trained so."""
    parts = {"parameters": 2**30}
    sizes = [
        _plan.CompiledCandidate(0, n * 2**30, None, n < 6, 1.0, parts, n < 8)
        for n in (8, 5)
    ]
    plan = oo.Plan(
        target=Target("h100"),
        budget_bytes=6 * 2**30,
        config=oo.OffloadConfig([oo.Rule(".*", "device")]),
        moved=(),
        before=sizes[0],
        after=sizes[1],
        compiled=tuple(sizes),
        cost=Cost(0, 1.0, "", 1.0, 1.0, ""),
        environment={},
        fused=sizes[1],
        outside=("1 gradient of 2.00 MiB left outside: the step returns it",),
    )
    text = " ".join(shown(tables.print_plan, plan).split())
    assert "fits with its updates in the backward pass: nothing is moved" in text
    assert "before anything is moved: 8.00 GiB -> 5.00 GiB, fits" in text
    assert "train with oo.jit(step), or jit oo.stream(step)" in text
    assert "left outside: the step returns it" in text
    assert plan.as_dict()["fused"]["used_bytes"] == 5 * 2**30
    assert plan.as_dict()["outside"] == list(plan.outside)
