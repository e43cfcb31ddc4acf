"""What a person is shown."""

import io

from rich.console import Console

import optax_offload as oo
from optax_offload import _plan, aot
from optax_offload._plan.alternatives import alternatives
from optax_offload._plan.variants import Variant
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


def test_a_plan(tmp_path):
    """What is chosen, what fills the device, and what else there is."""
    parts = {"parameters": 2**30}
    time = aot.StepTime(1.0, 0.5, 0, 0, 0, 2**30, 2**30, 0.0, (aot.Assumption(*"abc"),))
    before, after = (
        _plan.CompiledCandidate(
            moved_bytes=0,
            used_bytes=n * 2**30,
            peak=None,
            fits=n < 6,
            seconds=1.0,
            parts=parts,
            what=f"way {n}",
            time=time,
            variant=Variant(window_bytes=n),
            host_bytes=(8 - n) * 2**30,
        )
        for n in (8, 5)
    )
    asked = _plan.Asked(_plan.Budget(6 * 2**30))
    target = Target("h100")
    plan = oo.Plan(
        target=target,
        budget_bytes=6 * 2**30,
        config=oo.OffloadConfig([oo.Rule(".*", "device")], parameters=["layers/.*"]),
        moved=(),
        before=before,
        after=after,
        compiled=(before, after),
        alternatives=alternatives((before, after), (), asked, target, after),
        environment={},
        outside=("1 gradient of 2.00 MiB left outside: the step returns it",),
    )
    text = " ".join(shown(tables.print_plan, plan).split())
    assert "6.00 GiB on each device: fits with way 5" in text
    assert "parameters moved to host memory: layers/.*" in text
    assert "-> way 5" in text
    assert "2.00 GiB more than each device has" in text
    assert "modelled, not measured" in text
    assert "- a: b (c)" in text
    assert "left outside: the step returns it" in text
    assert plan.as_dict()["outside"] == list(plan.outside)
    text = shown(tables.print_training, plan, tmp_path / "my.toml")
    assert "in the training script:" in text
    assert "params = oo.place(params, config.parameters)" in text
    assert "tx = " not in text, "its state stays as it is"
