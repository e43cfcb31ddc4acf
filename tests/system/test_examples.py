"""The examples: real text, the same losses with offload and without."""

import functools
import math
import os
import pathlib
import re
import subprocess
import sys

import lm_chips
import lm_program
import pytest
import train_lm
from harness import of_processes

from optax_offload import aot

ROOT = pathlib.Path(__file__).parent.parent.parent
SMALL = ["--steps=4", "--layers=2", "--width=64", "--context=16", "--batch=4"]


def run(program, *flags, cwd, sizes=(*SMALL, "--log_every=1")):
    """Runs an example as a user does; quickly compiled."""
    return subprocess.run(
        [sys.executable, ROOT / "examples" / program, *sizes, *flags],
        cwd=cwd,
        env=os.environ | of_processes() | {"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    """Runs a program with offload, once: its folder, and what it printed."""

    @functools.cache
    def ran(program):
        folder = tmp_path_factory.mktemp("offloaded")
        without_chips = ["--chips="] if program == "train_lm.py" else []
        return folder, run(program, "--offload", *without_chips, cwd=folder)

    return ran


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
@pytest.mark.parametrize("program", ["train_lm.py", "train_nnx.py"])
def test_losses_are_those_without_offload(program, offloaded, tmp_path):
    """To the last digit printed; the table shows where every leaf is."""
    folder, with_ = offloaded(program)
    without = run(program, "--nooffload", cwd=tmp_path)
    assert with_.returncode == without.returncode == 0, with_.stderr + without.stderr

    def losses(text):
        return [line for line in text.splitlines() if "loss " in line]

    assert len(losses(with_.stdout)) == 5
    assert losses(with_.stdout) == losses(without.stdout)
    rows = [line.split() for line in with_.stdout.splitlines() if "float32" in line]
    assert rows
    for row in rows:
        at = row.index("float32")
        nbytes = 4 * math.prod(int(n) for n in re.findall(r"\d+", row[at - 1]))
        planned, actual = row[at + 5 : at + 7]
        moment = "mu" in row[0].split("/") or "nu" in row[0].split("/")
        kind = "pinned_host" if moment and nbytes >= 65536 else "device"
        assert (planned, actual) == (kind, kind)
    assert all({"device", "pinned_host"} & set(row) for row in rows)
    assert any("pinned_host" in row for row in rows)
    assert "pinned_host" not in without.stdout
    for where in (folder, tmp_path):
        assert (where / "out" / f"{pathlib.Path(program).stem}.png").stat().st_size


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.xdist_group("aot")
def test_demo_compiles_its_step_for_chips(tmp_path):
    """A row with the peaks, less with offload by what was moved, and the picture."""
    sizes = ("--steps=2", "--layers=6", "--width=128", "--context=16", "--batch=4")
    result = run("train_lm.py", "--chips=h100", cwd=tmp_path, sizes=sizes)
    assert result.returncode == 0, result.stderr
    (row,) = (x.split() for x in result.stdout.splitlines() if x.startswith("h100 "))
    plain, offload, fused, moved = map(float, row[1:])
    assert plain - offload == pytest.approx(moved, rel=0.1)
    assert fused < offload
    assert (tmp_path / "out/train_lm_peaks.png").stat().st_size


def test_demo_goes_on_without_a_compiler(tmp_path, monkeypatch, capsys):
    """It says in a line why there is no table, and draws nothing."""

    def compile(*args, **kwargs):
        raise ImportError("compiling for 'h100' needs the wheel\n    pip install")

    monkeypatch.setattr(aot, "compile", compile)
    settings = lm_program.Settings(layers=1, width=64)
    config = lm_program.load_config("configs/adam_moments.toml")
    path = tmp_path / "peaks.png"
    step, create_state = train_lm.step_fn, train_lm.create_state
    lm_chips.report(step, create_state, settings, config, ["h100"], path)
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "not compiled: compiling for 'h100' needs the wheel"
    assert not path.exists()


@pytest.mark.slow
def test_resume(tmp_path):
    """Where it was, here with offload after without; `test_faults.py` kills it."""
    first, second = (
        run("resume.py", "--save_every=2", flag, cwd=tmp_path)
        for flag in ("--nooffload", "--offload")
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.startswith("at step 0\n")
    assert second.stdout.startswith("at step 4\nheld-out loss ")
    assert second.stdout.splitlines()[1] in first.stdout.splitlines()
    assert "opt_state  pinned_host" not in first.stdout
    assert "opt_state  pinned_host" in second.stdout
    assert (tmp_path / "out/resume.png").stat().st_size


def test_unknown_rule_file(tmp_path):
    """The error names the file."""
    result = run("train_lm.py", "--config=none.toml", cwd=tmp_path)
    assert result.returncode
    assert "none.toml" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pinned_host", "disk"])
def test_two_models_take_turns(kind, tmp_path):
    """One is on the device, the other is not; the program compares the losses."""
    sizes = ["--turns=2", "--steps=2", "--width=64", "--batch=4", "--context=16"]
    flags = [f"--memory_kind={kind}", f"--directory={tmp_path}"]
    result = run("two_models.py", *flags, cwd=tmp_path, sizes=sizes)
    assert result.returncode == 0, result.stderr
    *turns, equal, learned = result.stdout.splitlines()
    assert equal == "all 8 losses are those of both models on the device all the time"
    assert learned.startswith("from ")
    for begin in range(0, len(turns), 4):
        head, *rows, loss = turns[begin : begin + 4]
        assert loss.startswith("  loss ")
        for row in rows:
            name = row.split()[0]
            assert ("in device" in row) == (f"{name} on the device" in head), row
            assert f"in {kind}" in row or f"{name} on the device" in head
    assert len(turns) == 2 * 2 * 4


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
def test_one_layer(offloaded, tmp_path):
    """Saved and restored half way, with the losses of `train_lm.py`."""
    got = run("one_layer.py", cwd=tmp_path)
    _, want = offloaded("train_lm.py")
    assert got.returncode == want.returncode == 0, got.stderr + want.stderr

    def losses(text):
        return [float(x) for x in re.findall(r"loss (\d+\.\d+)", text)]

    assert losses(got.stdout) == pytest.approx(losses(want.stdout), abs=2e-4)
    assert "saved and restored step 2" in got.stdout
    assert "never on the device whole" in got.stdout
    for line in got.stdout.splitlines():
        if line.startswith("params/layers/"):
            assert "pinned_host" in line


@pytest.mark.slow
def test_qlora(tmp_path):
    """Four bits cost little, merging nothing, and a restart goes on where it was."""
    flags = ["--adapter_steps=4", "--chips="]
    result = run("qlora.py", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("saved and restored step 2\n") == 2
    lines = [line.split() for line in result.stdout.splitlines() if line]
    rows = {line[0]: line[1:] for line in lines}
    table = [map(float, rows[name]) for name in ("before", "after", "merged")]
    plain, nf4 = zip(*table, strict=True)
    assert plain != nf4
    assert nf4 == pytest.approx(plain, rel=0.02)
    for _, after, merged in (plain, nf4):
        assert merged == pytest.approx(after, rel=0.01)
    leaves = {path: row for path, row in rows.items() if "/" in path}
    at_rest = {path for path, row in leaves.items() if "pinned_host" in row}
    parts = "codes_nf4_", "scales"
    coded = {path for path in leaves if path.split("/")[-1].startswith(parts)}
    moments = {path for path in leaves if {"mu", "nu"} & set(path.split("/"))}
    assert len(coded) == 2 * 6
    assert at_rest == coded | moments
