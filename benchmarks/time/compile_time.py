"""What offloading costs before the first step: tracing, lowering and compiling.

An update of many leaves, with clipping and adamw, on the CPU; a step of as many layers
in a Python loop there; and the whole step of a scanned decoder, for chips that need not
be here, with and without the updates in its backward pass. The modes take turns, so
that a machine that is busy for a while is busy for all of them.

Run (the second is the step alone):
    JAX_PLATFORMS=cpu python -m benchmarks.time.compile_time
    JAX_PLATFORMS=cpu python -m benchmarks.time.compile_time --parts=step
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
from benchmarks.common.steps import MODES, compile_step
from benchmarks.common.workloads import decoder
from optax_offload import aot

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", ["update", "unrolled", "tracing", "step"], "What is timed.")
flags.DEFINE_integer("leaves", 600, "Leaves that are compiled.")
flags.DEFINE_list(
    "traced_leaves", ["150", "300", "600", "1200"], "Leaves that are traced."
)
flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile the step for.")
flags.DEFINE_integer("rounds", 3, "Turns of each mode.")
flags.DEFINE_string("out", "out/compile_time", "Where the .json goes.")

# Of an update alone: there is no backward pass to fuse it into.
COMPARED = ("no offload", "recipe", "ours")
STEPS_COMPARED = ("no offload", "ours", "fused")
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
    stage = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return seconds_of(stage, (params, state, params), phases)


def timed_unrolled(mode: str, count: int) -> dict[str, float]:
    """Those of a step of so many layers, of 64 KiB each, in a Python loop."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=device)] * count
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=device)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    jit = oo.jit if mode == "ours" else jax.jit
    tx = oo.offload(tx) if mode == "ours" else tx

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = oo.eval_shape(tx.init, params)
    stage = jit(step, donate_argnums=(0, 1))
    return seconds_of(stage, (params, state, x), PHASES)


def seconds_of(
    stage: Any, given: tuple[Any, ...], phases: Sequence[str]
) -> dict[str, float]:
    """The seconds of each phase of a jitted function, and of all of them."""
    jax.clear_caches()  # Or only the first mode would trace optax's own jits.
    seconds: dict[str, float] = {}
    for phase in phases:
        args = given if phase == "trace" else ()
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


def steps_in_turns(target: str, rounds: int) -> list[dict]:
    """A row for each mode and round: the seconds of a whole step."""
    workload = decoder(scan=True)
    rows = []
    for r, mode in [(r, mode) for r in range(rounds) for mode in STEPS_COMPARED]:
        jax.clear_caches()
        started, started_cpu = time.perf_counter(), time.process_time()
        compile_step(workload, aot.Target(target), MODES[mode])
        row = {"target": target, "mode": mode, "round": r}
        row["total"] = time.perf_counter() - started
        row["cpu_total"] = time.process_time() - started_cpu
        rows.append(row)
        print(f"round {r}  {target:9s} {mode:11s} {row['total']:6.2f} s", flush=True)
    return rows


def ratios(rows: list[dict], phase: str, to: str, mode: str = "ours") -> list[float]:
    """Of a mode's time to another's, in each round."""
    by = {(r["mode"], r["round"]): r[phase] for r in rows}
    rounds = sorted({r["round"] for r in rows})
    return [by[mode, r] / by[to, r] for r in rounds]


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


def time_update() -> dict[str, Any]:
    """Compiles the update in turns, and prints the ratios."""
    compiled = in_turns([FLAGS.leaves], FLAGS.rounds, PHASES)
    ratio = {}
    for to in [mode for mode in COMPARED if mode != "ours"]:
        medians = {
            phase: statistics.median(ratios(compiled, phase, to))
            for phase in (*PHASES, "total", "cpu_total")
        }
        ratio[to] = medians
        listed = ", ".join(f"{phase} {x:.2f}" for phase, x in medians.items())
        print(f"ours / {to}, medians of {FLAGS.rounds}: {listed}")
    return {"compiled": compiled, "ratio": ratio}


def time_unrolled() -> dict[str, Any]:
    """Compiles the step of unrolled layers in turns, and prints the ratios."""
    turns = [(r, m) for r in range(FLAGS.rounds) for m in ("no offload", "ours")]
    rows = []
    for r, mode in turns:
        row = {"mode": mode, "round": r} | timed_unrolled(mode, FLAGS.leaves)
        rows.append(row)
        seconds = "  ".join(f"{p} {row[f'cpu_{p}']:6.2f}" for p in (*PHASES, "total"))
        print(f"round {r}  unrolled  {mode:11s} of the CPU {seconds}", flush=True)
    medians = {
        phase: statistics.median(ratios(rows, f"cpu_{phase}", "no offload"))
        for phase in (*PHASES, "total")
    }
    listed = ", ".join(f"{phase} {x:.2f}" for phase, x in medians.items())
    print(f"unrolled, ours / no offload, medians of {FLAGS.rounds}: {listed}")
    return {"unrolled": rows, "unrolled_ratio": medians}


def time_tracing() -> dict[str, Any]:
    """Traces updates of more and more leaves, and prints how the seconds grow."""
    counts = [int(n) for n in FLAGS.traced_leaves]
    traced = in_turns(counts, FLAGS.rounds, ("trace",))
    found = {m: growth(traced, m) for m in COMPARED}
    for mode, exponent in found.items():
        print(f"tracing, {mode}: seconds grow as leaves ** {exponent:.2f}")
    return {"traced": traced, "growth": found}


def time_steps() -> dict[str, Any]:
    """Compiles the step in turns, and prints the ratios."""
    rows = [r for t in FLAGS.targets for r in steps_in_turns(t, FLAGS.rounds)]
    found = {}
    for target in FLAGS.targets:
        own = [r for r in rows if r["target"] == target]
        for to in ("no offload", "ours"):
            medians = {
                phase: statistics.median(ratios(own, phase, to, "fused"))
                for phase in ("total", "cpu_total")
            }
            found[f"{target}, fused / {to}"] = medians
            listed = ", ".join(f"{phase} {x:.2f}" for phase, x in medians.items())
            print(f"{target}: fused / {to}, medians of {FLAGS.rounds}: {listed}")
    return {"steps": rows, "step_ratio": found}


def main(argv: Sequence[str]) -> None:
    """Times the phases of each mode in turns, and prints the ratios."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    parts = {
        "update": time_update,
        "unrolled": time_unrolled,
        "tracing": time_tracing,
        "step": time_steps,
    }
    found: dict[str, Any] = {"jax": jax.__version__}
    for part in FLAGS.parts:
        found |= parts[part]()
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"also in {out}")


if __name__ == "__main__":
    app.run(main)
