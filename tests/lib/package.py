"""Builds the sdist and the wheel into dist/, and tests them as a user has them.

`python tests/lib/package.py`, as `make package` does, with any Python that the package
is for: it needs no more than a package registry. In temporary folders, outside of the
repository:

1. the sdist, and the wheel from it; what is in them, and what is not;
2. the wheel alone in a fresh environment: `smoke.py`;
3. with the extra `cli` besides: `optax-offload targets`.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIST = ROOT / "dist"
PACKAGE = ROOT / "optax_offload"
# What the tests and the links of the pages need beside the package.
IN_SDIST = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "BUILD_NOTES.md", "LICENSE"),
    *("Makefile", "pyproject.toml", "PKG-INFO", "configs/adam_moments.toml"),
    *("docs/limits.md", "benchmarks/README.md", "examples/train_lm.py"),
    *("tests/conftest.py", "tests/lib/smoke.py"),
)
NOT_IN_SDIST = re.compile(r"(\.venv|out/|dist/|\.git/|__pycache__|\.pytest_cache)")


def main() -> None:
    """Builds, looks, installs, runs; raises where something is not as it should be."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(pathlib.Path(folder) / "build")
        version = check_contents(sdist, wheel)
        bin_ = environment(pathlib.Path(folder) / "user")
        run(bin_ / "python", "-m", "pip", "install", "--quiet", wheel)
        names = [f"{m['name']} {m['version']}" for m in installed(bin_)]
        print(f"{wheel.name} brings {', '.join(names)}", flush=True)
        smoke = ROOT / "tests" / "lib" / "smoke.py"
        run(bin_ / "python", "-I", smoke, version, cwd=folder)
        run(bin_ / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cli]")
        targets = run(bin_ / "optax-offload", "targets", cwd=folder, capture=True)
        assert all(chip in targets for chip in ("h100", "v5e")), targets
        print(f"optax-offload targets: {len(targets.splitlines())} lines, such as")
        print("".join(x + "\n" for x in targets.splitlines() if "h100" in x), end="")
    print(f"the package is as it should be ({time.perf_counter() - start:.0f} s)")


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist, and the wheel that is made of it, alone in dist/."""
    for old in DIST.glob("optax_offload-*"):
        old.unlink()
    bin_ = environment(folder)
    run(bin_ / "python", "-m", "pip", "install", "--quiet", "build")
    run(bin_ / "python", "-m", "build", "--outdir", DIST, ROOT, capture=True)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: pathlib.Path, wheel: pathlib.Path) -> str:
    """The wheel has the package and no more, the sdist what it is tested with too."""
    version = wheel.name.split("-")[1]
    sources = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        info = f"optax_offload-{version}.dist-info"
        metadata = file.read(f"{info}/METADATA").decode()
    strangers = {name for name in names - sources if not name.startswith(info)}
    assert not strangers, f"in the wheel, and not in the package: {strangers}"
    assert sources <= names, f"not in the wheel: {sources - names}"
    assert f"{info}/licenses/LICENSE" in names
    assert f"\nVersion: {version}\n" in metadata
    assert "\nProvides-Extra: cli\n" in metadata
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = sources | set(IN_SDIST)
    assert needed <= names, f"not in the sdist: {needed - names}"
    strangers = {name for name in names if NOT_IN_SDIST.search(name)}
    assert not strangers, f"in the sdist: {strangers}"
    for path in (sdist, wheel):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return version


def environment(folder: pathlib.Path) -> pathlib.Path:
    """A fresh virtual environment's folder of programs."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if sys.platform == "win32" else "bin")


def installed(bin_: pathlib.Path) -> list[dict[str, str]]:
    """What pip lists of an environment, but for itself."""
    text = run(bin_ / "python", "-m", "pip", "list", "--format=json", capture=True)
    return [m for m in json.loads(text) if m["name"] not in ("pip", "setuptools")]


def run(*command: object, cwd: object = None, capture: bool = False) -> str:
    """Runs a command without this process's PYTHONPATH, and returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [str(part) for part in command],
        cwd=None if cwd is None else str(cwd),
        env=environment,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if result.returncode:
        print(result.stdout or "", end="")
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return result.stdout or ""


if __name__ == "__main__":
    main()
