"""Peak device memory of whole train steps: no offload, the usual recipe, and ours.

Also with the updates of scanned layers in the backward pass: `fused`.

Compiled with the real compilers for chips that need not be here, and read from what
was compiled, so the numbers repeat exactly.

Run:
    python -m benchmarks.memory.peak_memory
    python -m benchmarks.memory.peak_memory --workloads=gated --targets=h100
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from matplotlib.figure import Figure

from benchmarks.common.steps import MODES, USUAL_MODES, Mode, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS, Workload
from optax_offload import aot
from optax_offload._units import MIB

FLAGS = flags.FLAGS
flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile for.")
flags.DEFINE_list("workloads", USUAL_WORKLOADS, f"Of {', '.join(WORKLOADS)}.")
flags.DEFINE_list("modes", USUAL_MODES, f"Of {', '.join(MODES)}.")
flags.DEFINE_string("out", "out/peak_memory", "Where the .json and the .png go.")
flags.DEFINE_float(
    "memory_gib",
    None,
    "Device memory of each target, to see the compilers short of it.",
)


def measure(workload: Workload, target: aot.Target, mode: Mode) -> dict:
    """Compiles a train step, and returns its numbers, in bytes on each device."""
    started = time.perf_counter()
    note = None
    try:
        peak = aot.peak(compile_step(workload, target, mode))
    except aot.DoesNotFitError as error:
        peak, note = error.peak, f"needs {error.used_bytes} of {error.limit_bytes}"
    row: dict[str, Any] = {"seconds": time.perf_counter() - started, "note": note}
    if peak is not None:
        row |= {
            "peak_bytes": peak.peak_bytes,
            "temporary_bytes": peak.temporary_bytes,
            "host_argument_bytes": peak.host_argument_bytes,
            "host_temporary_bytes": peak.host_temporary_bytes,
        }
    return row


def saved(plain: dict, row: dict) -> float | None:
    """The bytes gone from the peak for each byte of state that was moved."""
    moved = row.get("host_argument_bytes")
    if not moved or "peak_bytes" not in plain:
        return None
    return (plain["peak_bytes"] - row["peak_bytes"]) / moved


def print_row(row: dict) -> None:
    """Prints a row of the table."""
    mib = {k: f"{row[k] / MIB:9.1f}" for k in row if k.endswith("_bytes")}
    gone = "" if row["saved"] is None else f"{row['saved']:6.2f}"
    print(
        f"{row['workload']:17s} {row['target']:9s} {row['mode']:11s}"
        f"{mib.get('peak_bytes', '-'):>9s} {mib.get('host_argument_bytes', '-'):>9s} "
        f"{mib.get('host_temporary_bytes', '-'):>9s} {gone:>6s} {row['seconds']:6.1f}"
        f"  {row['note'] or ''}",
        flush=True,
    )


def plot(rows: list[dict], path: Path) -> None:
    """Writes the peaks as bars, side by side for each workload and target."""
    groups = list(dict.fromkeys((r["workload"], r["target"]) for r in rows))
    figure = Figure(figsize=(1.3 * len(groups) + 2, 4.5), layout="constrained")
    axes = figure.subplots()
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    width = 0.8 / len(modes)
    for i, mode in enumerate(modes):
        peaks = {
            (r["workload"], r["target"]): r.get("peak_bytes", 0) / MIB
            for r in rows
            if r["mode"] == mode
        }
        places = [g + width * (i - (len(modes) - 1) / 2) for g in range(len(groups))]
        axes.bar(places, [peaks.get(g, 0) for g in groups], 0.9 * width, label=mode)
    names = [f"{workload}\n{target}" for workload, target in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7)
    axes.set(ylabel="peak device memory (MiB per device)", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
    """Compiles each workload for each target and mode, and prints the peaks."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    memory_bytes = int(FLAGS.memory_gib * 2**30) if FLAGS.memory_gib else None
    print(
        "MiB per device                         peak      host host temp  saved seconds"
    )
    rows = []
    for name in FLAGS.workloads:
        for target_name in FLAGS.targets:
            target = aot.Target(target_name, memory_bytes=memory_bytes)
            plain: dict = {}
            for mode in FLAGS.modes:
                row = measure(WORKLOADS[name](), target, MODES[mode])
                plain = row if mode == "no offload" else plain
                row = {"workload": name, "target": target_name, "mode": mode} | row
                row["saved"] = saved(plain, row)
                rows.append(row)
                print_row(row)
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    table = {"jax": jax.__version__, "memory_bytes": memory_bytes, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    plot(rows, out.with_suffix(".png"))
    print(f"also in {out}.json and {out}.png")


if __name__ == "__main__":
    app.run(main)
