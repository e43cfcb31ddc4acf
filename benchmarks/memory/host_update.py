"""The update on the host's own processor, which the library does not do.

Why not is in docs/how-it-works.md; its peaks are those of the mode "on the host" of
`benchmarks.memory.peaks`. `--part`:

- `times`: the update of matrices by XLA on this machine's CPU: as optax does it in a
  jit; and as a second program, on another device of the CPU backend, to which gradients
  are copied and from which updates come back. Beside them as many bytes that are only
  read and written. All take turns, and a ratio is the median of those of the turns.
- `arithmetic`: what an update on the host would take, beside bringing the state to the
  device, from documented peaks and the shares of them that are reached. An update on
  the host sends gradients down and updates up, and is bound by the memory of the host;
  streaming sends the state up and down, and is bound by the link.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.memory.host_update --part=times
    python -m benchmarks.memory.host_update --part=arithmetic
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from absl import flags

from benchmarks.common import command, turns
from optax_offload import aot

FLAGS = flags.FLAGS
# What is timed, and of the arithmetic a model, with gradients and parameters of so many
# bytes each.
LEAVES, ROUNDS = 16, 15
PARAMETERS, VALUE_BYTES = 8e9, 2
# A gradient and two moments are read; an update and two moments are written.
TOUCHED_BYTES = 24
Update = Callable[[Any, Any], tuple[Any, Any]]


def every_leaf(update: Update, grads: Any, states: Any) -> tuple[Any, Any]:
    """The new states and updates of leaves, each by itself.

    States come first: JAX pairs donated arguments with results in their order.
    """
    pairs = [update(g, s) for g, s in zip(grads, states, strict=True)]
    return [s for _, s in pairs], [u for u, _ in pairs]


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
    tx, width = optax.adam(1e-3), FLAGS.width
    keys = jax.random.split(jax.random.key(0), LEAVES)
    grads = [jax.random.normal(key, (width, width)) for key in keys]
    accelerator, host = jax.devices()[:2]
    plain = jax.jit(functools.partial(every_leaf, tx.update), donate_argnums=1)
    forms = {
        "optax": (plain, accelerator),
        "second program": (second_program(plain), host),
        "only bytes": (jax.jit(only_bytes, donate_argnums=1), accelerator),
    }
    states = {
        name: jax.device_put([tx.init(g) for g in grads], where)
        for name, (_, where) in forms.items()
    }

    def once(name: str) -> turns.Seconds:
        def update() -> Any:
            return jax.block_until_ready(forms[name][0](grads, states[name]))

        jax.block_until_ready((grads, states[name]))
        (states[name], _), seconds, cpu = turns.clocked(update)
        return {"seconds": seconds, "cpu": cpu}

    # The first turn compiles.
    ways = {name: functools.partial(once, name) for name in forms}
    found = turns.in_turns(ways, ROUNDS, unmeasured=1)
    columns = ("ms", "of optax's", "CPU ms", "of optax's", "GB/s")
    command.print_header(("form",), columns)
    for name in forms:
        figures = []
        for what in ("seconds", "cpu"):
            figures.append(1e3 * turns.median(found, name, what))
            figures.append(turns.ratio(found, name, "optax", what))
        touched = TOUCHED_BYTES * LEAVES * width**2
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


def costs(host: Host, parameters: float, value_bytes: int) -> dict[str, float]:
    """The seconds of each way on one device, as if nothing else ran.

    `streaming` is of state to the device and back, both ways at once; `in 8 bits` is of
    state that is kept encoded; `on the host` is of gradients to the host, the update
    there, and updates back.

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
    return {
        "streaming": own * STATE_BYTES * byte,
        "on the host": own * max(value_bytes / link, update),
        "in 8 bits": own * ENCODED_BYTES * byte,
    }


def print_arithmetic() -> None:
    """Seconds of each way on each machine."""
    rows = {host.name: costs(host, PARAMETERS, VALUE_BYTES) for host in HOSTS}
    command.print_header(("machine",), [*rows[HOSTS[0].name]])
    for name, found in rows.items():
        command.print_row((name,), [*found.values()])


PARTS = {"times": print_times, "arithmetic": print_arithmetic}


if __name__ == "__main__":
    flags.DEFINE_enum("part", "times", list(PARTS), "What is shown.")
    flags.DEFINE_integer("width", 1024, "Rows and columns of what is timed.")
    command.run(lambda: PARTS[FLAGS.part]())
