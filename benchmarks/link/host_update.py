"""What an update on the host would take, beside bringing the state to the device.

Arithmetic, from documented peaks and the shares of them that are reached; nothing is
compiled or run. An update on the host sends gradients down and updates up, and is bound
by the memory of the host, which it reads and writes; streaming sends the state up and
down, and is bound by the link (and by the same memory, which the link reads and
writes). Why the library streams all the same is in docs/how-it-works.md.

Run:
    python -m benchmarks.link.host_update
    python -m benchmarks.link.host_update --value_bytes=4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import app, flags

from optax_offload import aot

FLAGS = flags.FLAGS

# Adam's two moments, in float32, and encoded by the codec "int8".
STATE_BYTES = 8
ENCODED_BYTES = 2 * (1 + 4 / 256)
# Of a forward pass, one more in the backward pass (remat), and the backward pass.
FLOPS = 8
# Memory that is only read and written reaches about what a link does (assumed); an
# update by XLA's CPU compiler 0.59 to 0.75 of that (`benchmarks/time/host_update.py`,
# "only bytes"), of which the most is taken.
MEMORY_UTILIZATION = 0.8
# The share of the link that a step's transfers use: 0.86 to 0.94 on an H100 by the
# model (BUILD_NOTES.md, "Link efficiency"), less where others share the link.
LINK_UTILIZATION = 0.8
# The share of the peak that whole training steps are reported to reach: Llama 3 had 38
# to 43 % on H100s (arXiv:2407.21783, table 4).
COMPUTE_UTILIZATION = 0.4
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
HOSTS = (
    Host(
        "H100, a socket of its own", aot.CHIPS["h100"], 8 * _DDR5_4800, f"one {_SOCKET}"
    ),
    Host("H100, 8 of a DGX", aot.CHIPS["h100"], 16 * _DDR5_4800, f"two {_SOCKET}", 8),
    Host(
        "RTX 4090, desktop",
        aot.CHIPS["rtx4090"],
        2 * _DDR5_5600,
        "Core i9-14900K: 2 channels of DDR5-5600",
    ),
    Host(
        "RTX 4090, server",
        aot.CHIPS["rtx4090"],
        8 * _DDR4_3200,
        "EPYC 7003: 8 channels of DDR4-3200",
    ),
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The times of a step's parts on one device, in seconds.

    Attributes:
      compute: Its matrix products.
      streaming: State to the device and back, both ways at once.
      in_8_bits: The same of state that is kept encoded.
      on_host: Gradients to the host, the update there, updates back.
      as_compiled: The same as a GPU's compiler has it: new state is in buffers of its
        own and is copied to where it belongs (F70), as assumed over the link.
    """

    compute: float
    streaming: float
    in_8_bits: float
    on_host: float
    as_compiled: float

    @property
    def choice(self) -> str:
        """Which of streaming and the host's update takes less, if either is seen."""
        if max(self.streaming, self.on_host) <= self.compute:
            return "either: both can hide beside the computation"
        if self.on_host < self.streaming:
            return f"host: {self.streaming / self.on_host:.1f} times as fast"
        return f"streaming: {self.on_host / self.streaming:.1f} times as fast"


def costs(host: Host, parameters: float, tokens: int, value_bytes: int) -> Costs:
    """The times of a step, each part as if it ran alone.

    Args:
      host: The machine.
      parameters: Of the model, shared by all devices of the machine.
      tokens: On each device, in a step.
      value_bytes: Of a gradient, and of a parameter, on the device.
    """
    own = parameters / host.devices
    link = host.chip.link.bytes_per_second * LINK_UTILIZATION
    memory = host.memory_bytes_per_second / host.devices
    flops = host.chip.flops_per_second * COMPUTE_UTILIZATION
    # The link writes gradients and reads updates; the processor the other way around.
    touched = 2 * STATE_BYTES + 4 * value_bytes
    update = touched / (memory * UPDATE_UTILIZATION)
    # Of a byte that is moved each way.
    byte = max(1 / link, 2 / (memory * MEMORY_UTILIZATION))
    return Costs(
        compute=FLOPS * parameters * tokens / flops,
        streaming=own * STATE_BYTES * byte,
        in_8_bits=own * ENCODED_BYTES * byte,
        on_host=own * max(value_bytes / link, update),
        as_compiled=own
        * max((value_bytes + STATE_BYTES) / link, update + STATE_BYTES * byte),
    )


def main(argv: Sequence[str]) -> None:
    """Prints the arithmetic for each machine, and a row for each number of tokens."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    value = FLAGS.value_bytes
    print(
        f"{FLAGS.parameters:.3g} parameters; a parameter's bytes over the link: "
        f"{STATE_BYTES} each way streamed, {value} each way for the host's update, "
        f"which touches {2 * STATE_BYTES + 4 * value} in the host's memory"
    )
    for host in HOSTS:
        link, memory = host.chip.link.bytes_per_second, host.memory_bytes_per_second
        print(
            f"\n{host.name}: link {link / 1e9:.0f} GB/s each way x {LINK_UTILIZATION}; "
            f"memory {memory / 1e9:.0f} GB/s ({host.memory_source}) x "
            f"{MEMORY_UTILIZATION:.2f}, by an update x {UPDATE_UTILIZATION:.2f}"
        )
        print("  tokens   compute streaming in 8 bits   on host  compiled, seconds")
        for tokens in map(int, FLAGS.tokens):
            c = costs(host, FLAGS.parameters, tokens, value)
            print(
                f"{tokens:8d}{c.compute:10.2f}{c.streaming:10.2f}{c.in_8_bits:10.2f}"
                f"{c.on_host:10.2f}{c.as_compiled:10.2f}  {c.choice}"
            )


def define_flags() -> None:
    """Not on import: tests import this, and others have flags of the same names."""
    flags.DEFINE_float("parameters", 8e9, "Of the model.")
    flags.DEFINE_integer("value_bytes", 2, "Of a gradient, and of a parameter.")
    flags.DEFINE_list("tokens", ["1024", "4096", "16384", "65536"], "Of each device.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
