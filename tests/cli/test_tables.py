"""What a person is shown."""

import io

from rich.console import Console

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
