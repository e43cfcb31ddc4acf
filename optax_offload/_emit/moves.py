"""The only loads and stores: between where a value rests and where it is used.

And the row kernel, which loads, computes and stores rows, in a loop or inside a scan;
and scans of rows at rest, which no plan has taken up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.extend.core import primitives
from jax.interpreters import mlir

from optax_offload._ground.compat import scan_counts
from optax_offload._places import memory, tpu_layout
from optax_offload._program import (
    Builder,
    Sharded,
    Update,
    bound,
    constrain,
    resting_scan,
    sharding_of,
    transform_as,
)

T = TypeVar("T")

# The most rows and columns that a TPU moves together, whatever their type.
TILE = (32, 128)


def together(values: Mapping[T, Any]) -> dict[T, Any]:
    """Values that are all there before any of them is used."""
    return bound(values, lax.optimization_barrier([*values.values()]))


def load_whole(x: Any) -> Any:
    """A value on the device, all of it."""
    return memory.transfer(x, "device")


def moved(x: Any, memory_kind: str) -> Any:
    """A value in a memory, all of it, wherever it is."""
    return memory.transfer(x, memory_kind)


def as_typed(x: Any, aval: Any) -> Any:
    """A value in the memory that its type in the step has, all of it."""
    return moved(x, memory.kind_of_type(aval))


def rows_of(x: jax.Array, first: Any, count: int, axis: int) -> jax.Array:
    """Some rows of a value, in its memory."""
    return lax.dynamic_slice_in_dim(x, first, count, axis, allow_negative_indices=False)


def with_rows(x: jax.Array, rows: jax.Array, first: Any, axis: int) -> jax.Array:
    """A value with other rows in their place, in its memory."""
    return lax.dynamic_update_slice_in_dim(
        x, rows, first, axis, allow_negative_indices=False
    )


def host_buffer(aval: Any, fill: int, zero: Any) -> jax.Array:
    """A buffer in host memory, for a value of a type that is stored as a whole.

    A compiler fills it from the device, as large as it is, unless some tiles are stored
    in it first (F87). In Auto mode no type says which would be those of a single shard.
    A TPU's compiler stores no tile of some positions alone along the other axes.

    Args:
      aval: The type.
      fill: A number for each buffer. Of equal ones a compiler makes one, and copies.
      zero: What it is filled with, if it has to be.
    """
    sharding = memory.explicit_sharding(aval)
    sharded = (None,) * aval.ndim if sharding is None else sharding.spec
    tile = list(aval.shape)
    for axis, size in zip(tpu_layout.order(aval)[::-1], TILE[::-1], strict=False):
        tile[axis] = size
    sizes = zip(aval.shape, tile, sharded, strict=True)
    some = tuple(n if names else min(n, least) for n, least, names in sizes)
    known = sharding is not None or memory.devices_of(aval) == 1
    if not known or some == aval.shape:
        return memory.full(aval, zero, "pinned_host")
    # Whole numbers that the type has.
    buffer = memory.full(aval, fill % 256 ** (aval.dtype.itemsize - 1), "pinned_host")
    tiles = memory.full(memory.device_type(aval).update(shape=some), 0, "pinned_host")
    return lax.dynamic_update_slice(buffer, tiles, [0] * aval.ndim)


def with_transfer(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """The step with a transfer to host memory, of which nothing is taken.

    JAX lowers all transfers of a program as nothing if it sees none before, in types or
    in equations. Those of this step are written when it is lowered.
    """
    number = jax.ShapeDtypeStruct((), np.float32)
    stored = jax.make_jaxpr(lambda x: memory.transfer(x, "pinned_host"))(number)
    (e,) = stored.jaxpr.eqns
    zero = jex.Literal(np.float32(0), e.invars[0].aval)
    return jaxpr.replace(eqns=[*jaxpr.eqns, e.replace(invars=[zero])])


@dataclasses.dataclass(frozen=True)
class Rest:
    """Where a value rests, of which all or some rows are loaded and stored.

    Attributes:
      memory_kind: The memory kind that it is stored in.
      axis: The axis of the rows; None where all of it is moved.
      layout: The type of all of it, if rows keep its layout on a TPU.
      like: The sharding of what it replaces, if its type does not say it.
      replaced: Whether its rows on the device are replaced where they are read.
      made_here: Whether a loop makes it, and it replaces nothing.
    """

    memory_kind: str = "device"
    axis: int | None = None
    layout: Any = None
    like: Sharded | None = None
    replaced: bool = False
    made_here: bool = False

    def load(self, x: Any, first: Any, count: int) -> Any:
        """So many rows of a value, on the device; all of it, where it has no rows."""
        if self.axis is not None:
            x = rows_of(x, first, count, self.axis)
            if self.replaced and not memory.on_host(x):
                # Else what reads it may be one with what replaces it, which a TPU's
                # compiler does with a copy of the whole (F09).
                return lax.optimization_barrier(x)
        return self.loaded(x)

    def loaded(self, x: Any) -> Any:
        """What was taken of a value, on the device."""
        if not memory.on_host(x):
            return x
        return constrain(self._laid_out(load_whole(x)), self.like, self.axis)

    def store(self, buffer: Any, rows: Any, first: Any) -> Any:
        """The buffer with rows stored in it; what is stored, if that is all of it."""
        rows = self.stored(rows)
        if self.axis is None:
            return rows
        return with_rows(buffer, rows, first, self.axis)

    def stored(self, y: Any) -> Any:
        """What was made on the device, in the memory where it rests."""
        if self.memory_kind == "device":
            return y
        y = self._laid_out(constrain(y, self.like, self.axis))
        return moved(y, self.memory_kind)

    def _laid_out(self, x: Any) -> Any:
        if self.layout is None:
            return x
        return tpu_layout.constrain(x, self.layout, made_here=self.made_here)


def rest_of(
    update: Update,
    k: int,
    sharded: Mapping[int, Sharded],
    replaced: int | None,
    axis: int | None = None,
) -> Rest:
    """Where an output of an update rests.

    Args:
      update: The update.
      k: The output, as a position.
      sharded: The shardings of inputs whose types do not say it, by position.
      replaced: The input that it is written over, as a position; None for none.
      axis: The axis of the rows that are stored; None where all of it is.
    """
    output = update.outputs[k]
    like = sharding_of(sharded, output.like if replaced is None else replaced)
    return Rest(output.memory_kind, axis, like=like)


@dataclasses.dataclass(frozen=True)
class RowKernel:
    """Equations for some rows of leaves, or for all of them.

    Attributes:
      compute: The equations, as a function of operands on the device.
      operands: The variables that the operands are rows of, in order, as leaves.
      results: The names of the results, in order.
    """

    compute: Callable[..., Sequence[Any]]
    operands: Mapping[jex.Var, Rest]
    results: Sequence[Hashable]

    def values(
        self,
        first: Any,
        count: int,
        whole: Callable[[jex.Var], Any],
        given: Mapping[jex.Var, Any],
    ) -> dict[Any, Any]:
        """The results for some rows, by name.

        Args:
          first: The first of the rows.
          count: The number of rows.
          whole: Returns the value that rows of a variable are loaded from.
          given: The operands of which the rows are there already.
        """
        operands = [
            load_whole(given[v]) if v in given else rest.load(whole(v), first, count)
            for v, rest in self.operands.items()
        ]
        return bound(self.results, self.compute(*operands))


# A row that a turn of a scan makes, and leaves to the scan.
ON_HOST = Rest("pinned_host")


def _scanned(
    *values: Any, jaxpr: jex.ClosedJaxpr, stored: Sequence[int], **params: Any
) -> list[Any]:
    """The results of a scan of rows at rest, of which each turn moves its own."""
    body, builder = jaxpr.jaxpr, Builder()
    taken = list(body.invars)
    for n in range(sum(scan_counts(params)), len(taken)):
        v = taken[n]
        if memory.on_host(values[n]) and not memory.on_host(v.aval):
            taken[n] = jex.Var(memory.host_type(v.aval))
            builder.rename([v], builder.trace(load_whole, taken[n]))
    for e in body.eqns:
        builder.add(e)
    results = builder.read_all(body.outvars)
    for k in stored:
        (results[k],) = builder.trace(ON_HOST.stored, results[k])
    moved = body.replace(invars=taken, eqns=builder.equations, outvars=results)
    closed = jex.ClosedJaxpr(moved, jaxpr.consts)
    return primitives.scan_p.bind(*values, jaxpr=closed, **params)


transform_as(resting_scan, _scanned)
# Where it is, as one that JAX made.
mlir.register_lowering(
    resting_scan, mlir.lower_fun(_scanned, multiple_results=True), cacheable=False
)
