"""Peaks of what happens to a state beside its steps: made, placed, converted, kept.

The state of Llama 3 in six bytes a parameter, compiled for a chip: making it, and
converting its leaves from and to a plain checkpoint's, as `oo.place`,
`oo.low_bit_encode` and `oo.low_bit_decode` do, one leaf after the other. What compiles
nothing is run here, with a small state of the same form: its peak is that of all arrays
on the device. The steps are those of `peaks.py`, with `--find=target`.

Run:
    python -m benchmarks.memory.making
    python -m benchmarks.memory.making --models=llama3_8b:rtx4090
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import flags

import optax_offload as oo
from benchmarks.common import command
from benchmarks.common.steps import MODES, SIX_BYTES
from benchmarks.memory.peaks import model_step
from optax_offload import aot
from optax_offload._ground.units import GIB, MIB
from optax_offload._low_bit import by_rows
from optax_offload._low_bit.encoded import is_encoded
from optax_offload._places import memory

FLAGS = flags.FLAGS
# Modes with the layers' parameters on the host, and with all of them there.
LEAST = ("six bytes least", "six bytes all")


def peak_of(fn: Any, args: Any, target: aot.Target) -> int:
    """The peak of a compiled function."""
    return aot.peak(aot.compile(fn, *args, target=target)).peak_bytes


def conversions(state: Any, target: aot.Target) -> dict[str, int]:
    """The largest peak of encoding one leaf, and of decoding one."""
    nodes = jax.tree.leaves(state, is_leaf=is_encoded)
    peaks: dict[str, list[int]] = {"encode": [], "decode": []}
    kinds = {(x.codec.name, x.shape): x for x in nodes if is_encoded(x)}
    for x in kinds.values():
        shaped = functools.partial(
            jax.ShapeDtypeStruct, x.shape, sharding=x.codes.sharding
        )

        def encode(value: Any, like: Any = x) -> Any:
            return type(like).of(value, like.codec, ""), ()

        def decode(value: Any, half: Any) -> Any:
            return value.decoded(half), ()

        for fn, args in (
            (encode, (shaped(x.dtype),)),
            (decode, (x, shaped(jnp.bfloat16))),
        ):
            by_row = jax.jit(by_rows(fn, [True] * len(jax.tree.leaves(args))))
            peaks[fn.__name__].append(peak_of(by_row, args, target))
    return {name: max(found) for name, found in peaks.items()}


def device_bytes_while(fn: Callable[[], Any]) -> int:
    """The most bytes of arrays in device memory while a function runs."""
    done = threading.Event()
    most = 0

    def watch() -> None:
        nonlocal most
        while not done.wait(1e-3):
            arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
            here = [x for x in arrays if memory.memory_kind_of(x) == "device"]
            most = max(most, sum(x.nbytes for x in here))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        jax.block_until_ready(fn())
    finally:
        done.set()
        watcher.join()
    return most


def kept() -> dict[str, int]:
    """Peaks of placing, saving and restoring a state of 96 MiB in its own form."""
    params = {"layers": {"w": jnp.ones((8, 1024, 2048), jnp.bfloat16)}}
    params = oo.set_memory_kind(params, ".*", "pinned_host")
    tx = SIX_BYTES(oo.master_weights(optax.adamw(3e-4)))
    state = tx.init(params)
    template = oo.eval_shape(tx.init, params)
    loaded = jax.device_get(state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        with ocp.StandardCheckpointer() as checkpointer:

            def save() -> None:
                checkpointer.save(path, state)
                checkpointer.wait_until_finished()

            to_disk: dict[str, Any] = {"memory_kind": "disk", "block": True}
            ways = {
                "place": lambda: oo.place(loaded, template),
                "save": save,
                "restore": lambda: checkpointer.restore(path, template),
                "offload to disk": lambda: oo.offload_states(
                    state, directory=f"{folder}/parked", **to_disk
                ),
            }
            return {name: device_bytes_while(way) for name, way in ways.items()}


def main() -> None:
    """Compiles for each model and mode, and prints the peaks in GiB."""
    columns = ("make", "encode", "decode")
    command.print_header(("model", "chip", "mode"), columns)
    rows = []
    for named, mode in itertools.product(FLAGS.models, LEAST):
        model, chip = named.split(":", 1)
        target = aot.Target(chip)
        params = model_step(model, target, mode, {"batch": 1}).args[0]
        tx = MODES[mode].optimizer(oo.master_weights(optax.adamw(3e-4)))
        found = {"make": peak_of(oo.jit(tx.init), (params,), target)}
        found |= conversions(oo.eval_shape(tx.init, params), target)
        command.print_row((model, chip, mode), [found[x] / GIB for x in columns])
        rows.append({"model": model, "chip": chip, "mode": mode, **found})
    small = kept()
    texts = ", ".join(f"{k} {n / MIB:.2f}" for k, n in small.items())
    print(f"96 MiB in its own form: {texts} MiB of the device")
    command.write(rows=rows, kept=small)


if __name__ == "__main__":
    models = ["llama3_8b:rtx4090", "llama3_70b:h100"]
    flags.DEFINE_list("models", models, "Each with its chip.")
    command.run(main, out="out/making")
