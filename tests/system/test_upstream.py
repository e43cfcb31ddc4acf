"""What `upstream.md` says of others is still so, with the versions installed.

A new version that fails here has mended something, or broken the block: the page then
has to say so, and what this library does about it may go.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from typing import NamedTuple

import optax
import pytest
from small_programs import missing_compilers

PAGE = pathlib.Path(__file__).parent / "upstream.md"
PARTS = ("Reproduces with", "Impact", "Related", "Suggested fix")
VERSION = r"\d[\d.]*\d"
VERSIONS = re.compile(
    rf"^- Reproduces with ([\w-]+) ({VERSION}(?:, {VERSION})*)"
    rf"(?:; not with ({VERSION}(?:, {VERSION})*))?\.$",
    re.MULTILINE,
)


class Entry(NamedTuple):
    """An entry of the page: its id, its text, and the lines that show what it says."""

    id: str
    text: str
    code: str

    @property
    def compiles_for_chips(self):
        return "import aot" in self.code

    def expected(self):
        """Whether it reproduces with what is installed, and that in words."""
        (found,) = VERSIONS.findall(self.text)
        package, seen, gone = found
        installed = metadata.version(package.lower())
        mended = installed in gone.split(", ")
        assert not (mended and installed in seen.split(", "))
        return not mended, f"{package} {installed}"


def entries():
    """Those of the page, in order."""
    parts = re.split(r"^### (U\d\d)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for id_, text in zip(parts[::2], parts[1::2], strict=True):
        (code,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
        yield Entry(id_, text, code)


ENTRIES = list(entries())
AOT = [pytest.mark.aot, pytest.mark.xdist_group("aot")]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_entry_can_be_filed(entry):
    """It has its parts, and a block of at most 15 lines that stands alone."""
    assert all(f"\n- {part}" in entry.text for part in PARTS)
    assert VERSIONS.search(entry.text)
    lines = [line for line in entry.code.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100
    assert "optax_offload" not in entry.code.replace(
        "from optax_offload import aot", ""
    )


def words(text):
    """How many it has, signs aside."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_entries_are_in_their_index():
    """In order, the shortest first; no id is left out."""
    ids = [entry.id for entry in ENTRIES]
    assert sorted(ids) == [f"U{n:02}" for n in range(1, len(ids) + 1)]
    assert re.findall(r"^\| \[(U\d\d)\]", PAGE.read_text(), re.MULTILINE) == ids
    sizes = [words(entry.text) for entry in ENTRIES]
    assert sizes == sorted(sizes)


def test_the_answer_is_short_and_runs(capsys):
    """At most 200 words, with its program, which prints what stands below it."""
    page = PAGE.read_text()
    answer = "\n".join(re.findall(r"^> (.*)$", page, re.MULTILINE))
    (block,) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    program, printed = block
    assert words(answer) + words(program) <= 200
    exec(compile(program, PAGE.name, "exec"), {})
    assert capsys.readouterr().out.startswith(printed)


@pytest.mark.slow
def test_the_patch_for_optax_applies_and_helps(tmp_path):
    """To a copy of the version that is named, with which the program of U16 fails."""
    (entry,) = [entry for entry in ENTRIES if entry.id == "U16"]
    if not entry.expected()[0]:
        pytest.skip("this optax has it")
    package = pathlib.Path(optax.__file__).parent
    shutil.copytree(package, tmp_path / "optax")
    (patch,) = re.findall(r"```diff\n(.*?)```", entry.text, re.DOTALL)
    apply = ["git", "apply", "--unidiff-zero", "-"]
    subprocess.run(apply, cwd=tmp_path, input=patch, text=True, check=True)
    (tmp_path / "u16.py").write_text(entry.code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, tmp_path / "u16.py"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert "AssertionError" in run.stderr
    assert "assert of(optax.chain(steps))" in run.stderr


@pytest.mark.parametrize(
    "entry",
    [pytest.param(x, id=x.id, marks=AOT * x.compiles_for_chips) for x in ENTRIES],
)
def test_entry_is_still_so(entry, tmp_path, monkeypatch):
    """Its block passes; with versions that are said to have mended it, it does not."""
    if entry.compiles_for_chips and (reason := missing_compilers()):
        pytest.skip(reason)
    if "orbax" in entry.code:
        pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reproduces, version = entry.expected()
    code = compile(entry.code, f"{PAGE.name}, {entry.id}", "exec")
    with warnings.catch_warnings(action="ignore"):
        if reproduces:
            try:
                exec(code, {})
            except Exception as error:
                pytest.fail(
                    f"{entry.id} is not so with {version}: mended? If so, "
                    f"{PAGE.name} has to say 'not with {version.split()[1]}', and what "
                    f"this library does about it may go. It raised {error!r}"
                )
        else:
            with pytest.raises(AssertionError):
                exec(code, {})
