"""The examples: real text, the same losses with offload and without."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SMALL = ["--steps=4", "--layers=2", "--width=64", "--context=16", "--batch=4"]


def run(program, *flags, cwd):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / program, *SMALL, "--log_every=1", *flags],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_lm.py", "train_nnx.py"])
def test_losses_are_those_without_offload(program, tmp_path):
    """To the last digit printed; the table shows where every leaf is."""
    with_, without = (
        run(program, flag, cwd=tmp_path) for flag in ("--offload", "--nooffload")
    )
    assert with_.returncode == without.returncode == 0, with_.stderr + without.stderr

    def losses(text):
        return [line for line in text.splitlines() if "loss " in line]

    assert len(losses(with_.stdout)) == 5
    assert losses(with_.stdout) == losses(without.stdout)
    rows = [line.split() for line in with_.stdout.splitlines() if "float32" in line]
    assert rows
    for row in rows:
        nbytes, planned, actual = int(row[3].replace(",", "")), row[5], row[6]
        moment = "mu" in row[0].split("/") or "nu" in row[0].split("/")
        kind = "pinned_host" if moment and nbytes >= 65536 else "device"
        assert (planned, actual) == (kind, kind)
    assert {row[6] for row in rows} == {"device", "pinned_host"}
    assert "pinned_host" not in without.stdout
    assert (tmp_path / "out" / f"{pathlib.Path(program).stem}.png").stat().st_size


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
