"""What offloading costs before the first step: tracing, lowering and compiling.

An update of many leaves, with clipping and adamw, on the CPU. The modes take turns, so
that a machine that is busy for a while is busy for all of them.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.time.compile_time
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import optax_offload as oo
from benchmarks.common.steps import MODES

FLAGS = flags.FLAGS
flags.DEFINE_integer("leaves", 600, "Leaves that are compiled.")
flags.DEFINE_list(
    "traced_leaves", ["150", "300", "600", "1200"], "Leaves that are traced."
)
flags.DEFINE_integer("rounds", 3, "Turns of each mode.")
flags.DEFINE_string("out", "out/compile_time", "Where the .json goes.")

# Of an update alone: there is no backward pass to fuse it into.
COMPARED = ("no offload", "recipe", "ours")
PHASES = ("trace", "lower", "compile")


def leaves_of(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """As many matrices of 128 KiB: above `Rule.min_bytes`, so that all are moved."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=device)
    return {f"layer_{i}": leaf for i in range(count)}


def timed(mode: str, count: int, phases: Sequence[str] = PHASES) -> dict[str, float]:
    """The seconds of each phase and of all of them, by the clock and of the CPU."""
    params = leaves_of(count)
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = MODES[mode].optimizer(plain)
    state = oo.eval_shape(tx.init, params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda s: s.sharding, (params, state))
    stage: Any = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    jax.clear_caches()  # Or only the first mode would trace optax's own jits.
    seconds: dict[str, float] = {}
    for phase in phases:
        args = (params, state, params) if phase == "trace" else ()
        started, started_cpu = time.perf_counter(), time.process_time()
        stage = getattr(stage, phase)(*args)
        seconds[phase] = time.perf_counter() - started
        seconds[f"cpu_{phase}"] = time.process_time() - started_cpu
    for prefix in ("", "cpu_"):
        seconds[f"{prefix}total"] = sum(seconds[prefix + phase] for phase in phases)
    return seconds


def in_turns(counts: Sequence[int], rounds: int, phases: Sequence[str]) -> list[dict]:
    """A row for each mode, number of leaves and round."""
    turns = [(r, n, mode) for r in range(rounds) for n in counts for mode in COMPARED]
    rows = []
    for r, n, mode in turns:
        row = {"leaves": n, "mode": mode, "round": r} | timed(mode, n, phases)
        rows.append(row)
        seconds = "  ".join(f"{p} {row[p]:6.2f}" for p in (*phases, "total"))
        print(f"round {r}  {n:5d} leaves  {mode:11s} {seconds}", flush=True)
    return rows


def ratios(rows: list[dict], phase: str, to: str) -> list[float]:
    """Of our time to another mode's, in each round."""
    by = {(r["mode"], r["round"]): r[phase] for r in rows}
    rounds = sorted({r["round"] for r in rows})
    return [by["ours", r] / by[to, r] for r in rounds]


def growth(rows: list[dict], mode: str) -> float:
    """The exponent e of seconds = c * leaves ** e: 1 is linear, 2 is quadratic.

    Of the CPU's seconds in the fastest round, which other processes disturb less.
    """
    counts = sorted({r["leaves"] for r in rows})
    seconds = [
        min(r["cpu_trace"] for r in rows if r["mode"] == mode and r["leaves"] == n)
        for n in counts
    ]
    return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])


def main(argv: Sequence[str]) -> None:
    """Times the phases of each mode in turns, and prints the ratios."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    compiled = in_turns([FLAGS.leaves], FLAGS.rounds, PHASES)
    found: dict[str, Any] = {"jax": jax.__version__, "compiled": compiled, "ratio": {}}
    for to in [mode for mode in COMPARED if mode != "ours"]:
        medians = {
            phase: statistics.median(ratios(compiled, phase, to))
            for phase in (*PHASES, "total", "cpu_total")
        }
        found["ratio"][to] = medians
        listed = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in medians.items())
        print(f"ours / {to}, medians of {FLAGS.rounds}: {listed}")
    counts = [int(n) for n in FLAGS.traced_leaves]
    traced = in_turns(counts, FLAGS.rounds, ("trace",))
    found |= {"traced": traced, "growth": {m: growth(traced, m) for m in COMPARED}}
    for mode, exponent in found["growth"].items():
        print(f"tracing, {mode}: seconds grow as leaves ** {exponent:.2f}")
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"also in {out}")


if __name__ == "__main__":
    app.run(main)
