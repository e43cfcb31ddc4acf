"""Peaks of the train steps of `common/ordinary.py`, by compiling for a chip.

Each as it is, and with state, parameters of layers and residuals at rest; these one
more in each line. `saved` is the share of what rests by which the peak is lower than
that of the step as it is. Peaks and what rests are in MiB.

Run:
    python -m benchmarks.memory.ordinary
    python -m benchmarks.memory.ordinary --targets=v5e --steps=kinds,microbatches
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

import optax_offload as oo
from benchmarks.common import command
from benchmarks.common.ordinary import STEPS, Ordinary
from optax_offload import aot
from optax_offload._ground.units import MIB

FLAGS = flags.FLAGS
RESTS = ("nothing", "state", "parameters", "residuals")


def compiled(step: Ordinary, rests: str, target: aot.Target) -> aot.Peak:
    """The memory of a step, compiled as its user would jit it."""
    plain, parameters = rests == "nothing", rests in RESTS[2:]
    fn, tx = step.of((lambda tx: tx) if plain else oo.offload)
    state = oo.eval_shape(tx.init, step.params)
    params, frozen = step.params, step.frozen
    if parameters:
        params = oo.set_memory_kind(params, step.layers, "pinned_host")
        frozen = frozen and oo.set_memory_kind(frozen, step.layers, "pinned_host")
    options: Any = {"residuals": "host"} if rests == "residuals" else {}
    jit = jax.jit if plain else oo.jit
    fn = jit(fn, donate_argnums=step.donated, **options)
    args = (params, state, *([frozen] if frozen else ()), *step.inputs)
    return aot.peak(aot.compile(fn, *args, target=target))


def rows() -> Iterator[dict[str, Any]]:
    """The peaks of each step and target, in bytes."""
    texts = ("step", "target", "rests")
    command.print_header(texts, ("peak", "at rest", "host temp", "saved", "seconds"))
    for name, target in itertools.product(FLAGS.steps, FLAGS.targets):
        plain = 0
        for rests in FLAGS.rests:
            started = time.perf_counter()
            peak = compiled(STEPS[name](), rests, aot.Target(target))
            seconds = time.perf_counter() - started
            plain = peak.peak_bytes if rests == "nothing" else plain
            moved = peak.host_argument_bytes
            saved = (plain - peak.peak_bytes) / moved if plain and moved else None
            sizes = (peak.peak_bytes, moved, peak.host_temporary_bytes)
            figures = (*(n / MIB for n in sizes), saved, seconds)
            command.print_row((name, target, rests), figures)
            row = {"step": name, "target": target, "rests": rests, "saved": saved}
            yield row | {"peak_bytes": peak.peak_bytes, "host_argument_bytes": moved}


def main() -> None:
    """Prints a row for each, and writes them."""
    command.write(rows=[*rows()])


if __name__ == "__main__":
    command.define_shared(targets=["h100"])
    flags.DEFINE_list("steps", list(STEPS), f"Of {', '.join(STEPS)}.")
    flags.DEFINE_list("rests", list(RESTS), f"Of {', '.join(RESTS)}.")
    command.run(main, out="out/ordinary.json")
