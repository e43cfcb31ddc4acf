"""The picture of README: the peak of one train step in parts, without offload and with.

The step of a workload is compiled for a chip that need not be here. Parameters and
state are counted, the peak is that of the compiled program. Of its temporaries as many
bytes are gradients as parameters have, less those that never exist; the others are
activations and whatever else is temporary, as in `oo.plan`. What was compiled is kept
in the results, and is not compiled again while JAX and the library are the same.

Run:
    python -m benchmarks.memory.picture
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import jax
from absl import app, flags
from matplotlib.figure import Figure

import optax_offload as oo
from benchmarks.common.steps import MODES, compile_step, library_digest, train_step
from benchmarks.common.workloads import WORKLOADS
from optax_offload import aot
from optax_offload._units import MIB

FLAGS = flags.FLAGS
flags.DEFINE_string("chip", "h100", "Chip to compile for.")
flags.DEFINE_string("workload", "decoder_scanned", f"Of {', '.join(WORKLOADS)}.")
flags.DEFINE_string(
    "kept", "benchmarks/results/picture.json", "Where the numbers are kept."
)
flags.DEFINE_string("png", "docs/pictures/peak.png", "Where the picture goes.")

# What the bars are called, by mode.
BARS = {
    "no offload": "optax",
    "ours": "offload",
    "fused": "+ oo.jit",
    "parameters": "+ parameters",
    "residuals": "+ residuals",
}
NAMES = {"decoder_scanned": "Flax decoder, 24 layers, 336 million parameters"}
COLORS = {
    "parameters": "#4269d0",
    "optimizer state": "#ff725c",
    "gradients": "#efb118",
    "activations and other temporaries": "#6cc5b0",
}


def measure(workload_name: str, target: aot.Target, mode: str) -> dict:
    """Compiles the step in a mode, and returns what its peak is made of, in bytes."""
    workload, way = WORKLOADS[workload_name](), MODES[mode]
    peak = aot.peak(compile_step(workload, target, way))
    params, x = workload.on(target)
    gradient_bytes = _bytes_on_device(params)
    if way.on_host:
        params = oo.set_memory_kind(params, way.on_host, "pinned_host")
    tx = way.optimizer(workload.optimizer)
    state = oo.eval_shape(tx.init, params)
    parameter_bytes, state_bytes = _bytes_on_device(params), _bytes_on_device(state)
    if mode not in ("no offload", "ours"):
        step = oo.jit(train_step(workload, tx))
        gradient_bytes -= step.schedule(params, state, x).gradient_bytes
    temporary_bytes = peak.peak_bytes - parameter_bytes - state_bytes
    gradient_bytes = min(gradient_bytes, temporary_bytes)
    return {
        "peak_bytes": peak.peak_bytes,
        "host_bytes": peak.host_peak_bytes,
        "parts": {
            "parameters": parameter_bytes,
            "optimizer state": state_bytes,
            "gradients": gradient_bytes,
            "activations and other temporaries": temporary_bytes - gradient_bytes,
        },
    }


def _bytes_on_device(tree: object) -> int:
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind in (None, "device")
    ]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
    )


def results() -> dict:
    """What is measured, or was by this library and this JAX."""
    path = Path(FLAGS.kept)
    of = {
        "workload": FLAGS.workload,
        "target": FLAGS.chip,
        "jax": jax.__version__,
        "library": library_digest("ours"),
    }
    kept = json.loads(path.read_text()) if path.exists() else {}
    if all(kept.get(key) == value for key, value in of.items()):
        return kept
    target = aot.Target(FLAGS.chip)
    modes = {mode: measure(FLAGS.workload, target, mode) for mode in BARS}
    found = of | {"date": date.today().isoformat(), "modes": modes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def plot(found: dict, path: Path) -> None:
    """Writes the peaks as stacked bars, with what is on the host below each."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    modes = found["modes"]
    names = [
        f"{BARS[mode]}\nhost: {row['host_bytes'] / MIB:.0f} MiB"
        for mode, row in modes.items()
    ]
    bottoms = [0.0] * len(names)
    for part, color in COLORS.items():
        heights = [row["parts"][part] / MIB for row in modes.values()]
        axes.bar(names, heights, 0.62, bottoms, label=part, color=color)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axes.annotate(f"{total:.0f}", (x, total), ha="center", va="bottom")
    axes.set(
        ylabel="peak of one step (MiB)",
        title=f"{NAMES.get(found['workload'], found['workload'])}, {found['target']}",
        ylim=(0, 1.08 * max(bottoms)),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, reverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str]) -> None:
    """Prints the parts of each peak, in MiB, and draws them."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    found = results()
    print(f"{found['workload']} on {found['target']}, MiB (JAX {found['jax']})")
    for mode, row in found["modes"].items():
        parts = {"peak": row["peak_bytes"], **row["parts"], "host": row["host_bytes"]}
        sizes = ", ".join(f"{part} {n / MIB:.1f}" for part, n in parts.items())
        print(f"{BARS[mode]:22} {sizes}")
    plot(found, Path(FLAGS.png))
    print(f"in {FLAGS.kept} and {FLAGS.png}")


if __name__ == "__main__":
    app.run(main)
