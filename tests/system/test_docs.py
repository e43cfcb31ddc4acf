"""What the documents show runs, and what code cites is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
FINDINGS = ROOT / "docs" / "compiler-findings.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(document, tmp_path, monkeypatch):
    """In order, in one namespace; what is to fail says so with try and except."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{document.name}, block {number}", "exec"), namespace)


def test_findings_are_in_their_index():
    """In order, without gaps, each with a place to go to."""
    text = FINDINGS.read_text()
    entries = re.findall(r"^### (F\d\d)$", text, re.MULTILINE)
    assert entries == [f"F{n:02}" for n in range(1, len(entries) + 1)]
    indexed = re.findall(r"^\| \[(F\d\d)\]\(#(f\d\d)\) \|", text, re.MULTILINE)
    assert indexed == [(entry, entry.lower()) for entry in entries]


def test_cited_findings_exist():
    """Every id in the code and in the other documents."""
    known = set(re.findall(r"^### (F\d\d)$", FINDINGS.read_text(), re.MULTILINE))
    folders = "optax_offload", "benchmarks", "tests", "examples", "docs"
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths += [*ROOT.glob("*.md"), *DOCUMENTS]
    cited = {
        (path.relative_to(ROOT), finding)
        for path in paths
        for finding in re.findall(r"\bF\d\d\b", path.read_text())
    }
    assert not {(path, finding) for path, finding in cited if finding not in known}


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
