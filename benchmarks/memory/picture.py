"""The picture of README: the peak of one train step in parts, without offload and with.

The step of a workload is compiled for a chip that need not be here. Parameters and
state are counted, the peak is that of the compiled program. Of its temporaries as many
bytes are gradients as parameters have, less those that never exist; the others are
activations and whatever else is temporary, as in `oo.plan`.

Run:
    python -m benchmarks.memory.picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl import flags
from matplotlib.figure import Figure

from benchmarks.common import command
from benchmarks.common.steps import (
    MODES,
    bytes_on_device,
    compile_step,
    of_workload,
    train_step,
)
from benchmarks.common.workloads import WORKLOADS
from optax_offload import aot
from optax_offload._ground.units import MIB

FLAGS = flags.FLAGS
CHIP, WORKLOAD = "h100", "decoder_scanned"
TITLE = f"Flax decoder, 24 layers, 336 million parameters, {CHIP}"
# What the bars are called, by mode.
BARS = {
    "no offload": "optax",
    "ours": "offload",
    "fused": "+ oo.jit",
    "parameters": "+ parameters",
    "residuals": "+ residuals",
}
COLORS = {
    "parameters": "#4269d0",
    "optimizer state": "#ff725c",
    "gradients": "#efb118",
    "activations and other temporaries": "#6cc5b0",
}


def measure(mode: str) -> dict[str, Any]:
    """Compiles the step in a mode, and returns what its peak is made of, in bytes."""
    workload, way, target = WORKLOADS[WORKLOAD](), MODES[mode], aot.Target(CHIP)
    peak = aot.peak(compile_step(workload, target, way))
    plain, x = workload.on(target)
    tx, args = of_workload(workload, plain, x, way)
    parameter_bytes, state_bytes = map(bytes_on_device, args[:2])
    gradient_bytes = bytes_on_device(plain)
    if way.streamed is not None:
        step = way.jit(train_step(workload, tx))
        gradient_bytes -= step.schedule(*args).gradient_bytes
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


def plot(modes: dict[str, Any], path: Path) -> None:
    """Writes the peaks as stacked bars, with what is on the host below each."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
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
        title=TITLE,
        ylim=(0, 1.08 * max(bottoms)),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, reverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Prints the parts of each peak, in MiB, and draws them."""
    modes = {mode: measure(mode) for mode in BARS}
    command.print_header(("MiB",), ("peak", *COLORS, "host"))
    for mode, row in modes.items():
        sizes = (row["peak_bytes"], *row["parts"].values(), row["host_bytes"])
        command.print_row((BARS[mode],), [size / MIB for size in sizes])
    plot(modes, Path(FLAGS.png))
    command.write(workload=WORKLOAD, target=CHIP, modes=modes)


if __name__ == "__main__":
    flags.DEFINE_string("png", "docs/pictures/peak.png", "Where the picture goes.")
    command.run(main, out="benchmarks/results/picture")
