"""Values on the host and results, spread over a mesh as equations want them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from optax_offload._emit.moves import ON_HOST, load_whole
from optax_offload._places import memory
from optax_offload._program import (
    Atom,
    Program,
    Sharded,
    Spread,
    arguments,
    constrain,
    evaluated,
    is_store,
    spread_over,
)


def spread_by(program: Program, a: Atom, x: Any, has: Sharded | None) -> Any:
    """The value of a result that is written into an argument at rest.

    Where a program constrains how it is spread over a mesh, it is spread that way.

    Args:
      program: The program.
      a: The result.
      x: Its value, in host memory.
      has: How the argument is spread, if that is known.
    """
    i = program.producers.get(a) if isinstance(a, jex.Var) else None
    if i is not None and is_store(program.equations[i]):
        (stored,) = program.equations[i].invars
        i = program.producers.get(stored) if isinstance(stored, jex.Var) else None
    if has is None or i is None:
        return x
    e = program.equations[i]
    like = e.params.get("sharding")
    if e.primitive.name != "sharding_constraint" or not isinstance(like, NamedSharding):
        return x
    return _moved_over(x, has, Spread(like, frozenset(like.mesh.axis_names)))


def constrained(program: Program, v: jex.Var, x: Any) -> Any:
    """The value of a result that was made row by row, sharded as the step has it.

    Its rows are already, but not the buffer that they were written into.
    """
    e = program.equations[program.producers[v]]
    if e.primitive.name not in ("device_put", "sharding_constraint") or (
        memory.on_host(v.aval)
    ):
        return x
    return evaluated([e], lambda _: x, program.debug_info)[v]


def _moved_over(x: jax.Array, has: Sharded, wanted: Spread) -> jax.Array:
    """A value in host memory, moved on the device to where a mesh is to have it.

    Args:
      x: The value.
      has: How it is spread.
      wanted: How it is to be.
    """
    if _is_spread(has, wanted):
        return x
    like = wanted.sharding

    def moved(x: jax.Array, axis: int | None = None) -> jax.Array:
        # As it was first, or the compiler would move the collective before the load.
        loaded = constrain(load_whole(x), has, axis)
        loaded = lax.with_sharding_constraint(loaded, like)
        return ON_HOST.stored(loaded)

    if has.axes_of(0) or any(memory.names_of(part) for part in like.spec[:1]):
        return moved(x)
    return lax.map(lambda row: moved(row[None], 0)[0], x)


def _is_spread(has: Sharded, wanted: Spread) -> bool:
    """Returns whether a value is spread over axes as an equation takes it."""
    mesh, spec = wanted.sharding.mesh, wanted.sharding.spec
    parts = itertools.zip_longest(range(has.ndim), spec)
    for d, part in parts:
        over, names = (
            [a for a in some if mesh.shape.get(a) != 1]
            for some in (has.axes_of(d), memory.names_of(part))
        )
        others = over[len(names) :]
        if over[: len(names)] != names or not wanted.axes.isdisjoint(others):
            return False
    return True


def _lower_spread_as(ctx: mlir.LoweringRuleContext, x: Any, *, wanted: Spread) -> Any:
    found = arguments(ctx, [x]).get(0)
    has = found.sharding if found else None
    if has is None:  # What nothing says the compiler shards as it is taken.
        return [x]
    moved = mlir.lower_fun(lambda x: [_moved_over(x, has, wanted)], True)
    return moved(ctx, x)


mlir.register_lowering(spread_over, _lower_spread_as, cacheable=False)
