"""What moving a whole state between steps takes: memory at its peak, and the disk.

Memory: each case in a process of its own, on the CPU, where device and host are the
same memory: the peak, of the process, is that of device and copy together.

Disk: the same bytes through `offload_states`, plain tensorstore and Orbax, in turns, so
that a machine that is busy for a while is busy for all of them. Files are synced when
written; they are read back from the system's cache.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.memory.states
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

import optax_offload as oo
from benchmarks.common import alone, command, turns
from optax_offload._ground.units import MIB

FLAGS = flags.FLAGS
LEAVES = 64
State = dict[str, jax.Array]
CASES: dict[str, dict[str, Any]] = {
    "pinned_host": {"memory_kind": "pinned_host"},
    "pinned_host, block=False": {"memory_kind": "pinned_host", "block": False},
    "pinned_host, donate=False": {"memory_kind": "pinned_host", "donate": False},
    "disk": {"memory_kind": "disk"},
}


def make_state(mib: int) -> State:
    """Random numbers, which nothing can compress, on the first device."""
    shape = (mib * MIB // LEAVES // 4096, 1024)
    generator = np.random.default_rng(0)
    return {
        f"w{i:03d}": jnp.asarray(generator.random(shape, np.float32))
        for i in range(LEAVES)
    }


def status_bytes(name: str) -> int:
    """Reads a size of this process from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(case: str, directory: str, mib: int) -> dict[str, Any]:
    """Moves a state away, with nothing else in the process."""
    options = {"block": True, "donate": True, **CASES[case]}
    if options["memory_kind"] == "disk":
        options["directory"] = directory
    oo.reload_states(oo.offload_states({"x": jnp.ones(8)}, **options), block=True)
    empty = status_bytes("VmRSS")
    state = jax.block_until_ready(make_state(mib))
    before, started = status_bytes("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # Resets the high-water mark.
    moved = oo.offload_states(state, **options)
    while options["donate"] and not all(x.is_deleted() for x in state.values()):
        time.sleep(0.001)
    if not options["donate"]:
        jax.block_until_ready(moved)
    return {
        "case": case,
        "before_bytes": before - empty,
        "peak_bytes": status_bytes("VmHWM") - empty,
        "after_bytes": status_bytes("VmRSS") - empty,
        "seconds": time.perf_counter() - started,
    }


def memory_table(directory: Path) -> list[dict[str, Any]]:
    """Measures each case in a process of its own, and prints the table."""
    sizes = ("before", "peak", "after")
    command.print_header((f"{'MiB, to':27s}",), (*sizes, "seconds"))
    rows = []
    for case in CASES:
        options = {"case": case, "directory": str(directory), "mib": FLAGS.state_mib}
        found = alone.call(measure, options)
        mib = [found[f"{size}_bytes"] / MIB for size in sizes]
        command.print_row((f"{case:27s}",), (*mib, found["seconds"]))
        rows.append(found)
    return rows


Way = tuple[Callable[[], None], Callable[[], Any]]


def ours(state: State, directory: Path) -> Way:
    """A way to write, and a way to read what it wrote."""
    to_disk = functools.partial(
        oo.offload_states,
        memory_kind="disk",
        directory=directory,
        donate=False,
        block=True,
    )
    there = []
    return (
        lambda: there.append(to_disk(state)),
        lambda: oo.reload_states(there[0], donate=False, block=True),
    )


def tensorstore(state: State, directory: Path, codecs: Sequence[str] = ()) -> Way:
    """All leaves at once, as it stores them by default: a file each, no checksums."""
    import tensorstore as ts

    def open_(name: str, **options: Any) -> Any:
        path = str(directory / name)
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": path},
        }
        if codecs:
            names = ["bytes", *codecs]
            spec["metadata"] = {"codecs": [{"name": name} for name in names]}
        return ts.open(spec, **options)

    def write() -> None:
        writes = []
        for name, x in state.items():
            store = open_(name, create=True, dtype=ts.float32, shape=x.shape).result()
            writes.append(store.write(np.asarray(x)))
        for future in writes:
            future.result()

    def read() -> Any:
        reads = {name: open_(name).result().read() for name in state}
        arrays = {name: jnp.asarray(future.result()) for name, future in reads.items()}
        return jax.block_until_ready(arrays)

    return write, read


def orbax(state: State, directory: Path) -> Way:
    """A checkpoint, as it saves them by default: compressed, without checksums."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )

    def write() -> None:
        checkpointer.save(directory, state)
        checkpointer.wait_until_finished()

    return write, lambda: jax.block_until_ready(
        checkpointer.restore(directory, template)
    )


WAYS = {
    "ours": ours,
    "tensorstore": tensorstore,
    "tensorstore, crc32c": functools.partial(tensorstore, codecs=["crc32c"]),
    "orbax": orbax,
}


def moved(name: str, state: State, directory: Path) -> turns.Seconds:
    """The seconds of writing and of reading back, by a way."""
    place = directory / name
    write, read = WAYS[name](state, place)
    seconds: turns.Seconds = {}
    for what, run in (("write", write), ("read", read)):
        os.sync()
        back, seconds[what], _ = turns.clocked(run)
    for key, x in state.items():
        np.testing.assert_array_equal(back[key], x)
    shutil.rmtree(place)
    return seconds


def disk_table(directory: Path) -> turns.Rounds:
    """Our throughput over that of the others, to the disk and back."""
    state = jax.block_until_ready(make_state(FLAGS.disk_mib))
    ways = {name: functools.partial(moved, name, state, directory) for name in WAYS}
    # The first round warms everything up.
    found = turns.in_turns(ways, FLAGS.rounds, unmeasured=1)
    columns = ("write", "read")
    command.print_header(("our throughput over",), columns)
    for way in WAYS:
        ratios = [turns.ratio(found, way, "ours", what) for what in columns]
        command.print_row((way,), ratios)
    return found


def main() -> None:
    """Measures memory and disk, and prints how we compare."""
    logging.set_verbosity(logging.WARNING)  # Orbax says much.
    with tempfile.TemporaryDirectory(dir=FLAGS.directory) as temporary:
        memory = memory_table(Path(temporary))
        disk = disk_table(Path(temporary))
    command.write(memory=memory, disk=disk)


if __name__ == "__main__":
    flags.DEFINE_integer("state_mib", 2048, "Size of the state that is moved.")
    flags.DEFINE_integer("disk_mib", 512, "Size of the state that goes to disk.")
    flags.DEFINE_integer("rounds", 5, "Turns of each way to disk.")
    flags.DEFINE_string("directory", None, "On the disk to measure.")
    command.run(main, out="out/states")
