"""The cost of a call: `oo.jit` beside `jax.jit`, and beside leaves reordered in Python.

A step adds one to each of 10, 100 and 1000 small leaves, all donated, so that what is
measured is the dispatch. Five ways, called in turns:

- `jax.jit`, twice: how far two that are the same differ is what cannot be measured;
- `oo.jit`, which is one Python function around the same C++ path;
- `oo.jit` with in_shardings and out_shardings;
- what `oo.jit` does not do: a flat `jax.jit` whose leaves are put into another order
  before, and its results into another after, each call (as its memory kinds are known).

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.time.call_cost
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import optax_offload as oo
from benchmarks.common import command, turns

COUNTS = (10, 100, 1000)
ROUNDS = 40
# In each turn of a way.
CALLS = 20


def add_one(state: Any) -> Any:
    """A step of which all leaves are written in place."""
    return jax.tree.map(lambda x: x + 1, state)


def reordered(count: int) -> Callable[[Any], Any]:
    """The step, its flat leaves put into another order and back again."""
    order = operator.itemgetter(*reversed(range(count)))
    flat = jax.jit(lambda *xs: add_one(xs), donate_argnums=tuple(range(count)))

    def call(state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        assert all(x.sharding.memory_kind for x in leaves)
        return jax.tree.unflatten(treedef, order(flat(*order(leaves))))

    return call


def main() -> None:
    """Prints microseconds of a call, the least of all turns."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    of_ours = functools.partial(oo.jit, add_one, donate_argnums=0)
    for count in COUNTS:
        ways = {
            "jax.jit": jax.jit(add_one, donate_argnums=0),
            "again": jax.jit(add_one, donate_argnums=0),
            "oo.jit": of_ours(),
            "with shardings": of_ours(in_shardings=device, out_shardings=device),
            "reordered": reordered(count),
        }
        if count == COUNTS[0]:
            command.print_header(("leaves",), list(ways))
        zero = jnp.zeros((), device=device)
        states: dict[str, Any] = {
            name: {f"{i:04}": zero + 0 for i in range(count)} for name in ways
        }

        def calls(name: str, call: Any, states: Any = states) -> turns.Seconds:
            def some() -> None:
                for _ in range(CALLS):
                    states[name] = call(states[name])

            jax.block_until_ready(states[name])
            return {"call": turns.clocked(some)[1] / CALLS}

        timed = {
            name: functools.partial(calls, name, way) for name, way in ways.items()
        }
        found = turns.in_turns(timed, ROUNDS)
        least = [1e6 * min(found[name]["call"]) for name in ways]
        command.print_row((str(count),), least)


if __name__ == "__main__":
    command.run(main)
