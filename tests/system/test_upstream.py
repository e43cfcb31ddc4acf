"""What `docs/upstream.md` says of others is still so, with the versions installed.

A new version that fails here has mended something, or broken the block: the page then
has to say so, and what this library does about it may go.
"""

import pathlib
import re
import warnings
from importlib import metadata
from typing import NamedTuple

import pytest
from small_programs import missing_compilers

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "upstream.md"
PARTS = ("Reproduces with", "Whom it hurts", "Known", "Would mend it")
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


def test_entries_are_in_their_index():
    """In order, without gaps."""
    ids = [entry.id for entry in ENTRIES]
    assert ids == [f"U{n:02}" for n in range(1, len(ids) + 1)]
    assert re.findall(r"^\| \[(U\d\d)\]", PAGE.read_text(), re.MULTILINE) == ids


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
