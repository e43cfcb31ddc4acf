"""Whether loads, stores and products of one loop's turn run side by side.

A turn loads 64 MiB, stores as much, and multiplies matrices for about as long, and none
of these waits for another. They are timed alone and together, as steps move rows and as
they move whole leaves, and with XLA's options that change what a GPU does with the
schedule (F79).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.chip.link import (
    DEVICE,
    HOST,
    PIECES,
    done_by,
    median_seconds,
    row_at,
    turns,
    with_row,
)
from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import first_device

# A row is a matrix of this width in float32.
WIDTH, TOY_WIDTH = 4096, 32
TURNS = 8
TOGETHER = [
    pieces
    for n in range(1, 1 + len(PIECES))
    for pieces in itertools.combinations(PIECES, n)
]
# What is captured in CUDA graphs by default, but for slices that are copies.
KERNELS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
OPTIONS: dict[str, dict[str, str]] = {
    "as compiled": {},
    "copies outside of graphs": {"xla_gpu_enable_command_buffer": KERNELS},
    "no graphs": {"xla_gpu_enable_command_buffer": ""},
    "unordered graphs": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}


@dataclasses.dataclass(frozen=True)
class Form:
    """How what is in host memory is moved.

    Attributes:
      count: So many rows are in host memory.
      load: As of `turns`.
      store: As of `turns`.
      options: The names of the options that it is tried with.
    """

    count: int
    load: Callable[[jax.Array, Any], jax.Array]
    store: Callable[[jax.Array, jax.Array, Any], jax.Array]
    options: Collection[str]


def leaf(source: jax.Array, i: Any) -> jax.Array:
    """All of the source, which is one row."""
    # What does not depend on the turn would be moved out of the loop.
    source, _ = lax.optimization_barrier((source, i))
    return lax.optimization_barrier(jax.device_put(source, DEVICE))[0]


def with_leaf(sink: jax.Array, row: jax.Array, i: Any) -> jax.Array:
    """The row, in place of all of the sink."""
    del sink
    row, _ = lax.optimization_barrier((row[None], i))
    return jax.device_put(row, HOST)


FORMS = {
    "slices": Form(TURNS, row_at, with_row, tuple(OPTIONS)),
    # Graphs hold none of these.
    "whole leaves": Form(1, leaf, with_leaf, ("as compiled",)),
}


def arguments(form: Form, width: int, place: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of a source, a sink, a row to store, a matrix, and a product."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    host = place.with_memory_kind("pinned_host")
    rows = shape((form.count, width, width), sharding=host)
    row = shape((width, width), sharding=place)
    return rows, rows, row, row, shape((width // 2, width), sharding=place)


def jitted(form: Form, pieces: Collection[str]) -> Any:
    """The program, in which the sink and the product take their arguments' memory."""
    program = turns(pieces, TURNS, form.load, form.store)
    return jax.jit(program, donate_argnums=(1, 4), keep_unused=True)


def measure(setting: Setting, form: Form, options: Mapping[str, str]) -> Figures:
    """Times the pieces alone and together."""
    width = TOY_WIDTH if setting.dry else WIDTH
    types = arguments(form, width, first_device())
    # A product with this matrix is itself.
    source, sink, row, matrix, product = jax.block_until_ready(
        [
            jax.device_put(np.full(t.shape, 1 / width, t.dtype), t.sharding)
            for t in types
        ]
    )
    found = []
    for pieces in TOGETHER:
        ready = jitted(form, pieces).lower(*types).compile(dict(options))

        def run(sink: Any, _: Any, product: Any, ready: Any = ready) -> Any:
            return ready(source, sink, row, matrix, product)

        seconds, (sink, _, product) = median_seconds(run, (sink, row, product))
        each = seconds / TURNS
        found.append({"pieces": pieces, "seconds": each, "done": done_by(ready)})
    return {"rows": found, "together": together(found)}


def together(rows: Collection[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What takes how much longer than its longest piece, and than all in turn.

    Side by side the first is 1, in turn the second.
    """
    seconds = {tuple(row["pieces"]): row["seconds"] for row in rows}
    found = {}
    for pieces, whole in seconds.items():
        alone = [seconds[piece,] for piece in pieces]
        if len(pieces) > 1:
            over = {"over_longest": whole / max(alone), "over_sum": whole / sum(alone)}
            found[" + ".join(pieces)] = over
    return found


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each form and its options."""
    return {
        f"{name}, {options}": functools.partial(
            measure, setting, form, OPTIONS[options]
        )
        for name, form in FORMS.items()
        for options in form.options
    }


PART = Part("overlap", minutes=2, case_seconds=60, cases=cases)
