"""The command: which parts are run, on what, and where the figures go."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chip import machine, page, record, running
from benchmarks.chip.link import constants
from benchmarks.chip.setting import Part, Setting
from benchmarks.common import alone
from benchmarks.common.alone import ROOT

# Most valuable first.
NAMES = ("values", "peaks", "link", "overlap", "time", "largest", "others")
PARTS = {name: running.part_of(name) for name in NAMES}
MINUTES = 25.0
RESULTS = ROOT / "benchmarks" / "results" / "chips"
# What the package takes of it.
MEASURED = ROOT / "optax_offload" / "aot" / "measured.json"
TOY_BYTES = 2**30
HELP = """\
Runs every form of step on the attached GPU or TPU, and writes the results to
benchmarks/results/chips/, one JSON for each device and commit. Then it makes
docs/on-a-chip.md from all of them, and sets the link that `optax_offload.aot` models
the chip's steps with. Needs JAX, optax and Flax; this checkout need not be installed.
Called again, it runs what is missing."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.chip", description=HELP)
    add = made.add_argument
    add("--only", help=f"parts to run, such as values,peaks; of {', '.join(PARTS)}")
    add("--dry", action="store_true", help="toy sizes on the CPU; nothing is kept")
    add("--minutes", type=float, default=MINUTES, help="at most [default: %(default)s]")
    add("--page", action="store_true", help="only make the page from what was measured")
    add("--commit", help="what to call the commit, where git cannot say")
    add("--out", type=Path, help="where lines and logs go [default: out/chip]")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Does what is asked for."""
    asked = parser().parse_args(argv)
    if asked.page:
        tables = page.read(RESULTS)
        page.PAGE.write_text(page.text(tables))
        MEASURED.write_text(json.dumps(constants(tables), indent=1) + "\n")
    else:
        # Ends what was started, and writes what there is.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        sys.exit(run(asked))


def chosen(names: str | None) -> list[Part]:
    """The parts of these names, or all, in their order."""
    asked = names.split(",") if names else [*PARTS]
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        raise SystemExit(
            f"--only={names}: no part {', '.join(unknown)}; "
            f"there are {', '.join(PARTS)}"
        )
    return [part for part in PARTS.values() if part.name in asked]


def run(asked: argparse.Namespace) -> int:
    """Runs parts; 1 if a case did not end well, or 0."""
    parts = chosen(asked.only)
    folder = asked.out or ROOT / "out" / ("chip-dry" if asked.dry else "chip")
    facts = facts_of_this_machine(asked.dry)
    head = {
        **facts,
        "commit": asked.commit or machine.commit(),
        "date": record.now()[:10],
        "dry": asked.dry,
    }
    free = int(machine.HOST_SHARE * facts["host"]["free_bytes"])
    setting = Setting(False, facts["target"], facts["memory_bytes"], free)
    if asked.dry:
        setting = Setting(True, None, TOY_BYTES, TOY_BYTES)
    name = f"{record.slug(head['device'])}-{record.slug(head['commit'])}"
    # What is of toy size is not for the page.
    path = (folder if asked.dry else RESULTS) / f"{name}.json"
    kept = record.Record(folder.resolve() / name, path, head)
    began = time.monotonic()
    try:
        for part in parts:
            started = time.monotonic()
            running.run_part(part, setting, kept, 60 * asked.minutes - started + began)
            kept.save(PARTS)
            told(part, setting, kept, time.monotonic() - started)
    finally:
        kept.save(PARTS)
    print(f"{time.monotonic() - began:.0f} s in all; {kept.path}")
    if asked.dry:
        toy = folder / "on-a-chip.md"
        toy.write_text(page.text([json.loads(kept.path.read_text())]))
        print(f"the page of these toys: {toy}")
    return int(any(kept.missing(p.name, p.cases(setting)) for p in parts))


def facts_of_this_machine(dry: bool) -> dict[str, Any]:
    """Asked in a process of its own, which gives the device back."""
    environment = {"JAX_PLATFORMS": "cpu"} if dry else {}
    try:
        facts = alone.call(machine.describe, {}, environment)
    except alone.AloneError as error:
        raise SystemExit(f"JAX cannot use this machine's device: {error}") from error
    if facts["platform"] == "cpu" and not dry:
        raise SystemExit(
            "JAX finds no accelerator here (jax.default_backend() is 'cpu'). Install "
            "the JAX of your GPU or TPU, unset JAX_PLATFORMS, or try the parts at toy "
            "size: python -m benchmarks.chip --dry"
        )
    return facts


def told(part: Part, setting: Setting, kept: record.Record, seconds: float) -> None:
    """Says how a part went, and why what is missing is."""
    known = record.entries(kept.lines(part.name))
    cases = {n: known.get(n, {"outcome": "not begun"}) for n in part.cases(setting)}
    counts = Counter(entry["outcome"] for entry in cases.values())
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    print(f"{part.name}: {outcomes}; {seconds:.0f} s", flush=True)
    print("".join(f"  {line}\n" for line in page.left_out(cases)), end="", flush=True)
