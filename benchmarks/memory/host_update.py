"""The update on the host's own processor, which the library does not do.

Why not is in docs/how-it-works.md. `--part`:

- `peaks`: Adam under `compute_on("device_host")` inside the step, beside what `offload`
  compiles to, for chips that need not be here. Each leaf's update is one host
  computation, and the next leaf's gradient waits, on the device, for the update of the
  one before. (By blocks of rows it is worse: F72.)
- `times`: the update of 16 matrices by XLA on this machine's CPU: as optax does it in
  a jit; as a host computation of a program; and as a second program, on another device
  of the CPU backend, to which gradients are copied and from which updates come back.
  Beside them as many bytes that are only read and written. All take turns, and a ratio
  is the median of those of the turns.
- `arithmetic`: what an update on the host would take, beside bringing the state to the
  device, from documented peaks and the shares of them that are reached. An update on
  the host sends gradients down and updates up, and is bound by the memory of the host;
  streaming sends the state up and down, and is bound by the link.

Run:
    python -m benchmarks.memory.host_update --workloads=stacked
    JAX_PLATFORMS=cpu python -m benchmarks.memory.host_update --part=times
    python -m benchmarks.memory.host_update --part=arithmetic
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import flags
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Layout, with_layout_constraint

import optax_offload as oo
from benchmarks.common import command
from benchmarks.common.steps import OURS, Mode, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS
from optax_offload import aot
from optax_offload._ground.units import MIB

FLAGS = flags.FLAGS
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SMALL_BYTES = 64 * 1024
_ON: Any = functools.partial(  # Until JAX 0.11 it has another name.
    getattr(compute_on, "compute_on2", None) or compute_on.compute_on,
    compute_type="device_host",
)
ON_HOST: Any = functools.partial(_ON, out_memory_spaces=(DEVICE, HOST, HOST))


class Moments(NamedTuple):
    """Adam's state."""

    mu: Any
    nu: Any


def adam(g: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
    """An update of Adam's, without the correction of its first steps."""
    mu = 0.9 * mu + 0.1 * g
    nu = 0.999 * nu + 0.001 * g * g
    return -1e-3 * mu / (jnp.sqrt(nu) + 1e-8), mu, nu


def to_host(g: jax.Array) -> jax.Array:
    """A gradient in host memory; a GPU's compiler fails unless its layout is named."""
    return jax.device_put(with_layout_constraint(g, Layout(tuple(range(g.ndim)))), HOST)


def on_host(inner: Any) -> optax.GradientTransformation:
    """Adam with its moments in host memory, updated there, a leaf after the other."""
    del inner  # It is Adam.

    def init(params: Any) -> Moments:
        def zeros(p: jax.Array) -> jax.Array:
            return jax.device_put(jnp.zeros_like(p), HOST if is_large(p) else DEVICE)

        return Moments(jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        done, results = None, []
        for g, mu, nu in zip(
            leaves, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True
        ):
            if not is_large(g):
                results.append(adam(g, mu, nu))
                continue
            if done is not None:
                g, _ = lax.optimization_barrier((g, done))
            results.append(ON_HOST(adam)(to_host(g), mu, nu))
            done = results[-1][0]
        u, mu, nu = (structure.unflatten(r) for r in zip(*results, strict=True))
        return u, Moments(mu, nu)

    return optax.GradientTransformation(init, update)


def is_large(x: Any) -> bool:
    """Whether a leaf's moments are in host memory."""
    return x.size * x.dtype.itemsize >= SMALL_BYTES


FORMS = {"offload": Mode(OURS), "on the host": Mode(on_host)}


def print_peaks() -> None:
    """Compiles each workload in each form; MiB on each device, nothing clipped."""
    figures = ("peak", "host state", "host temp")
    command.print_header(("workload", "target", "form"), figures)
    for name, target, form in itertools.product(FLAGS.workloads, FLAGS.targets, FORMS):
        work = dataclasses.replace(WORKLOADS[name](), optimizer=optax.adam(1e-3))
        peak = aot.peak(compile_step(work, aot.Target(target), FORMS[form]))
        sizes = [peak.peak_bytes, peak.host_argument_bytes, peak.host_temporary_bytes]
        command.print_row((name, target, form), [size / MIB for size in sizes])


# A gradient and two moments are read; an update and two moments are written.
TOUCHED_BYTES = 24
Update = Callable[[Any, Any], tuple[Any, Any]]


def every_leaf(update: Update, grads: Any, states: Any) -> tuple[Any, Any]:
    """The new states and updates of leaves, each by itself.

    States come first: JAX pairs donated arguments with results in their order.
    """
    pairs = [update(g, s) for g, s in zip(grads, states, strict=True)]
    return [s for _, s in pairs], [u for u, _ in pairs]


def in_the_step(tx: optax.GradientTransformation) -> Update:
    """Each leaf's update is a host computation of a program."""

    def update(g: Any, state: Any) -> tuple[Any, Any]:
        run = _ON(tx.update, out_memory_spaces=(DEVICE, HOST))
        return run(jax.device_put(g, HOST), state)

    # JAX's own jit would donate moments to updates, of another memory (F34).
    return oo.jit(functools.partial(every_leaf, update), donate_argnums=1)


def second_program(plain: Update) -> Update:
    """The update is a program of its own, on the device that the state is on."""
    accelerator, host = jax.devices()[:2]

    def update(grads: Any, states: Any) -> tuple[Any, Any]:
        states, updates = plain(jax.device_put(grads, host), states)
        return states, jax.device_put(updates, accelerator)

    return update


def only_bytes(grads: Any, states: Any) -> tuple[Any, Any]:
    """As many bytes, read and written."""
    return jax.tree.map(lambda x: x + 1, (states, grads))


def print_times() -> None:
    """Milliseconds of each form by the clock and of the CPU, and over optax's own."""
    jax.config.update("jax_num_cpu_devices", 2)
    tx = optax.adam(1e-3)
    keys = jax.random.split(jax.random.key(0), FLAGS.leaves)
    grads = [jax.random.normal(key, (FLAGS.width, FLAGS.width)) for key in keys]
    accelerator, host = jax.devices()[:2]
    pinned = jax.sharding.SingleDeviceSharding(accelerator, memory_kind="pinned_host")
    plain = jax.jit(functools.partial(every_leaf, tx.update), donate_argnums=1)
    forms = {
        "optax": (plain, accelerator),
        "in the step": (in_the_step(tx), pinned),
        "second program": (second_program(plain), host),
        "only bytes": (jax.jit(only_bytes, donate_argnums=1), accelerator),
    }
    states = {
        name: jax.device_put([tx.init(g) for g in grads], where)
        for name, (_, where) in forms.items()
    }
    spent: dict[tuple[str, Any], list[float]] = defaultdict(list)
    clocks = (time.perf_counter, time.process_time)
    for _ in range(FLAGS.rounds + 1):
        for name, (update, _) in forms.items():
            jax.block_until_ready((grads, states[name]))
            before = [clock() for clock in clocks]
            states[name], updates = update(grads, states[name])
            jax.block_until_ready((updates, states[name]))
            for clock, began in zip(clocks, before, strict=True):
                spent[name, clock].append(clock() - began)
    command.print_header(
        ("form",), ("ms", "of optax's", "CPU ms", "of optax's", "GB/s")
    )
    for name in forms:
        figures = []
        for clock in clocks:
            # The first turn compiles.
            own, optax_own = spent[name, clock][1:], spent["optax", clock][1:]
            figures.append(1e3 * statistics.median(own))
            ratios = [a / b for a, b in zip(own, optax_own, strict=True)]
            figures.append(statistics.median(ratios))
        touched = TOUCHED_BYTES * FLAGS.leaves * FLAGS.width**2
        command.print_row((name,), (*figures, touched / figures[0] / 1e6))


# Adam's two moments, in float32, and encoded by the codec "int8".
STATE_BYTES = 8
ENCODED_BYTES = 2 * (1 + 4 / 256)
# Memory that is only read and written reaches about what a link does (assumed); an
# update by XLA's CPU compiler 0.59 to 0.75 of that (part `times`, "only bytes"), of
# which the most is taken.
MEMORY_UTILIZATION = 0.8
# The share of the link that a step's transfers use: 0.86 to 0.94 on an H100 by the
# model (BUILD_NOTES.md, "Link efficiency"), less where others share the link.
LINK_UTILIZATION = 0.8
UPDATE_UTILIZATION = 0.75 * MEMORY_UTILIZATION


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, as far as an update on it is concerned.

    Attributes:
      name: What it is.
      chip: Its accelerator, of `aot.CHIPS`.
      memory_bytes_per_second: The documented bandwidth of its memory.
      memory_source: Where that is from.
      devices: Accelerators that share that memory, and the parameters.
    """

    name: str
    chip: aot.Chip
    memory_bytes_per_second: float
    memory_source: str
    devices: int = 1


_DDR5_4800, _DDR5_5600, _DDR4_3200 = 38.4e9, 44.8e9, 25.6e9
_SOCKET = "Xeon Platinum 8480C: 8 channels of DDR5, 4.8 GT/s"
_H100, _RTX4090 = aot.CHIPS["h100"], aot.CHIPS["rtx4090"]
HOSTS = (
    Host("H100, own socket", _H100, 8 * _DDR5_4800, f"one {_SOCKET}"),
    Host("H100, 8 of a DGX", _H100, 16 * _DDR5_4800, f"two {_SOCKET}", 8),
    Host(
        "RTX 4090, desktop", _RTX4090, 2 * _DDR5_5600, "i9-14900K: 2 channels of DDR5"
    ),
    Host("RTX 4090, server", _RTX4090, 8 * _DDR4_3200, "EPYC 7003: 8 channels of DDR4"),
)


class Costs(NamedTuple):
    """The seconds of each way on one device.

    Attributes:
      streaming: State to the device and back, both ways at once.
      on_host: Gradients to the host, the update there, updates back.
      in_8_bits: Streaming of state that is kept encoded.
    """

    streaming: float
    on_host: float
    in_8_bits: float


def costs(host: Host, parameters: float, value_bytes: int) -> Costs:
    """The times of each way, as if nothing else ran.

    Args:
      host: The machine.
      parameters: Of the model, shared by all devices of the machine.
      value_bytes: Of a gradient, and of a parameter, on the device.
    """
    own = parameters / host.devices
    link = host.chip.link.bytes_per_second * LINK_UTILIZATION
    memory = host.memory_bytes_per_second / host.devices
    # The link writes gradients and reads updates; the processor the other way around.
    update = (2 * STATE_BYTES + 4 * value_bytes) / (memory * UPDATE_UTILIZATION)
    # Of a byte that is moved each way.
    byte = max(1 / link, 2 / (memory * MEMORY_UTILIZATION))
    return Costs(
        streaming=own * STATE_BYTES * byte,
        on_host=own * max(value_bytes / link, update),
        in_8_bits=own * ENCODED_BYTES * byte,
    )


def print_arithmetic() -> None:
    """Seconds of each way on each machine."""
    command.print_header(("machine",), Costs._fields)
    for host in HOSTS:
        found = costs(host, FLAGS.parameters, FLAGS.value_bytes)
        command.print_row((host.name,), found)


PARTS = {"peaks": print_peaks, "times": print_times, "arithmetic": print_arithmetic}


def main() -> None:
    """Prints a part."""
    PARTS[FLAGS.part]()


if __name__ == "__main__":
    flags.DEFINE_enum("part", "peaks", list(PARTS), "What is shown.")
    command.define_shared(targets=["h100", "v5e:2x2"], workloads=USUAL_WORKLOADS)
    flags.DEFINE_integer("leaves", 16, "Matrices that are timed.")
    flags.DEFINE_integer("width", 1024, "Rows and columns of each.")
    flags.DEFINE_integer("rounds", 15, "Turns of each form.")
    flags.DEFINE_float("parameters", 8e9, "Of a model, for the arithmetic.")
    flags.DEFINE_integer("value_bytes", 2, "Of its gradients, and of its parameters.")
    command.run(main)
