r"""The time of a step on the accelerator of this machine, and what it is made of.

A Flax decoder is trained for some steps without offload (where it fits), with the usual
recipe, and with ours at several windows: in turns, in one process. Beside each:

- the floor: the bytes of state that are moved over the bandwidth of the link, measured
  here with loads and stores at once;
- the peak of device memory, in a process of its own: `peak_bytes_in_use` is a
  high-water mark of the whole process. It counts the initialisation, too;
- from a profile, how long transfers run, and how much of that beside kernels.

Run (the second only tries it out):
    python -m benchmarks.time.step_time --out=benchmarks/results/h100
    JAX_PLATFORMS=cpu python -m benchmarks.time.step_time --layers=2 --width=64 \
        --heads=2 --vocabulary=256 --batch=2 --context=16 --bandwidth_mib=8 \
        --windows_mib=1
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from matplotlib.figure import Figure

import optax_offload as oo
from benchmarks.common.spans import of_profile
from benchmarks.common.steps import recipe, train_step
from benchmarks.common.workloads import Workload, decoder
from optax_offload._units import MIB

FLAGS = flags.FLAGS
flags.DEFINE_bool("scan", True, "Layers as one stacked leaf, by nn.scan.")
flags.DEFINE_integer("layers", 24, "Of the decoder.")
flags.DEFINE_integer("width", 2048, "Of a layer, which has 12 * width**2 parameters.")
flags.DEFINE_integer("heads", 16, "Of the attention.")
flags.DEFINE_integer("vocabulary", 32768, "Its embedding is also the output layer.")
flags.DEFINE_integer("batch", 8, "Sequences in a step.")
flags.DEFINE_integer("context", 512, "Tokens in a sequence.")
flags.DEFINE_list("windows_mib", ["64", "256", "1024"], "Beside the default window.")
flags.DEFINE_integer("steps", 10, "Steps that are timed in a turn.")
flags.DEFINE_integer("rounds", 5, "Turns of each mode.")
flags.DEFINE_integer("bandwidth_mib", 1024, "Moved each way to measure the link.")
flags.DEFINE_string("out", "out/step_time", "Where the .json and the .png go.")
flags.DEFINE_string("peak_of", None, "Only run this mode, and print its peak.")

PROFILED_STEPS = 3


def modes() -> dict[str, Callable[[Any], Any]]:
    """No offload, the recipe, and ours at the default and at other windows."""
    windows = {
        f"ours, {mib} MiB": functools.partial(
            oo.offload, window_bytes=int(float(mib) * MIB)
        )
        for mib in FLAGS.windows_mib
    }
    return {
        "no offload": lambda tx: tx,
        "recipe": recipe,
        "ours": oo.offload,
        **windows,
    }


def workload() -> Workload:
    """Makes the decoder that the flags describe."""
    return decoder(
        FLAGS.scan,
        layers=FLAGS.layers,
        width=FLAGS.width,
        heads=FLAGS.heads,
        vocabulary=FLAGS.vocabulary,
        batch=FLAGS.batch,
        context=FLAGS.context,
    )


class Trainer:
    """A compiled train step of one mode, and what it takes to start."""

    def __init__(self, mode: str):
        work = workload()
        tx = modes()[mode](work.optimizer)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=device),
            work.params,
        )
        state = oo.eval_shape(tx.init, params)
        kinds = jax.tree.map(lambda s: s.sharding, (params, state))
        x = jax.ShapeDtypeStruct(work.x.shape, work.x.dtype, sharding=device)

        def init(key: jax.Array) -> Any:
            leaves, treedef = jax.tree.flatten(work.params)
            keys = jax.random.split(key, len(leaves))
            values = [
                0.02 * jax.random.normal(k, p.shape, p.dtype)
                for k, p in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(treedef, values)

        self._init = jax.jit(init, out_shardings=kinds[0])
        self._init_state = jax.jit(tx.init, out_shardings=kinds[1])
        self._step = (
            jax.jit(train_step(work, tx), donate_argnums=(0, 1), out_shardings=kinds)
            .lower(params, state, x)
            .compile()
        )
        self._x = jax.random.randint(
            jax.random.key(1), x.shape, 0, FLAGS.vocabulary, x.dtype
        )
        moved = [
            s.size * s.dtype.itemsize
            for s in jax.tree.leaves(state)
            if s.sharding.memory_kind == "pinned_host"
        ]
        self.moved_bytes = sum(moved)

    def seconds(self, steps: int, log_dir: str | None = None) -> float:
        """Of a step, after two that are not timed. All is made anew, and freed."""
        params = self._init(jax.random.key(0))
        state = self._init_state(params)
        for _ in range(2):
            params, state = self._step(params, state, self._x)
        jax.block_until_ready((params, state))
        if log_dir is not None:
            jax.profiler.start_trace(log_dir)
        started = time.perf_counter()
        for _ in range(steps):
            params, state = self._step(params, state, self._x)
        jax.block_until_ready((params, state))
        seconds = (time.perf_counter() - started) / steps
        if log_dir is not None:
            jax.profiler.stop_trace()
        return seconds


def bandwidths(size: int, chunks: int = 16, rounds: int = 5) -> dict[str, float]:
    """Bytes per second of loads, of stores, and of each of them when both are run."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    shape = (max(1, size // chunks // 4),)
    make = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=device)
    here = [make() for _ in range(chunks)]
    there = jax.block_until_ready(jax.device_put(here, host))

    def load() -> list[Any]:
        return [jax.device_put(x, device) for x in there]

    def store() -> list[Any]:
        return [jax.device_put(x, host) for x in here]

    def both() -> list[Any]:
        pairs = zip(there, here, strict=True)
        return [(jax.device_put(a, device), jax.device_put(b, host)) for a, b in pairs]

    moved = 4 * shape[0] * chunks
    found = {}
    for name, move in {"load": load, "store": store, "both": both}.items():
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            jax.block_until_ready(move())
            seconds.append(time.perf_counter() - started)
        found[name] = moved / statistics.median(seconds[1:])
    return found


def peak_of(mode: str) -> dict[str, Any]:
    """Runs a mode by itself, for the high-water mark of device memory."""
    try:
        Trainer(mode).seconds(3)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does_not_fit": str(error)[:300]}
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes": stats.get("peak_bytes_in_use")}


def peak_in_a_process(mode: str) -> dict[str, Any]:
    """The same in a process of its own, with the flags of this one."""
    module = "benchmarks.time.step_time"
    command = [sys.executable, "-m", module, *sys.argv[1:], f"--peak_of={mode}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        # Such as a kill for lack of memory, of the host's too.
        return {"failed": done.returncode, "stderr": done.stderr[-1000:]}
    return json.loads(done.stdout.splitlines()[-1])


def plot(rows: list[dict], path: Path) -> None:
    """Writes the step times as bars, with the floor of each."""
    figure = Figure(figsize=(1.2 * len(rows) + 2, 4), layout="constrained")
    axes = figure.subplots()
    names = [r["mode"].replace(", ", "\n") for r in rows]
    bars = axes.bar(names, [1e3 * r["seconds"] for r in rows], 0.6)
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    for i, r in enumerate(rows):
        floor = 1e3 * r["floor_seconds"]
        label = "the link's floor" if i == len(rows) - 1 else None
        axes.plot([i - 0.4, i + 0.4], [floor, floor], "k--", label=label)
    axes.set(ylabel="step (ms)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
    """Times and profiles all modes, each beside its floor."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    if FLAGS.peak_of:
        print(json.dumps(peak_of(FLAGS.peak_of)))
        return
    # First: this process takes most of an accelerator's memory as soon as it uses it.
    peaks = {mode: peak_in_a_process(mode) for mode in modes()}
    device = jax.devices()[0]
    link = bandwidths(FLAGS.bandwidth_mib * MIB)
    print(f"{device.device_kind}, JAX {jax.__version__}; GB/s of the link: ", end="")
    print(", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in link.items()))
    not_run = {mode: p for mode, p in peaks.items() if "peak_bytes" not in p}
    for mode, why in not_run.items():
        print(f"{mode}: {why}")
    rows = in_turns([mode for mode in peaks if mode not in not_run])
    plain = next((r["seconds"] for r in rows if r["mode"] == "no offload"), 0.0)
    for row in rows:
        row["floor_seconds"] = row["moved_bytes_each_way"] / link["both"]
        floor = max(plain, row["floor_seconds"])
        row["over_floor"] = row["seconds"] / floor if floor else None
        row |= peaks[row["mode"]]
        print_row(row)
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "bytes_per_second": link,
        "flags": {f.name: f.value for f in FLAGS.get_flags_for_module(sys.argv[0])},
        "not_run": not_run,
        "rows": rows,
    }
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    plot(rows, out.with_suffix(".png"))
    print(f"also in {out}.json and {out}.png")


def in_turns(names: Sequence[str]) -> list[dict[str, Any]]:
    """Times the modes in turns, then profiles each; a row for each."""
    trainers = {mode: Trainer(mode) for mode in names}
    seconds: dict[str, list[float]] = {mode: [] for mode in names}
    for _ in range(FLAGS.rounds):
        for mode, trainer in trainers.items():
            seconds[mode].append(trainer.seconds(FLAGS.steps))
    rows = []
    for mode, trainer in trainers.items():
        with tempfile.TemporaryDirectory() as log_dir:
            trainer.seconds(PROFILED_STEPS, log_dir)
            profiled = of_profile(Path(log_dir))
        over = {
            other: statistics.median(
                a / b for a, b in zip(seconds[mode], seconds[other], strict=True)
            )
            for other in names
        }
        rows.append(
            {
                "mode": mode,
                "seconds": statistics.median(seconds[mode]),
                "all_seconds": seconds[mode],
                "over": over,
                "moved_bytes_each_way": trainer.moved_bytes,
                "profiled_steps": PROFILED_STEPS,
                "profile": profiled,
            }
        )
    return rows


def print_row(row: dict) -> None:
    """Prints a row of the table."""
    peak = row["peak_bytes"]
    profiled = row["profile"] or {}
    hidden = profiled.get("hidden_share")
    over = row["over_floor"]
    print(
        f"{row['mode']:16s} {row['seconds'] * 1e3:9.2f} ms a step, "
        f"{'-' if over is None else f'{over:.2f}'} of max(no offload, floor); "
        f"floor {row['floor_seconds'] * 1e3:.2f} ms; "
        f"peak {'-' if peak is None else f'{peak / MIB:.0f} MiB'}; "
        f"hidden {'-' if hidden is None else f'{hidden:.0%}'}",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
