"""The update on a CPU, in the two forms that docs/how-it-works.md looks at.

Adam's update of 16 matrices, computed by XLA on this machine's CPU: as optax does it in
a jit; as a host computation of a program (`compute_on`); and as a second program, on
another device of the CPU backend, where the state is: gradients are copied to it and
updates back, as they would be from and to an accelerator. Beside them as many bytes
that are only read and written. All take turns, so that a machine that is busy for a
while is busy for all of them; a ratio is the median of those of the turns. CPU time, of
all threads, tells more than the clock's where other processes take turns too.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.time.host_update
    JAX_PLATFORMS=cpu python -m benchmarks.time.host_update --width=256 --rounds=1
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.experimental import compute_on

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_integer("leaves", 16, "Matrices.")
flags.DEFINE_integer("width", 1024, "Rows and columns of each.")
flags.DEFINE_integer("rounds", 15, "Turns of each form.")

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# A gradient and two moments are read; an update and two moments are written.
BYTES_PER_PARAMETER = 24
_ON: Any = functools.partial(  # Until JAX 0.11 it has another name.
    getattr(compute_on, "compute_on2", None) or compute_on.compute_on,
    compute_type="device_host",
)
Update = Callable[[Any, Any], tuple[Any, Any]]


def every_leaf(update: Update, grads: Any, states: Any) -> tuple[Any, Any]:
    """The new states and updates of leaves, each by itself.

    States come first: JAX pairs donated arguments with results in their order.
    """
    pairs = [update(g, s) for g, s in zip(grads, states, strict=True)]
    return [s for _, s in pairs], [u for u, _ in pairs]


def plain(tx: optax.GradientTransformation) -> Update:
    """As optax does it."""
    return jax.jit(functools.partial(every_leaf, tx.update), donate_argnums=1)


def in_the_step(tx: optax.GradientTransformation) -> Update:
    """Each leaf's update is a host computation of a program."""

    def leaf(g: Any, state: Any) -> tuple[Any, Any]:
        run = _ON(tx.update, out_memory_spaces=(DEVICE, HOST))
        return run(jax.device_put(g, HOST), state)

    # JAX's own jit would donate moments to updates, of another memory (F34).
    return oo.jit(functools.partial(every_leaf, leaf), donate_argnums=1)


def second_program(tx: optax.GradientTransformation) -> Update:
    """The update is a program of its own, on the device that the state is on."""
    accelerator, host = jax.devices()[:2]
    run = jax.jit(functools.partial(every_leaf, tx.update), donate_argnums=1)

    def update(grads: Any, states: Any) -> tuple[Any, Any]:
        states, updates = run(jax.device_put(grads, host), states)
        return states, jax.device_put(updates, accelerator)

    return update


def only_bytes() -> Update:
    """As many bytes, read and written."""
    return jax.jit(lambda g, s: jax.tree.map(lambda x: x + 1, (s, g)), donate_argnums=1)


def main(argv: Sequence[str]) -> None:
    """Prints a line for each form."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    tx = optax.adam(1e-3)
    keys = jax.random.split(jax.random.key(0), FLAGS.leaves)
    grads = [jax.random.normal(key, (FLAGS.width, FLAGS.width)) for key in keys]
    accelerator, host = jax.devices()[:2]
    on_host = jax.sharding.SingleDeviceSharding(accelerator, memory_kind="pinned_host")
    forms = {
        "optax": (plain(tx), accelerator),
        "in the step": (in_the_step(tx), on_host),
        "second program": (second_program(tx), host),
        "only bytes": (only_bytes(), accelerator),
    }
    states = {
        name: jax.device_put([tx.init(g) for g in grads], where)
        for name, (_, where) in forms.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in forms}
    by_thread: dict[str, Counter[str]] = {name: Counter() for name in forms}
    updates: dict[str, Any] = {}
    for _ in range(FLAGS.rounds + 1):
        for name, (update, _) in forms.items():
            jax.block_until_ready((grads, states[name]))
            before = ticks()
            wall, busy = time.perf_counter(), time.process_time()
            states[name], updates[name] = update(grads, states[name])
            jax.block_until_ready((updates[name], states[name]))
            seconds[name].append(time.perf_counter() - wall)
            cpu_seconds[name].append(time.process_time() - busy)
            by_thread[name] += ticks() - before
    parameters = FLAGS.leaves * FLAGS.width**2
    print(f"JAX {jax.__version__}, {os.cpu_count()} CPUs, {parameters} parameters")
    for name in forms:
        wall, busy = (statistics.median(s[name][1:]) for s in (seconds, cpu_seconds))
        rate = BYTES_PER_PARAMETER * parameters / wall / 1e9
        same = all(
            bool(jnp.array_equal(jax.device_put(u, accelerator), v))
            for u, v in zip(updates[name], updates["optax"], strict=True)
        )
        print(
            f"{name:15s}{1e3 * wall:8.1f} ms, {over_optax(seconds, name):5.2f} of "
            f"optax's; CPU {1e3 * busy:8.1f} ms, {over_optax(cpu_seconds, name):5.2f}; "
            f"{working(by_thread[name])} threads, {rate:5.1f} GB/s"
            + ("" if name == "only bytes" else f", bits of optax's: {same}")
        )


def ticks() -> Counter[str]:
    """The CPU time of each thread of this process, in the kernel's ticks."""
    found: Counter[str] = Counter()
    for stat in Path("/proc/self/task").glob("*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        found[stat.parent.name] = int(fields[11]) + int(fields[12])
    return found


def working(by_thread: Counter[str]) -> int:
    """The threads that had a tenth of the time, or more."""
    total = by_thread.total()
    return sum(10 * spent >= total for spent in by_thread.values() if spent)


def over_optax(seconds: dict[str, list[float]], name: str) -> float:
    """How many times optax's own time; the first turn compiles."""
    turns = zip(seconds[name][1:], seconds["optax"][1:], strict=True)
    return statistics.median(a / b for a, b in turns)


if __name__ == "__main__":
    app.run(main)
