"""The command: which parts are run, on what, and where the figures go."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chip import machine, page, record, running
from benchmarks.chip.largest import LARGEST
from benchmarks.chip.link import LINK, constants
from benchmarks.chip.others import OTHERS
from benchmarks.chip.overlap import OVERLAP
from benchmarks.chip.peaks import PEAKS
from benchmarks.chip.setting import Part, Setting
from benchmarks.chip.time import TIME
from benchmarks.chip.values import VALUES
from benchmarks.common import alone
from benchmarks.common.alone import ROOT

# Most valuable first.
PARTS = {
    part.name: part for part in (VALUES, PEAKS, LINK, OVERLAP, TIME, LARGEST, OTHERS)
}
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
    for hidden in ("--cases", "--setting", "--lines"):
        add(hidden, help=argparse.SUPPRESS)
    add("names", nargs="*", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Does what is asked for."""
    asked = parser().parse_args(argv)
    if asked.cases:
        setting = Setting.read(asked.setting)
        running.run_cases(PARTS[asked.cases], setting, asked.names, Path(asked.lines))
    elif asked.page:
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
    """Runs parts; the number of cases that did not end well."""
    parts = chosen(asked.only)
    folder = asked.out or ROOT / "out" / ("chip-dry" if asked.dry else "chip")
    # What is of toy size is not for the page.
    results = folder if asked.dry else RESULTS
    head = head_of(asked)
    name = f"{record.slug(head['device'])}-{record.slug(head['commit'])}"
    kept = record.Record(folder.resolve() / name, results / f"{name}.json", head)
    setting = setting_of(asked.dry, head)
    began = time.monotonic()
    try:
        for part in parts:
            left = 60 * asked.minutes - (time.monotonic() - began)
            started = time.monotonic()
            running.run_part(part, setting, kept, left)
            kept.save(PARTS)
            told(part, setting, kept, time.monotonic() - started)
    finally:
        kept.save(PARTS)
    print(f"{time.monotonic() - began:.0f} s in all; {kept.path}")
    if asked.dry:
        toy = folder / "on-a-chip.md"
        toy.write_text(page.text([json.loads(kept.path.read_text())]))
        print(f"the page of these toys: {toy}")
    return min(1, sum(len(kept.missing(p.name, p.cases(setting))) for p in parts))


def head_of(asked: argparse.Namespace) -> dict[str, Any]:
    """What stands at the top of the JSON."""
    return {
        **facts_of_this_machine(asked.dry),
        "commit": asked.commit or machine.commit(),
        "date": record.now()[:10],
        "dry": asked.dry,
    }


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


def setting_of(dry: bool, head: dict[str, Any]) -> Setting:
    """For all parts."""
    if dry:
        return Setting(True, None, TOY_BYTES, TOY_BYTES)
    free = int(machine.HOST_SHARE * head["host"]["free_bytes"])
    return Setting(False, head["target"], head["memory_bytes"], free)


def told(part: Part, setting: Setting, kept: record.Record, seconds: float) -> None:
    """Says how a part went, and why what is missing is."""
    known = record.entries(kept.lines(part.name))
    names = [*part.cases(setting)]
    outcomes = [known.get(n, {}).get("outcome", "not begun") for n in names]
    counts = ", ".join(f"{outcomes.count(x)} {x}" for x in dict.fromkeys(outcomes))
    print(f"{part.name}: {counts}; {seconds:.0f} s", flush=True)
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome != "done":
            reason = known.get(name, {}).get("reason", "the time was up")
            print(f"  {name}: {outcome}: {' '.join(reason.split())[-300:]}", flush=True)
