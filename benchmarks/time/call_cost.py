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

import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_list("leaves", ["10", "100", "1000"], "Of the state, one run for each.")
flags.DEFINE_integer("rounds", 40, "Turns of each way.")
flags.DEFINE_integer("calls", 20, "Calls in a turn.")


def step(state: dict[str, Any]) -> dict[str, Any]:
    """Of which all leaves are written in place."""
    return jax.tree.map(lambda x: x + 1, state)


def reordered(state: dict[str, Any]) -> Callable[[Any], Any]:
    """The step, its flat leaves put into another order and back again."""
    leaves, treedef = jax.tree.flatten(state)
    order = operator.itemgetter(*reversed(range(len(leaves))))
    flat = jax.jit(
        lambda *xs: tuple(x + 1 for x in xs), donate_argnums=tuple(range(len(leaves)))
    )

    def call(state: Any) -> Any:
        leaves, treedef_of_call = jax.tree.flatten(state)
        assert treedef_of_call == treedef
        kinds = [x.sharding.memory_kind for x in leaves]
        assert len(kinds) == len(leaves)
        return jax.tree.unflatten(treedef, order(flat(*order(leaves))))

    return call


def seconds_per_call(call: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """The time until calls return, not until they are done."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(FLAGS.calls):
        state = call(state)
    return (time.perf_counter() - start) / FLAGS.calls, state


def main(argv: list[str]) -> None:
    """Prints a line for each number of leaves."""
    del argv
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    print(f"JAX {jax.__version__}; µs per call, the least of all turns")
    for count in [int(n) for n in FLAGS.leaves]:
        ways: dict[str, Any] = {
            "jax.jit": jax.jit(step, donate_argnums=0),
            "again": jax.jit(step, donate_argnums=0),
            "oo.jit": oo.jit(step, donate_argnums=0),
            "oo.jit, shardings": oo.jit(
                step, donate_argnums=0, in_shardings=device, out_shardings=device
            ),
        }
        states = {
            name: {
                f"{i:04}": jax.device_put(jnp.zeros(()), device) for i in range(count)
            }
            for name in (*ways, "reordered")
        }
        ways["reordered"] = reordered(states["reordered"])
        times: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for _ in range(FLAGS.rounds):
            names = names[1:] + names[:1]
            for name in names:
                seconds, states[name] = seconds_per_call(ways[name], states[name])
                times[name].append(seconds)
        shown = ", ".join(f"{name} {1e6 * min(t):.1f}" for name, t in times.items())
        print(f"{count:5} leaves: {shown}")


if __name__ == "__main__":
    app.run(main)
