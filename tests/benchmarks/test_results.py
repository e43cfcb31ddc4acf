"""The runner of all tables: each is listed, and a result says how it was made."""

import json
import pathlib
import re
import sys
import types

import pytest

from benchmarks import results
from benchmarks.common.steps import MODES
from benchmarks.common.workloads import WORKLOADS
from benchmarks.memory import host_update, peaks

MIB = 2**20
ROOT = pathlib.Path(__file__).parent.parent.parent


def test_every_benchmark_is_a_table():
    """Each program of `benchmarks/`, and each command that a page names."""
    listed = {table.command.split()[0] for table in results.TABLES}
    programs = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for path in (ROOT / "benchmarks").glob("*/*.py")
        if "__main__" in path.read_text()
    }
    named = set(re.findall(r"python -m (benchmarks\.\w+\.\w+)", of_pages()))
    assert programs | named <= listed


def of_pages():
    """The text of all pages that name commands, on one line."""
    pages = [ROOT / "README.md", ROOT / "BUILD_NOTES.md", *(ROOT / "docs").glob("*.md")]
    return " ".join(" ".join(page.read_text().split()) for page in pages)


@pytest.mark.parametrize(
    ("flag", "known"),
    [
        ("find", peaks.FINDERS),
        ("part", host_update.PARTS),
        ("modes", MODES),
        ("workloads", WORKLOADS),
    ],
)
def test_what_a_page_asks_for_is_there(flag, known):
    """What a command calls its parts, its modes and its workloads."""
    values = re.findall(rf'--{flag}=("[^"]*"|[\w,]+)', of_pages())
    asked = {name for value in values for name in value.strip('"').split(",")}
    assert asked - {"W"} <= set(known)
    assert asked


def test_the_least_memory_is_bisected(monkeypatch):
    """Of a step that needs 1000 MiB and takes 1500 where there is room."""
    flags = types.SimpleNamespace(
        workloads=["leaves"], targets=["h100"], modes=["ours"]
    )
    monkeypatch.setattr(peaks, "FLAGS", flags)

    def prober(name, target, mode):
        return {"fits": target.memory_bytes >= 1000 * MIB, "used_bytes": 1500 * MIB}

    (row,) = peaks.find_least(prober)
    assert row["too_little_bytes"] < 1000 * MIB <= row["fits_bytes"] <= 1010 * MIB


def test_names_are_unique_and_what_is_run_unasked_fits_an_hour():
    """By the minutes expected of each."""
    names = [table.name for table in results.TABLES]
    assert len(names) == len(set(names))
    chosen = results.chosen([])
    assert sum(table.minutes for table in chosen) <= 60


def test_an_unknown_name_is_an_error():
    """It says which there are."""
    with pytest.raises(SystemExit, match=r"no table 'nothing'; there are .*states"):
        results.chosen(["nothing"])


def test_what_is_written_says_how_it_was_made(tmp_path, monkeypatch):
    """Date, versions, command and duration, then the figures; those of the JSON too."""
    program = tmp_path / "made.py"
    program.write_text(
        "import pathlib, sys\n"
        "print('one 1.5')\n"
        "out = sys.argv[-1].removeprefix('--out=')\n"
        "pathlib.Path(out + '.json').write_text('{\"one\": 1.5}')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    table = results.Table("made", "made", minutes=1)
    assert results.run(table, tmp_path / "results")
    text = (tmp_path / "results" / "made.txt").read_text()
    head, figures = text.split("\n\n", 1)
    assert figures == "one 1.5\n"
    for line in ("date: 20", "command: python -m made", "jax: ", "seconds: "):
        assert f"\n{line}" in f"\n{head}"
    record = json.loads((tmp_path / "results" / "made.json").read_text())
    assert record["figures"] == {"one": 1.5}
    assert record["command"] == "python -m made"
    assert record["seconds"] >= 0


def test_a_failure_keeps_the_figures_there_were(tmp_path, monkeypatch, capsys):
    """Nothing is overwritten by a run that did not end well."""
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "broken.txt").write_text("as before")
    assert not results.run(results.Table("broken", "broken", minutes=1), tmp_path)
    assert (tmp_path / "broken.txt").read_text() == "as before"
    assert "broken: exit code 3" in capsys.readouterr().out


def test_list(monkeypatch, capsys):
    """Every table with its minutes and its command."""
    monkeypatch.setattr(sys, "argv", ["results", "--list"])
    results.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(results.TABLES) + 1
