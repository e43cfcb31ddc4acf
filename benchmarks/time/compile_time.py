"""What offloading costs before the first step: tracing, lowering and compiling.

`--parts`: an update of many leaves, with clipping and adamw, on the CPU; a step of as
many layers in a Python loop; and the whole step of a scanned decoder, for chips that
need not be here, with and without the updates in its backward pass. The modes take
turns, so that a machine that is busy for a while is busy for all of them.

Run (the second is the step alone):
    JAX_PLATFORMS=cpu python -m benchmarks.time.compile_time
    JAX_PLATFORMS=cpu python -m benchmarks.time.compile_time --parts=step
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import optax_offload as oo
from benchmarks.common import command
from benchmarks.common.steps import MODES, compile_step, train_step
from benchmarks.common.workloads import WORKLOADS, Workload
from optax_offload import aot

FLAGS = flags.FLAGS
PHASES = ("trace", "lower", "compile")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
Seconds = dict[str, float]


def on_device(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array of the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)


def timed_update(mode: str, count: int) -> Seconds:
    """An update of so many matrices of 128 KiB: above `Rule.min_bytes`, so all move."""
    params = {f"layer_{i}": on_device(128, 256) for i in range(count)}
    tx = MODES[mode].optimizer(CLIPPED)
    state = oo.eval_shape(tx.init, params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda s: s.sharding, (params, state))
    stage = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return seconds_of(stage, (params, state, params))


def timed_unrolled(mode: str, count: int) -> Seconds:
    """A step of so many layers, of 64 KiB each, in a Python loop."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    jit = oo.jit if mode == "ours" else jax.jit
    tx: Any = oo.offload(CLIPPED) if mode == "ours" else CLIPPED
    params, x = [on_device(128, 128)] * count, on_device(16, 128)
    step = train_step(Workload(loss, params, x, tx), tx)
    stage = jit(step, donate_argnums=(0, 1))
    return seconds_of(stage, (params, oo.eval_shape(tx.init, params), x))


def timed_step(mode: str, target: str) -> Seconds:
    """The whole step of a decoder."""
    jax.clear_caches()
    args = WORKLOADS["decoder_scanned"](), aot.Target(target), MODES[mode]
    return clocked("total", compile_step, *args)[1]


def clocked(what: str, call: Any, *args: Any) -> tuple[Any, Seconds]:
    """What a call returns, and its seconds, by the clock and of the CPU."""
    started, started_cpu = time.perf_counter(), time.process_time()
    found = call(*args)
    seconds = time.perf_counter() - started
    return found, {what: seconds, f"cpu_{what}": time.process_time() - started_cpu}


def seconds_of(stage: Any, given: tuple[Any, ...]) -> Seconds:
    """The seconds of each phase and of all of them."""
    jax.clear_caches()  # Or only the first mode would trace optax's own jits.
    seconds: Seconds = {}
    for phase in PHASES:
        args = given if phase == "trace" else ()
        stage, found = clocked(phase, getattr(stage, phase), *args)
        seconds |= found
    for prefix in ("", "cpu_"):
        seconds[f"{prefix}total"] = sum(seconds[prefix + phase] for phase in PHASES)
    return seconds


def in_turns(
    what: str, modes: Sequence[str], timed: Callable[[str], Seconds]
) -> list[dict[str, Any]]:
    """A row for each round and mode; prints medians, and the last over the others."""
    rows: list[dict[str, Any]] = []
    for number in range(FLAGS.rounds):
        for mode in modes:
            rows.append({"of": what, "mode": mode, "round": number} | timed(mode))
    phases = [key for key in rows[0] if key.endswith(("total", *PHASES))]
    command.print_header((what, ""), phases)
    own = {
        mode: {p: [r[p] for r in rows if r["mode"] == mode] for p in phases}
        for mode in modes
    }
    for mode in modes:
        medians = [statistics.median(own[mode][p]) for p in phases]
        command.print_row((mode, "seconds"), medians)
    for mode in modes[:-1]:
        ratios = [
            statistics.median(
                a / b for a, b in zip(own[modes[-1]][p], own[mode][p], strict=True)
            )
            for p in phases
        ]
        command.print_row((modes[-1], f"of {mode}"), ratios)
    return rows


def main() -> None:
    """Times each part."""
    count, rows = FLAGS.leaves, []
    if "update" in FLAGS.parts:
        timed = functools.partial(timed_update, count=count)
        rows += in_turns(f"{count} leaves", ("no offload", "recipe", "ours"), timed)
    if "unrolled" in FLAGS.parts:
        timed = functools.partial(timed_unrolled, count=count)
        rows += in_turns(f"{count} layers", ("no offload", "ours"), timed)
    for target in FLAGS.targets if "step" in FLAGS.parts else ():
        timed = functools.partial(timed_step, target=target)
        rows += in_turns(target, ("no offload", "ours", "fused"), timed)
    command.write(rows=rows)


if __name__ == "__main__":
    parts = ["update", "unrolled", "step"]
    flags.DEFINE_list("parts", parts, "What is timed.")
    flags.DEFINE_integer("leaves", 600, "Leaves, and layers, that are compiled.")
    flags.DEFINE_integer("rounds", 3, "Turns of each mode.")
    command.define_shared(targets=["h100", "v5e:2x2"])
    command.run(main, out="out/compile_time")
