"""What is published: versions, Pythons and commands agree wherever they are named."""

import pathlib
import re
import tomllib

import pytest

import optax_offload as oo

ROOT = pathlib.Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = ROOT / ".ci" / "run"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
MAKEFILE = (ROOT / "Makefile").read_text()


def pythons(text):
    """Versions of Python that a text names, such as 3.11."""
    return set(re.findall(r"\b3\.1\d\b", text))


def test_changelog_has_one_version_for_one_release():
    """The newest is that of the package; each has a date, or is to come."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    found = [
        re.fullmatch(r"\[(\S+)\] - (unreleased|\d{4}-\d\d-\d\d)", x) for x in headings
    ]
    assert all(found), headings
    versions = [match[1] for match in found]
    assert versions[0] == oo.__version__
    assert len(versions) == len(set(versions))
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_is_of_this_version():
    """And of this license."""
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {oo.__version__}\n" in text
    assert f"\nlicense: {PROJECT['license']}\n" in text


def test_classifiers_name_what_is_tested():
    """The Pythons of the workflow; .ci/run takes those that all tests are for."""
    declared = pythons("\n".join(PROJECT["classifiers"]))
    oldest = pythons(PROJECT["requires-python"])
    assert pythons(CI.read_text()) | oldest < declared
    assert declared == pythons(WORKFLOW.read_text())
    assert min(declared) in oldest


def test_the_workflow_runs_the_parts_of_ci():
    """Each `make` target of the one is one of the other."""
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    runs = [
        step["run"] for job in jobs.values() for step in job["steps"] if "run" in step
    ]
    assert runs
    assert all(run.startswith("make ") for run in runs)
    assert {run.split()[1] for run in runs} == set(
        re.findall(r"^ *make (\w+)", CI.read_text(), re.MULTILINE)
    )


def test_commands_that_pages_name_are_targets():
    """Those of README, of the guide to contributing, and of the hooks."""
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md", ".pre-commit-config.yaml"):
        commands = re.findall(
            r"(?:^|`|entry: )make (\w+)", (ROOT / name).read_text(), re.M
        )
        assert commands
        assert set(commands) <= targets, name


def test_the_hooks_are_those_of_make_check():
    """Nothing is downloaded for them: all are local."""
    yaml = pytest.importorskip("yaml")
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert "make check" in [hook["entry"] for hook in repos[0]["hooks"]]
