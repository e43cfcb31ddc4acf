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
    bound,
    constrain,
    resting_scan,
    transform_as,
)

T = TypeVar("T")


def load(x: Any, of: Any) -> Any:
    """A value, or some of its rows, on the device.

    Args:
      x: The value, wherever it is.
      of: The type of all of it, whose layout the rows keep on a TPU.
    """
    if not memory.on_host(x):
        return x
    return tpu_layout.constrain(memory.transfer(x, "device"), of)


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


def store(
    y: Any,
    memory_kind: str,
    *,
    of: Any = None,
    like: Sharded | None = None,
    axis: int | None = None,
) -> Any:
    """Moves a value, or some of its rows, to where it rests.

    Args:
      y: The value, on the device.
      memory_kind: The memory kind in which it rests.
      of: The type of all of it, if rows have to keep its layout on a TPU.
      like: The sharding of the value that it replaces, if its type does not say it.
      axis: The axis of the rows; None for a whole value.
    """
    if memory_kind == "device":
        return y
    y = constrain(y, like, axis)
    if of is not None:
        y = tpu_layout.constrain(y, of)
    return memory.transfer(y, memory_kind)


def store_residual(x: Any) -> Any:
    """Moves a value that a loop has computed to host memory, all of it."""
    return memory.transfer(tpu_layout.constrain(x, x, made_here=True), "pinned_host")


def rows_of(x: jax.Array, first: Any, count: int, axis: int) -> jax.Array:
    """Some rows of a value, in its memory."""
    return lax.dynamic_slice_in_dim(x, first, count, axis, allow_negative_indices=False)


def with_rows(x: jax.Array, rows: jax.Array, first: Any, axis: int) -> jax.Array:
    """A value with other rows in their place, in its memory."""
    return lax.dynamic_update_slice_in_dim(
        x, rows, first, axis, allow_negative_indices=False
    )


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
class Leaf:
    """A value at rest, of which rows are loaded, or into which they are stored.

    Attributes:
      axis: The axis of the rows; None where all of it is taken.
      layout: The type of all of it, if rows keep its layout on a TPU.
      memory_kind: The memory kind that rows are stored in.
      like: The sharding of what it replaces, if its type does not say it.
      replaced: Whether its rows on the device are replaced where they are read.
    """

    axis: int | None = None
    layout: Any = None
    memory_kind: str = "device"
    like: Sharded | None = None
    replaced: bool = False

    def load(self, x: Any, first: Any, count: int) -> Any:
        """So many rows of a value, on the device."""
        if self.axis is not None:
            x = rows_of(x, first, count, self.axis)
            if self.replaced and not memory.on_host(x):
                # Else what reads it may be one with what replaces it, which a TPU's
                # compiler does with a copy of the whole (F09).
                return lax.optimization_barrier(x)
        on_host = memory.on_host(x)
        x = load_whole(x) if self.layout is None else load(x, self.layout)
        return constrain(x, self.like, self.axis) if on_host else x

    def store(self, buffer: Any, rows: Any, first: Any) -> Any:
        """The buffer with rows stored in it; what is stored, if that is all of it."""
        rows = store(
            rows, self.memory_kind, of=self.layout, like=self.like, axis=self.axis
        )
        if self.axis is None:
            return rows
        return with_rows(buffer, rows, first, self.axis)


@dataclasses.dataclass(frozen=True)
class RowKernel:
    """Equations for some rows of leaves, or for all of them.

    Attributes:
      compute: The equations, as a function of operands on the device.
      operands: The variables that the operands are rows of, in order, as leaves.
      results: The names of the results, in order.
    """

    compute: Callable[..., Sequence[Any]]
    operands: Mapping[jex.Var, Leaf]
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
            load_whole(given[v]) if v in given else leaf.load(whole(v), first, count)
            for v, leaf in self.operands.items()
        ]
        return bound(self.results, self.compute(*operands))


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
        (results[k],) = builder.trace(lambda y: store(y, "pinned_host"), results[k])
    moved = body.replace(invars=taken, eqns=builder.equations, outvars=results)
    closed = jex.ClosedJaxpr(moved, jaxpr.consts)
    return primitives.scan_p.bind(*values, jaxpr=closed, **params)


transform_as(resting_scan, _scanned)
# Where it is, as one that JAX made.
mlir.register_lowering(
    resting_scan, mlir.lower_fun(_scanned, multiple_results=True), cacheable=False
)
