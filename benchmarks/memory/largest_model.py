"""The largest Flax decoder that fits on a chip: no offload, the usual recipe, and ours.

In float32, with clipping and adamw, and remat on each layer. The number of layers is
found by compiling for the chip, which need not be here: bisection, sped up by
interpolating the peaks. What was compiled is kept beside the results, and is not
compiled again (ours and fused are, if the library has changed).

Run:
    python -m benchmarks.memory.largest_model
    python -m benchmarks.memory.largest_model --noscan --memory_gib=4 --width=1024
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags
from matplotlib.figure import Figure

from benchmarks.common.steps import (
    MODES,
    USUAL_MODES,
    as_it_is,
    compile_step,
    library_digest,
)
from benchmarks.common.workloads import decoder
from benchmarks.memory.search import MAX_LAYERS, Probe, largest
from optax_offload import aot

FLAGS = flags.FLAGS
flags.DEFINE_list("targets", ["h100", "v5e:1x1"], "Chips to compile for.")
flags.DEFINE_list("modes", USUAL_MODES, f"Of {', '.join(MODES)}.")
flags.DEFINE_bool("scan", True, "Layers as one stacked leaf, by nn.scan.")
flags.DEFINE_integer("width", 2048, "Of a layer, which has 12 * width**2 parameters.")
flags.DEFINE_integer("vocabulary", 32768, "Its embedding is also the output layer.")
flags.DEFINE_integer("batch", 8, "Sequences in a step, on all devices of a target.")
flags.DEFINE_integer("context", 512, "Tokens in a sequence.")
flags.DEFINE_float("memory_gib", None, "Device memory, if less than the chip's.")
flags.DEFINE_string("out", "out/largest_model", "Where the .json and the .png go.")


class Prober:
    """Compiles decoders for one target, and remembers what fitted."""

    def __init__(self, target: aot.Target, path: Path):
        self.target = target
        self.path = path
        self._known: dict[str, dict] = {}
        if path.exists():
            self._known = json.loads(path.read_text())

    def workload(self, layers: int):
        return decoder(
            FLAGS.scan,
            layers=layers,
            width=FLAGS.width,
            heads=max(1, FLAGS.width // 128),
            vocabulary=FLAGS.vocabulary,
            batch=FLAGS.batch,
            context=FLAGS.context,
        )

    def __call__(self, mode: str, layers: int) -> Probe:
        key = json.dumps(
            [
                jax.__version__,
                library_digest(mode),
                *(self.target.name, self.target.memory_bytes, mode, layers),
                *(FLAGS.scan, FLAGS.width, FLAGS.vocabulary),
                *(FLAGS.batch, FLAGS.context),
            ]
        )
        if key in self._known:
            return Probe(**self._known[key])
        started = time.perf_counter()
        try:
            compiled = compile_step(self.workload(layers), self.target, MODES[mode])
            fits, used = True, aot.peak(compiled).peak_bytes
        except aot.DoesNotFitError as error:
            fits, used = False, error.used_bytes
        probe = Probe(fits, used, time.perf_counter() - started)
        print(
            f"  {self.target.name} {mode}: {layers} layers need {used / 2**30:.2f} of "
            f"{self.target.memory_bytes / 2**30:.2f} GiB"
            f"{'' if fits else ': do not fit'} ({probe.seconds:.0f} s)",
            flush=True,
        )
        self._known[key] = dataclasses.asdict(probe)
        self.path.write_text(json.dumps(self._known, indent=1) + "\n")
        return probe

    def parameters(self, layers: int) -> int:
        if not layers:
            return 0
        return sum(p.size for p in jax.tree.leaves(self.workload(layers).params))


def first_guess(prober: Prober, mode: str) -> int:
    """As many layers as would fit if only their arrays counted.

    Parameters and gradients of 4 bytes each, and Adam's two values beside them; no
    gradients where the step is fused.
    """
    moved = MODES[mode].optimizer is not as_it_is
    fused = MODES[mode].step is not as_it_is
    copies = 4 - 2 * moved - fused
    one, two = (prober.parameters(n) for n in (1, 2))
    left = prober.target.memory_bytes * prober.target.device_count / 4 / copies
    return max(1, min(MAX_LAYERS - 1, int((left - (2 * one - two)) / (two - one))))


def plot(rows: list[dict], path: Path) -> None:
    """Writes the parameters as bars, side by side for each target."""
    targets = list(dict.fromkeys(r["target"] for r in rows))
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    width = 0.8 / len(modes)
    figure = Figure(figsize=(2 * len(targets) + 2, 4), layout="constrained")
    axes = figure.subplots()
    for i, mode in enumerate(modes):
        sizes = {r["target"]: r["parameters"] / 1e9 for r in rows if r["mode"] == mode}
        places = [t + width * (i - (len(modes) - 1) / 2) for t in range(len(targets))]
        bars = axes.bar(places, [sizes[t] for t in targets], 0.9 * width, label=mode)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(targets)), targets)
    axes.set(ylabel="parameters of the largest decoder (billions)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
    """Searches for each target and mode, and prints what fits."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    memory_bytes = int(FLAGS.memory_gib * 2**30) if FLAGS.memory_gib else None
    rows = []
    for name in FLAGS.targets:
        target = aot.Target(name, memory_bytes=memory_bytes)
        prober = Prober(target, out.with_suffix(".probes.json"))
        for mode in FLAGS.modes:

            def probe(layers: int, mode: str = mode, prober: Prober = prober) -> Probe:
                return prober(mode, layers)

            layers = largest(probe, target.memory_bytes, first_guess(prober, mode))
            row = {"target": name, "mode": mode, "layers": layers}
            row["parameters"] = prober.parameters(layers)
            rows.append(row)
            over = {
                r["mode"]: row["parameters"] / max(r["parameters"], 1)
                for r in rows
                if r["target"] == name
            }
            row["over"] = over
            print(
                f"{name:9s} {mode:11s} {layers:5d} layers  "
                f"{row['parameters'] / 1e9:7.3f} billion parameters  "
                + ", ".join(f"{x:.2f} of {m}" for m, x in over.items() if m != mode),
                flush=True,
            )
    table = {
        "jax": jax.__version__,
        "memory_bytes": memory_bytes,
        "scan": FLAGS.scan,
        "width": FLAGS.width,
        "vocabulary": FLAGS.vocabulary,
        "batch": FLAGS.batch,
        "context": FLAGS.context,
        "rows": rows,
    }
    out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    plot(rows, out.with_suffix(".png"))
    print(f"also in {out}.json and {out}.png")


if __name__ == "__main__":
    app.run(main)
