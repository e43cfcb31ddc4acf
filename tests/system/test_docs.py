"""What README and the pages show runs and prints that, and what code cites is there."""

import doctest
import pathlib
import re
import sys

import pytest
from typer.testing import CliRunner

import optax_offload as oo
from optax_offload import aot
from optax_offload._places import memory
from optax_offload.cli import command as cli

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
FINDINGS = ROOT / "docs" / "compiler-findings.md"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages that compile for chips, whose numbers are those of a JAX; smaller, for sooner.
COMPILING = {
    "compiling.md": {"layers=24, width=1024": "layers=1", "(16, 513)": "(4, 9)"},
    "planning.md": {},
}


def page(path):
    """A document as a parameter: those that compile for chips are marked so."""
    marks = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.slow]
    return pytest.param(
        path, id=path.name, marks=marks if path.name in COMPILING else []
    )


# Recipes run one by one, each by itself: test_recipes.py.
RUN_WHOLE = [x for x in [ROOT / "README.md", *DOCUMENTS] if x.name != "recipes.md"]


@pytest.mark.parametrize("document", [*map(page, RUN_WHOLE)])
def test_python_blocks_run(document, tmp_path, monkeypatch, capsys):
    """In order, in one namespace; what is to fail says so with try and except.

    A block of text after one of Python is what that prints.
    """
    text = document.read_text()
    varies = document.name in COMPILING
    if varies:
        pytest.importorskip("jax_plugins")
        pytest.importorskip("libtpu")
    for large, small in COMPILING.get(document.name, {}).items():
        assert large in text
        text = text.replace(large, small)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    namespace, printed = {}, None
    for number, (language, block) in enumerate(FENCE.findall(text)):
        if language == "python":
            exec(compile(block, f"{document.name}, {number}", "exec"), namespace)
            printed = capsys.readouterr().out
        elif language in ("", "text") and printed is not None:
            check_printed(block, printed, varies)
            printed = None
        else:
            printed = None


def check_printed(expected, printed, numbers_vary):
    """As doctest compares them, with `...` for what is left out."""
    # Pages show what is printed with JAX 0.11.1 and newer, where kernels move no slices
    # and rows are loaded ahead.
    older = memory.moved_by_kernels()
    if older:
        printed = re.sub(rf" *{re.escape(older)}\n", "", printed)
        ahead = r"^(scan of \d+ iterations:\n)?  on a [GT]PU.*\n"
        expected = re.sub(ahead, "", expected, flags=re.M)
        if "backward scan" in expected:  # The rest is what is loaded ahead.
            expected = re.sub(r"^\.\.\.\n", "", expected, flags=re.M)
    if numbers_vary:
        number = r"[\d.]+ (?:B|[KMG]iB|s\b)"
        expected, printed = (re.sub(number, "N", x) for x in (expected, printed))
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(expected, printed, options):
        assert printed == expected


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
@pytest.mark.slow
def test_the_command_beside_a_step_factory(tmp_path, monkeypatch):
    """It plans for what the page has up to there, and the file is read."""
    text = (ROOT / "docs" / "planning.md").read_text()
    command = re.search(r"^optax-offload (fit my_steps.*)$", text, re.MULTILINE)
    assert command is not None
    fences = FENCE.findall(text[: command.start()])
    factory = "".join(block for language, block in fences if language == "python")
    (tmp_path / "my_steps.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    result = CliRunner().invoke(cli.app, command[1].split())
    assert result.exit_code == 0, result.output
    assert re.search(r"fits with", result.stdout)
    (file,) = tmp_path.glob("*.toml")
    config = oo.load_config(file)
    assert config.rules or config.parameters or config.step
    for line in re.findall(r"^optax-offload (\w+)", text, re.MULTILINE):
        assert CliRunner().invoke(cli.app, [line, "--help"]).exit_code == 0


def test_readme_is_short():
    """It starts with what the project does, and the two commands are near the top."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert lines.index("```sh") < 15


def test_the_reference_has_every_public_name():
    """Once, and no other: what is not there may change without notice."""
    pages = [ROOT / "docs" / "api.md", *ROOT.glob("docs/reference-*.md")]
    found = {"optax_offload": [], "optax_offload.aot": []}
    directive = re.compile(r"^\.\. (?:auto)?(\w+):: ([\w.]+)$", re.MULTILINE)
    for reference in pages:
        module = ""
        for kind, name in directive.findall(reference.read_text()):
            if kind == "currentmodule":
                module = name
            else:
                found[module].append(name)
    assert sorted(found["optax_offload"]) == sorted(oo.__all__)
    assert sorted(found["optax_offload.aot"]) == sorted(aot.__all__)


def test_each_finding_stands_once():
    """An entry, or a line of the table at the end, in order."""
    text = FINDINGS.read_text()
    entries = re.findall(r"^### (F\d\d)$", text, re.MULTILINE)
    lines = re.findall(r"^\| (F\d\d) \|", text, re.MULTILINE)
    assert entries == sorted(entries)
    assert lines == sorted(lines)
    assert len({*entries, *lines}) == len(entries + lines)


def test_cited_findings_exist():
    """Every id: those in code as entries, those in pages also as one line."""
    text = FINDINGS.read_text()
    entries = set(re.findall(r"^### (F\d\d)$", text, re.MULTILINE))
    lines = set(re.findall(r"^\| (F\d\d) \|", text, re.MULTILINE))
    folders = "optax_offload", "benchmarks", "tests", "examples"
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *DOCUMENTS]
    for paths, known in ((code, entries), (pages, entries | lines)):
        cited = {
            (path.relative_to(ROOT), finding)
            for path in paths
            for finding in re.findall(r"\bF\d\d\b", path.read_text())
        }
        assert not {(path, x) for path, x in cited if x not in known}


def test_links_lead_somewhere():
    """Every relative link of a document, to a file and to a heading in it."""
    broken = []
    for document in (*ROOT.glob("*.md"), *DOCUMENTS):
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if link.startswith("http"):
                continue
            name, _, heading = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append((document.name, link))
    assert broken == []


def headings(document):
    """As GitHub makes links of them."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\s-]", "", title).lower().replace(" ", "-") for title in titles
    }


def test_named_files_exist():
    """Those that the findings and the build notes name, and tests in them."""
    missing = []
    for document in (ROOT / "BUILD_NOTES.md", FINDINGS):
        for name, test in re.findall(
            r"[`( ](?!orbax)(\w+/[\w/]+\.py)(?:::(\w+))?", document.read_text()
        ):
            paths = [root / name for root in (ROOT, ROOT / "optax_offload")]
            path = next((path for path in paths if path.exists()), None)
            if path is None or (test and f"def {test}(" not in path.read_text()):
                missing.append((document.name, name, test))
    assert missing == []


def test_both_moments_are_written_one_way():
    """One regex for one thing, in pages, examples, rule files and docstrings."""
    regex = re.compile(r"[(.*/)?^\w\\]*\(mu\\?\|nu\)[(.*/)?$\\]*")
    folders = ROOT / "docs", ROOT / "examples", ROOT / "configs", ROOT / "optax_offload"
    paths = [x for folder in folders for x in folder.rglob("*") if x.is_file()]
    found = {
        (match, str(path.relative_to(ROOT)))
        for path in [ROOT / "README.md", *paths]
        if path.suffix in (".md", ".py", ".toml")
        for line in path.read_text().splitlines()
        if not line.startswith("#")
        for match in regex.findall(line)
    }
    assert {match.replace("\\", "") for match, _ in found} == {".*/(mu|nu)/.*"}, found


@pytest.mark.parametrize("name", ["index", "internals"])
def test_the_menu_has_the_titles_of_the_pages(name):
    """The table that leads to a page names it as the page, and so the menu, does."""
    text = (ROOT / "docs" / f"{name}.md").read_text()
    rows = re.findall(r"^\| \[([^\]]+)\]\(([\w-]+\.md)\)", text, re.MULTILINE)
    assert len(rows) > 3
    for title, page_name in rows:
        page_text = (ROOT / "docs" / page_name).read_text()
        assert re.search(r"^# (.*)$", page_text, re.MULTILINE)[1] == title


def test_pages_are_short():
    """Guides have at most 13,000 words, as `wc -w` counts, and all pages 28,000."""
    text = (ROOT / "docs" / "index.md").read_text()
    (menu,) = re.findall(r":caption: Guides\n:hidden:\n\n(.*?)```", text, re.DOTALL)
    words = {path.stem: len(path.read_text().split()) for path in DOCUMENTS}
    guides = {name: words[name] for name in menu.split()}
    assert sum(guides.values()) <= 13_000, guides
    words["README"] = len((ROOT / "README.md").read_text().split())
    assert sum(words.values()) <= 28_000, words


ERRORS = (
    "RESOURCE_EXHAUSTED",
    "nvidia-smi",
    "memory_stats",
    "memory_space of all inputs passed to `add` must be the same",
)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_that_people_search_for_are_answered(error):
    """In a heading of the questions, or below one, so that a search finds them."""
    assert error.lower() in (ROOT / "docs" / "faq.md").read_text().lower()


READMES = [
    *ROOT.glob("*/README.md"),
    *(path for path in (ROOT / "optax_offload").glob("*/README.md")),
]


@pytest.mark.parametrize(
    "readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT))
)
def test_drawings_name_files_that_exist(readme):
    """Below the README's folder, beside it, or in the package."""
    roots = readme.parent.parent, ROOT, ROOT / "optax_offload"
    drawn = "".join(block for _, block in FENCE.findall(readme.read_text()))
    names = set(re.findall(r"(?<![\w/*])[a-z_/\d]+\.py\b", drawn))
    missing = [x for x in names if not any((root / x).exists() for root in roots)]
    assert [x for x in missing if not [*readme.parent.rglob(x)]] == []


@pytest.mark.parametrize("document", RUN_WHOLE, ids=lambda x: x.name)
def test_blocks_have_a_language_and_fit_the_page(document):
    """Output is named `text`, so that it is not coloured; code has 88 columns."""
    for language, block in FENCE.findall(document.read_text()):
        assert language, block
        if language.split()[0] in ("python", "py", "sh", "{code-cell}"):
            assert max(map(len, block.splitlines())) <= 88, block
