"""The link to the host's memory: loads, stores and both, by copy engines and kernels.

As programs move: rows of an array in host memory, in a loop whose counter says which
row it is, are moved by a GPU's copy engines; at positions that are constants, by
kernels. Which it was is read from the compiled program. The constants of a modeled
step (`aot.step_time`) are fitted to what was measured.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.chip import machine
from benchmarks.chip.record import done
from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError
from benchmarks.chip.training import first_device
from optax_offload import aot
from optax_offload._ground.units import GIB

SIZES = [*(2**16 * 4**n for n in range(7)), GIB]
TOY_SIZES = [2**16, 2**18]
# Rows of so many bytes in all, but not fewer or more than so many.
MOVED_BYTES = GIB
LEAST_ROWS, MOST_ROWS = 2, 64
# Of a program whose positions are constants.
KERNEL_ROWS = 2
ROUNDS = 5
# Both ways have less than this share of what one has alone, where they take turns.
IN_TURN = 0.55
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LOAD, STORE, PRODUCT = PIECES = ("load", "store", "product")
Way = Callable[..., Any]


def row_at(rows: jax.Array, i: Any) -> jax.Array:
    """A row of a host array, on the device."""
    # No part of a load may be left out because a part of its result is not used.
    return lax.optimization_barrier(
        jax.device_put(lax.dynamic_index_in_dim(rows, i, 0, keepdims=False), DEVICE)
    )


def with_row(rows: jax.Array, row: jax.Array, i: Any) -> jax.Array:
    """A host array with a row of the device's."""
    return lax.dynamic_update_index_in_dim(rows, jax.device_put(row, HOST), i, 0)


def turns(
    pieces: Collection[str],
    count: int,
    load: Callable[[Any, Any], Any] = row_at,
    store: Callable[[Any, Any, Any], Any] = with_row,
) -> Way:
    """A loop whose turns do these pieces, none of which waits for another.

    Args:
      pieces: Of `LOAD`, `STORE` and `PRODUCT`.
      count: The number of turns.
      load: What a turn loads, of the source and the turn's number.
      store: The sink that has a row, of the sink, the row and the turn's number.

    Returns:
      A function of a source, a sink, a row, and of a product a matrix and what it is
      multiplied with. What is not done is handed on.
    """

    def loop(source: Any, sink: Any, row: Any, *of_product: Any) -> Any:
        def turn(i: Any, carry: Any) -> Any:
            sink, loaded, *product = carry
            if STORE in pieces:
                sink = store(sink, row, i)
            if LOAD in pieces:
                loaded = load(source, i)
            if PRODUCT in pieces:
                matrix, x = of_product[0], product[0]
                product = [jnp.dot(x, matrix, precision="highest")]
            return sink, loaded, *product

        return lax.fori_loop(0, count, turn, (sink, 0 * row, *of_product[1:]))

    return loop


def load_by_kernel(source: Any, sink: Any, row: Any) -> Any:
    """Rows at positions that are constants."""
    for i in range(KERNEL_ROWS):
        row = row_at(source, i) + 0 * row[:1]
    return sink, row


def store_by_kernel(source: Any, sink: Any, row: Any) -> Any:
    """The same, the other way."""
    del source
    for i in range(KERNEL_ROWS):
        sink = with_row(sink, row + i, i)
    return sink, row


# The ways in which rows are moved, given their number.
WAYS: dict[str, Callable[[int], Way]] = {
    "load": functools.partial(turns, [LOAD]),
    "store": functools.partial(turns, [STORE]),
    "both": functools.partial(turns, [LOAD, STORE]),
    "load by kernel": lambda _: load_by_kernel,
    "store by kernel": lambda _: store_by_kernel,
}


def rows_of(nbytes: int) -> int:
    """How many rows of a size are moved."""
    return max(LEAST_ROWS, min(MOST_ROWS, MOVED_BYTES // nbytes))


def median_seconds(run: Callable[..., Any], carry: Any) -> tuple[float, Any]:
    """Of rounds that each take what the one before returned; and what the last did."""
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        carry = jax.block_until_ready(run(*carry))
        seconds.append(time.perf_counter() - started)
    # The first touches the memory for the first time, and makes a GPU's graph.
    return statistics.median(seconds[1:]), carry


def compiled(way: str, nbytes: int, sharding: Any) -> jax.stages.Compiled:
    """The program that moves rows of a size."""
    host = sharding.with_memory_kind("pinned_host")
    rows = jax.ShapeDtypeStruct(
        (rows_of(nbytes), nbytes // 4), jnp.float32, sharding=host
    )
    row = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32, sharding=sharding)
    jitted = jax.jit(
        WAYS[way](rows_of(nbytes)),
        donate_argnums=(1, 2),
        out_shardings=(host, sharding),
        keep_unused=True,
    )
    return jitted.lower(rows, rows, row).compile()


def measure(setting: Setting, node: int | None) -> Figures:
    """Pins memory on a NUMA node, and moves rows of all sizes in all ways."""
    if node is not None:
        _stay_on(node)
    here = first_device()
    host = here.with_memory_kind("pinned_host")
    found = []
    for nbytes in TOY_SIZES if setting.dry else SIZES:
        shape = rows_of(nbytes), nbytes // 4
        ones = jax.jit(lambda shape=shape: jnp.ones(shape), out_shardings=here)()
        source = jax.block_until_ready(jax.device_put(ones, host))
        sink = jax.block_until_ready(jax.device_put(ones, host))
        row = jax.jit(lambda n=nbytes: jnp.ones(n // 4), out_shardings=here)()
        del ones
        for way in WAYS:
            program = compiled(way, nbytes, here)
            run = functools.partial(program, source)
            seconds, (sink, row) = median_seconds(run, (sink, row))
            each = seconds / (KERNEL_ROWS if "kernel" in way else shape[0])
            figures = {"way": way, "nbytes": nbytes, "seconds": each}
            figures |= {"bytes_per_second": nbytes / each, "done": done_by(program)}
            found.append(figures)
    return {"rows": found, "fit": fit(found)}


def done_by(program: jax.stages.Compiled) -> dict[str, int]:
    """What moves the rows, as the text of the program has it."""
    try:
        moves = aot.transfers(program)
    except ValueError:
        return {}
    return dict(Counter(f"{m.direction} by {m.by}" for m in moves))


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Bandwidth of each way by its largest rows, and latency by its smallest."""
    found = {}
    for way in WAYS:
        times = {r["nbytes"]: r["seconds"] for r in rows if r["way"] == way}
        least, most = min(times), max(times)
        rate = (most - least) / max(times[most] - times[least], 1e-9)
        found[way] = {
            "bytes_per_second": rate,
            "latency_seconds": max(0.0, times[least] - least / rate),
        }
    return found


def _stay_on(node: int) -> None:
    """Has all threads of this process, and so what they allocate, on a node."""
    cpus = machine.processors_of_nodes()[node]
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise SkippedError(f"NUMA node {node} is not allowed: {error}") from error


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each NUMA node that has processors."""
    nodes = [node for node, cpus in machine.processors_of_nodes().items() if cpus]
    if len(nodes) < 2:
        return {"any node": functools.partial(measure, setting, None)}
    return {f"node {n}": functools.partial(measure, setting, n) for n in nodes}


def each_way(fits: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """What the link has each way.

    Where both ways share what one has, they took turns: that is what became of the
    program, as before JAX 0.12 (F79), and says nothing of the link.
    """
    alone = min(fits["load"], fits["store"], key=_rate)
    return alone if _rate(fits["both"]) < IN_TURN * _rate(alone) else fits["both"]


def _rate(fit: Mapping[str, float]) -> float:
    return fit["bytes_per_second"]


def constants(tables: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `optax_offload.aot` takes of chips that were measured, by their names.

    Args:
      tables: What was measured, the newest of a chip last.
    """
    found = {}
    for table in tables:
        figures = done(table["parts"].get("link", {}))
        if table["target"] is None or not figures:
            continue
        best = max((each_way(f["fit"]) for f in figures.values()), key=_rate)
        source = f"measured on {table['date']}, docs/on-a-chip.md"
        found[table["target"]] = {**best, "source": source}
    return found


PART = Part("link", minutes=3, case_seconds=90, cases=cases, each_alone=True)
