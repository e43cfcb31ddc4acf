"""The least device memory that whole train steps compile for.

Short of memory a compiler trades time for it: it recomputes, and orders what it else
overlaps. So the peak on a roomy chip says less about what fits than this does. Found by
bisection between nothing and the peak on the chip as it is.

Run:
    python -m benchmarks.memory.least_memory --workloads=leaves,stacked,tutorial
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags

from benchmarks.common.steps import MODES, USUAL_MODES, Mode, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS, Workload
from optax_offload import aot
from optax_offload._units import MIB

FLAGS = flags.FLAGS
flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile for.")
flags.DEFINE_list("workloads", USUAL_WORKLOADS, f"Of {', '.join(WORKLOADS)}.")
flags.DEFINE_list("modes", USUAL_MODES, f"Of {', '.join(MODES)}.")
flags.DEFINE_float("tolerance", 0.01, "The part of the answer it may be off by.")
flags.DEFINE_string("out", "out/least_memory", "Where the .json goes.")


def least_memory(
    workload: Workload, name: str, mode: Mode, tolerance: float
) -> tuple[int, int]:
    """The least bytes that a step compiled for, and the most that it did not."""

    def peak(memory_bytes: int | None) -> int | None:
        target = aot.Target(name, memory_bytes=memory_bytes)
        try:
            return aot.peak(compile_step(workload, target, mode)).peak_bytes
        except aot.DoesNotFitError:
            return None

    roomy = peak(None)
    if roomy is None:
        raise ValueError(f"the step does not fit {name!r} as it is; take a larger chip")
    # What a compiler reports and what it asks for are not the same to the byte.
    fits, too_little = int(roomy * 1.05), 0
    while fits - too_little > tolerance * fits:
        tried = (fits + too_little) // 2
        if peak(tried) is None:
            too_little = tried
        else:
            fits = tried
    return fits, too_little


def main(argv: Sequence[str]) -> None:
    """Bisects for each workload, target and mode, and prints the bounds."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    rows = []
    for workload in FLAGS.workloads:
        for target in FLAGS.targets:
            for mode in FLAGS.modes:
                fits, too_little = least_memory(
                    WORKLOADS[workload](), target, MODES[mode], FLAGS.tolerance
                )
                rows.append(
                    {
                        "workload": workload,
                        "target": target,
                        "mode": mode,
                        "fits_bytes": fits,
                        "too_little_bytes": too_little,
                    }
                )
                print(
                    f"{workload:17s} {target:9s} {mode:11s} "
                    f"fits {fits / MIB:8.1f} MiB, not {too_little / MIB:8.1f}",
                    flush=True,
                )
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=2) + "\n")
    print(f"also in {out}")


if __name__ == "__main__":
    app.run(main)
