"""Small mistakes in the package, each of which a test has to find. Run by hand.

`python tests/lib/mutants.py` makes each mistake of `mutants.diff` in a copy of the
tree, runs the tests that are to find it until the first one fails, and prints a table.
``--only`` takes parts of names. A mutant whose text is not in its file any more is an
error: it is to be written for what stands there now.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
COPIED = ("optax_offload", "tests", "examples", "configs", "docs", "pyproject.toml")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
PYTEST += ("-m", "not aot and not slow")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
      file: The file of the package that has it.
      old: The text that is replaced; it is there once.
      new: What it is replaced by.
      tests: The tests that are to find it.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants_in(text: str) -> dict[str, Mutant]:
    """The mutants of a text like `mutants.diff`, by name.

    Raises:
      ValueError: Two have one name, or a line is of another kind.
    """
    found: dict[str, Mutant] = {}
    file = ""
    for part in re.split(r"^(?=--- |@@ )", text, flags=re.MULTILINE)[1:]:
        head, *lines = [x for x in part.splitlines() if x and not x.startswith("# ")]
        if head.startswith("--- ") and not lines:
            file = head[4:]
            continue
        name, *tests = head[3:].split(" | ")
        old, new = ([x[1:] for x in lines if x[0] == sign] for sign in "-+")
        if name in found or not old or len(old) + len(new) != len(lines):
            raise ValueError(f"two mutants of this name, or a line of no kind: {part}")
        found[name] = Mutant(file, "\n".join(old), "\n".join(new), tuple(tests))
    return found


MUTANTS = mutants_in((ROOT / "tests" / "lib" / "mutants.diff").read_text())


def text_of(mutant: Mutant) -> str:
    """The file with the mistake in it.

    Raises:
      ValueError: What is to be replaced is not there, or more than once.
    """
    text = (ROOT / "optax_offload" / mutant.file).read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} has this {count} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def killer(mutant: Mutant) -> tuple[str, str]:
    """The test that finds a mistake, or why none does."""
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy / name)
        (copy / "optax_offload" / mutant.file).write_text(text_of(mutant))
        paths = [str(copy), str(copy / "tests" / "lib")]
        done = subprocess.run(
            [*PYTEST, *mutant.tests],
            cwd=copy,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:
        return "SURVIVED", ""
    found = re.search(
        r"^(?:FAILED|ERROR) (?:\S+/)?([^ ].*?)(?: - |$)", done.stdout, re.M
    )
    if done.returncode != 1 or not found:  # Not a test that failed.
        return "ERROR", done.stdout[-300:] + done.stderr[-300:]
    return "killed", found[1]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--check", action="store_true", help="only that they apply")
    options = parser.parse_args()
    chosen = {k: m for k, m in MUTANTS.items() if any(x in k for x in options.only)}
    for mutant in chosen.values():
        text_of(mutant)
    if options.check:
        print(f"all {len(chosen)} apply")
        return 0
    print("| mutant | file | | by |\n| --- | --- | --- | --- |")
    survived = 0
    for name, mutant in chosen.items():
        start = time.monotonic()
        outcome, by = killer(mutant)
        survived += outcome != "killed"
        shown = f"`{by}`" if outcome == "killed" else by
        print(f"| {name} | `{mutant.file}` | {outcome} | {shown} |", flush=True)
        print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"\n{len(chosen) - survived} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
