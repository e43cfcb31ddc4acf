"""Makes tables of figures anew: one command for each, and all that fit an hour.

What a command prints goes to `benchmarks/results/NAME.txt`, below the date, the
versions, the command and how long it took; what it writes as JSON to `NAME.json` there,
with the same.

What is measured on an attached GPU or TPU is `benchmarks.chip`'s.

Run (the first: all that fit an hour on two idle cores):
    python -m benchmarks.results
    python -m benchmarks.results --list
    python -m benchmarks.results peak_memory census
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chip import machine

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of figures, and what makes it.

    Attributes:
      name: Of the files that it is written to.
      command: What follows `python -m`.
      minutes: Expected, on two idle cores.
      unasked: Whether it is one of those that are made if none is named.
      writes_json: Whether the command has a flag `--out`, for JSON.
    """

    name: str
    command: str
    minutes: int
    unasked: bool = True
    writes_json: bool = True


Large = functools.partial(Table, unasked=False)
# Minutes are estimates, until the file of a result says how long it took. What writes
# no JSON here prints figures only, or writes files of its own.
PEAKS, HOST_UPDATE = "benchmarks.memory.peaks", "benchmarks.memory.host_update"
# Layers of a Python loop beside scanned ones, with more and more of them at rest.
AT_REST = "--modes='no offload,fused,parameters,residuals'"
UNROLLED = (
    f"{PEAKS} {AT_REST} --targets=h100 --workloads=gpt2,gpt2_clipped,decoder_scanned,"
    "decoder_unrolled,decoder_48_layers,gated_16k,gated_unrolled_16k"
)
UNROLLED_V5E = (
    f"{PEAKS} {AT_REST} --targets=v5e:2x2 --workloads=decoder_scanned,"
    "decoder_unrolled,decoder_48_layers,gated_unrolled"
)
TABLES = (
    Table("call_cost", "benchmarks.time.call_cost", 1, writes_json=False),
    Table("states", "benchmarks.memory.states", 3),
    Table("peak_memory", PEAKS, 18),
    Table("peak_memory_gated", f"{PEAKS} --workloads=gated,gated_16k", 6),
    Table("census", "benchmarks.link.census --bandwidth_gbps=50", 18),
    Table("compile_time", "benchmarks.time.compile_time", 12),
    Table("arithmetic", f"{HOST_UPDATE} --part=arithmetic", 1, writes_json=False),
    Large("unrolled", UNROLLED, 50),
    Large("unrolled_v5e", UNROLLED_V5E, 60),
    Large("ordinary", "benchmarks.memory.ordinary", 45),
    Large("making", "benchmarks.memory.making", 3),
    Large("picture", "benchmarks.memory.picture", 3, writes_json=False),
    Large("host_update", f"{PEAKS} --modes='on the host'", 20),
    Large("host_update_time", f"{HOST_UPDATE} --part=times", 2, writes_json=False),
    Large(
        "least_memory", f"{PEAKS} --find=least --workloads=leaves,stacked,tutorial", 40
    ),
    Large("largest_model", f"{PEAKS} --find=layers --targets=h100,v5e:1x1", 90),
    Large("fit_models", f"{PEAKS} --find=target", 180),
    Large("low_bit", "benchmarks.training.low_bit", 60, writes_json=False),
    Large("largest_step", "benchmarks.training.largest_step", 5, writes_json=False),
)


def chosen(names: Sequence[str]) -> list[Table]:
    """The tables of these names; without any, those made unasked."""
    known = {table.name: table for table in TABLES}
    for name in names:
        if name not in known:
            raise SystemExit(f"no table {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or [t for t in TABLES if t.unasked]


def run(table: Table, folder: Path) -> bool:
    """Makes a table, and writes it if all went well; says so."""
    scratch = Path("out/results")
    scratch.mkdir(parents=True, exist_ok=True)
    out, log = scratch / table.name, scratch / f"{table.name}.log"
    command = [sys.executable, "-m", *shlex.split(table.command)]
    command += [f"--out={out}"] * table.writes_json
    print(f"{table.name}: some {table.minutes} minutes ...", flush=True)
    start = time.perf_counter()
    with log.open("w") as file:
        variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
        result = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=file, check=False
        )
    seconds = round(time.perf_counter() - start)
    if result.returncode:
        print(f"{table.name}: exit code {result.returncode}, see {log}")
        return False
    made = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m {table.command}",
        "seconds": seconds,
        **machine.versions(),
        "cores": os.cpu_count(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    head = "".join(f"{key}: {value}\n" for key, value in made.items())
    path = folder / f"{table.name}.txt"
    path.write_text(f"{head}\n{result.stdout.decode()}")
    if table.writes_json:
        figures = json.loads(out.with_suffix(".json").read_text())
        text = json.dumps({**made, "figures": figures}, indent=1)
        path.with_suffix(".json").write_text(text + "\n")
    print(f"{table.name}: {seconds} s, {path}", flush=True)
    return True


def main() -> None:
    """Makes what is asked for, one after the other; an error if any fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="tables [default: what fits an hour]")
    parser.add_argument("--list", action="store_true", help="say which there are")
    arguments = parser.parse_args()
    if arguments.list:
        print(f"{'name':18s} minutes unasked  command")
        for table in TABLES:
            unasked = str(table.unasked)
            print(f"{table.name:18s} {table.minutes:7d} {unasked:7s}  {table.command}")
        return
    tables = chosen(arguments.names)
    print(f"{len(tables)} tables, some {sum(t.minutes for t in tables)} minutes")
    failed = [table.name for table in tables if not run(table, RESULTS)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
