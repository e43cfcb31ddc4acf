"""What moving a whole state between steps takes: memory at its peak, and the disk.

Memory: each case in a process of its own, on the CPU, where device and host are the
same memory: the peak is that of device and copy together. Measured by the process: the
highest resident size while the call and its copies run, and the live arrays.

Disk: the same bytes through `offload_states`, plain tensorstore and Orbax, in turns, so
that a machine that is busy for a while is busy for all of them. Files are synced when
written; they are read back from the system's cache.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.memory.states
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import optax_offload as oo
from optax_offload._units import MIB

FLAGS = flags.FLAGS
flags.DEFINE_integer("state_mib", 2048, "Size of the state whose moves are measured.")
flags.DEFINE_integer("leaves", 64, "Leaves of that state.")
flags.DEFINE_integer("disk_mib", 512, "Size of the state that goes to disk.")
flags.DEFINE_integer("disk_leaves", 32, "Leaves of that state.")
flags.DEFINE_integer("rounds", 5, "Turns of each way to disk.")
flags.DEFINE_string("directory", None, "On the disk to measure [default: temporary].")
flags.DEFINE_string("out", "out/states", "Where the .json goes.")
flags.DEFINE_string("case", None, "Measures one case, and prints it. For this program.")

CASES: dict[str, dict[str, Any]] = {
    "pinned_host": {"memory_kind": "pinned_host", "block": True},
    "pinned_host, block=False": {"memory_kind": "pinned_host", "block": False},
    "pinned_host, donate=False": {
        "memory_kind": "pinned_host",
        "block": True,
        "donate": False,
    },
    "disk": {"memory_kind": "disk", "block": True},
}


def make_state(mib: int, leaves: int) -> dict[str, jax.Array]:
    """Random numbers, which nothing can compress, on the first device."""
    shape = (mib * MIB // leaves // 4096, 1024)
    generator = np.random.default_rng(0)
    return {
        f"w{i:03d}": jnp.asarray(generator.random(shape, np.float32))
        for i in range(leaves)
    }


class Peak:
    """The highest resident size, and bytes of live arrays, while it is entered."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # Resets the high-water mark.
        self.live_bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.live_bytes = max(self.live_bytes, live_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.resident_bytes = status_bytes("VmHWM")


def live_bytes() -> int:
    """Of all arrays, those that are the same buffer counted once."""
    buffers = {}
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # It may be deleted while we look.
            buffers[x.unsafe_buffer_pointer()] = x.nbytes
    return sum(buffers.values())


def status_bytes(name: str) -> int:
    """Reads a size of this process from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(case: str, directory: str) -> dict[str, Any]:
    """Moves a state there and back, with nothing else in the process."""
    options = dict(CASES[case])
    donate, block = options.get("donate", True), options["block"]
    if options["memory_kind"] == "disk":
        options["directory"] = directory
    warm = oo.offload_states({"x": jnp.ones(8)}, **options)
    oo.reload_states(warm, donate=donate, block=True)
    del warm
    empty = status_bytes("VmRSS")
    state = jax.block_until_ready(make_state(FLAGS.state_mib, FLAGS.leaves))
    row: dict[str, Any] = {"case": case, "state_bytes": live_bytes()}
    for name, call in (
        ("offload", lambda x: oo.offload_states(x, **options)),
        ("reload", lambda x: oo.reload_states(x, donate=donate, block=block)),
    ):
        before = status_bytes("VmRSS") - empty
        started = time.perf_counter()
        with Peak() as peak:
            moved = call(state)
            returned = time.perf_counter() - started
            wait_for(state if donate else moved, deleted=donate)
        row[name] = {
            "before_bytes": before,
            "peak_bytes": peak.resident_bytes - empty,
            "peak_live_bytes": peak.live_bytes,
            "after_bytes": status_bytes("VmRSS") - empty,
            "returned_seconds": returned,
            "seconds": time.perf_counter() - started,
        }
        state = moved
    return row


def wait_for(state: Any, deleted: bool) -> None:
    """Until every array is freed, or there."""
    arrays = [x for x in state.values() if isinstance(x, jax.Array)]
    while deleted and not all(x.is_deleted() for x in arrays):
        time.sleep(0.001)
    if not deleted:
        jax.block_until_ready(arrays)


def memory_table(directory: Path) -> list[dict[str, Any]]:
    """Measures each case in a process of its own, and prints the table."""
    print("MiB                        state   offload: peak  live  after    s", end="")
    print("   reload: peak  live  after    s")
    rows = []
    for case in CASES:
        arguments = [f"--case={case}", f"--directory={directory / 'peak'}"]
        sizes = [f"--state_mib={FLAGS.state_mib}", f"--leaves={FLAGS.leaves}"]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory.states", *arguments, *sizes],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        cells = [f"{case:26s} {row['state_bytes'] / MIB:5.0f}"]
        for name in ("offload", "reload"):
            numbers = [
                row[name][k] / MIB
                for k in ("peak_bytes", "peak_live_bytes", "after_bytes")
            ]
            cells.append("{:14.0f} {:5.0f} {:6.0f}".format(*numbers))
            cells.append(f"{row[name]['seconds']:5.1f}")
        print(*cells, flush=True)
    return rows


def ours(state: Any, directory: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A way to write, and a way to read what it wrote."""
    there = []

    def write() -> None:
        there.append(
            oo.offload_states(
                state,
                memory_kind="disk",
                directory=directory,
                donate=False,
                block=True,
            )
        )

    return write, lambda: oo.reload_states(there[0], donate=False, block=True)


def tensorstore(
    state: Any, directory: Path, codecs: Sequence[str] = ()
) -> tuple[Callable[[], Any], Callable[[], Any]]:
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


def orbax(state: Any, directory: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
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


def disk_rows(directory: Path) -> list[dict[str, Any]]:
    """The seconds of each way and round."""
    state = jax.block_until_ready(make_state(FLAGS.disk_mib, FLAGS.disk_leaves))
    nbytes = live_bytes()
    rows = []
    for turn in range(FLAGS.rounds + 1):
        for name, way in WAYS.items():
            place = directory / f"{name}-{turn}"
            seconds = {}
            write, read = way(state, place)
            for what, run in (("write", write), ("read", read)):
                os.sync()
                started = time.perf_counter()
                back = run()
                seconds[what] = time.perf_counter() - started
            for key, x in state.items():
                np.testing.assert_array_equal(back[key], x)
            del back, write, read
            shutil.rmtree(place)
            if turn:  # The first warms everything up.
                rows.append({"way": name, "round": turn, "bytes": nbytes} | seconds)
                rates = [f"{k} {nbytes / s / MIB:7.0f}" for k, s in seconds.items()]
                print(f"round {turn}  {name:19s} MiB/s: {'  '.join(rates)}", flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of our median throughput to that of the others."""
    median = {
        (way, what): statistics.median(r[what] for r in rows if r["way"] == way)
        for way in WAYS
        for what in ("write", "read")
    }
    return {
        way: {
            what: median[way, what] / median["ours", what] for what in ("write", "read")
        }
        for way in WAYS
        if way != "ours"
    }


def main(argv: Sequence[str]) -> None:
    """Measures memory and disk, and prints how we compare."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    if FLAGS.case:
        print(json.dumps(measure(FLAGS.case, FLAGS.directory)))
        return
    logging.set_verbosity(logging.WARNING)  # Orbax says much.
    with tempfile.TemporaryDirectory(dir=FLAGS.directory) as temporary:
        directory = Path(temporary)
        found: dict[str, Any] = {"jax": jax.__version__}
        found["memory"] = memory_table(directory)
        found["disk"] = disk_rows(directory)
    found["ratio"] = ratios(found["disk"])
    for way, ratio in found["ratio"].items():
        print(
            f"our throughput / {way}, medians of {FLAGS.rounds}: "
            f"write {ratio['write']:.2f}, read {ratio['read']:.2f}"
        )
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"also in {out}")


if __name__ == "__main__":
    app.run(main)
