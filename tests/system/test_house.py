"""The house: files of one idea, wings with a door and a README, names documented."""

import ast
import collections
import pathlib
import re

import mutants
import pytest

import optax_offload as oo

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = ROOT / "optax_offload"
FILES = sorted(PACKAGE.rglob("*.py"))
WINGS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
MOST_LINES = 500
SHELVES = {"_ground", "_host", "_places"}


def name(path):
    """A path as it is read in a test's name."""
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_file_is_long(file):
    """A file that grows beyond this has a second idea in it."""
    assert len(file.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("wing", WINGS, ids=name)
def test_a_door_only_exports(wing):
    """A docstring, imports and `__all__`, which has all that is imported.

    Of a shelf, whose files are imported by their names, it is a docstring.
    """
    tree = ast.parse((wing / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    if wing.name in SHELVES:
        assert len(tree.body) == 1
        return
    imports = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
    (exports,) = (x.value for x in tree.body if isinstance(x, ast.Assign))
    assert len(tree.body) == len(imports) + 2
    imported = [alias.asname or alias.name for x in imports for alias in x.names]
    assert sorted(imported) == sorted(ast.literal_eval(exports))
    assert all(
        (x.module or "").startswith(f"optax_offload.{wing.name}.") for x in imports
    )


@pytest.mark.parametrize("wing", WINGS, ids=name)
def test_each_wing_has_a_short_readme(wing):
    """With a drawing, and which file to open for what, which is there."""
    text = (wing / "README.md").read_text()
    assert 20 <= len(text.splitlines()) <= 40
    assert text.count("```") == 2, "one drawing"
    assert re.search(r"^- To \w+.* open `", text, re.MULTILINE)
    for file in re.findall(r"open `([\w/]+\.py)`", text):
        assert (wing / file).exists() or (PACKAGE / file).exists(), file


@pytest.mark.parametrize("mutant", mutants.MUTANTS.values(), ids=mutants.MUTANTS)
def test_a_mutant_is_of_what_stands_there(mutant):
    """Each is run by hand and rarely: its text must be in its file, and once."""
    assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1


def test_mutants_are_read_as_they_are_written():
    """No two have one name: only the last would be made. Nothing else is among them."""
    one = "# Text.\n\n--- a.py\n@@ x | tests/a.py::test | tests/b.py\n-  y\n-\n"
    tests = ("tests/a.py::test", "tests/b.py")
    assert mutants.mutants_in(one) == {"x": mutants.Mutant("a.py", "  y\n", "", tests)}
    for wrong in (one + one[10:], one + " context\n", one + "@@ z | tests/a.py\n+y\n"):
        with pytest.raises(ValueError, match="two mutants of this name, or a line of"):
            mutants.mutants_in(wrong)


@pytest.mark.parametrize("mutant", mutants.MUTANTS.values(), ids=mutants.MUTANTS)
def test_a_mutant_names_tests_that_are_there(mutant):
    """One that is renamed would be found out when they are run, which is rare."""
    for test in mutant.tests:
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text()
        assert not function or f"\ndef {function.partition('[')[0]}(" in text, test


def test_one_file_of_the_emitter_writes_transfers():
    """So that whoever looks for a load or a store finds it there."""
    files = (PACKAGE / "_emit").glob("*.py")
    found = {
        f.name
        for f in files
        if re.search(r"memory\.transfer|device_put\(", f.read_text())
    }
    assert found == {"moves.py"}


def test_folders_of_tests_are_rooms():
    """Each wing has one, and what is of no wing has its place too."""
    folders = [p for p in (ROOT / "tests").iterdir() if [*p.glob("*.py")]]
    rooms = {wing.name.lstrip("_") for wing in WINGS}
    assert {p.name for p in folders} == rooms | {"benchmarks", "lib", "system"}


def test_no_two_test_files_have_one_name():
    """Together pytest collects only the first of them."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_a_class_name_means_one_thing():
    """But for `Step`, which users write, and rules, which are named as primitives."""
    rules = PACKAGE / "_rows" / "rules"
    classes = [
        x.name
        for file in FILES
        if rules not in file.parents
        for x in ast.parse(file.read_text()).body
        if isinstance(x, ast.ClassDef) and not x.name.startswith("_")
    ]
    counts = collections.Counter(classes)
    assert [name for name, count in counts.items() if count > 1] == ["Step"]


def test_every_documented_name_is_public():
    """No page tells of a name that is gone."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = {x for page in pages for x in re.findall(r"\boo\.(\w+)", page.read_text())}
    assert sorted(names - {*oo.__all__, "aot"}) == []
