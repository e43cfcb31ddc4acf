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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import optax_offload as oo
from benchmarks.common import command, turns
from benchmarks.common.steps import MODES, compile_step, train_step
from benchmarks.common.workloads import WORKLOADS, Workload
from optax_offload import aot

FLAGS = flags.FLAGS
MODES_OF = {
    "update": ("no offload", "recipe", "ours"),
    "unrolled": ("no offload", "ours"),
    "step": ("no offload", "ours", "fused"),
}
PHASES = ("trace", "lower", "compile")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def on_device(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array of the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)


def timed_update(mode: str, count: int) -> turns.Seconds:
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


def timed_unrolled(mode: str, count: int) -> turns.Seconds:
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


def timed_step(mode: str, target: str) -> turns.Seconds:
    """The whole step of a decoder."""
    jax.clear_caches()
    args = WORKLOADS["decoder_scanned"](), aot.Target(target), MODES[mode]
    return {"total": turns.clocked(compile_step, *args)[2]}


def seconds_of(stage: Any, given: tuple[Any, ...]) -> turns.Seconds:
    """The CPU seconds of each phase and of all of them."""
    jax.clear_caches()  # Or only the first mode would trace optax's own jits.
    seconds: turns.Seconds = {}
    for phase in PHASES:
        args = given if phase == "trace" else ()
        stage, _, seconds[phase] = turns.clocked(getattr(stage, phase), *args)
    return seconds | {"total": sum(seconds.values())}


def table(
    what: str, modes: Sequence[str], timed: Callable[..., turns.Seconds], size: Any
) -> turns.Rounds:
    """The seconds of each mode and round; prints medians, and the last over others."""
    ways = {mode: functools.partial(timed, mode, size) for mode in modes}
    found = turns.in_turns(ways, FLAGS.rounds)
    phases = [*found[modes[0]]]
    command.print_header((what, ""), phases)
    for mode in modes:
        medians = [turns.median(found, mode, phase) for phase in phases]
        command.print_row((mode, "seconds"), medians)
    for mode in modes[:-1]:
        ratios = [turns.ratio(found, modes[-1], mode, phase) for phase in phases]
        command.print_row((modes[-1], f"of {mode}"), ratios)
    return found


def main() -> None:
    """Times each part."""
    count, tables = FLAGS.leaves, {}
    parts = {
        f"{count} leaves": ("update", timed_update, count),
        f"{count} layers": ("unrolled", timed_unrolled, count),
        **{target: ("step", timed_step, target) for target in FLAGS.targets},
    }
    for what, (part, timed, size) in parts.items():
        if part in FLAGS.parts:
            tables[what] = table(what, MODES_OF[part], timed, size)
    command.write(cpu_seconds=tables)


if __name__ == "__main__":
    flags.DEFINE_list("parts", list(MODES_OF), "What is timed.")
    flags.DEFINE_integer("leaves", 600, "Leaves, and layers, that are compiled.")
    flags.DEFINE_integer("rounds", 3, "Turns of each mode.")
    command.define_shared(targets=["h100", "v5e:2x2"])
    command.run(main, out="out/compile_time")
