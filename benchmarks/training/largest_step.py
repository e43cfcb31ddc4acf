"""The largest steps of 8-bit Adam on a network whose gradients are often zero.

Three layers of ReLU, a linear map to learn, and few examples to a batch: a unit that is
active in one step and not in the next has a gradient of exactly zero then. A second
moment that is lost where the first is kept makes an update of any size; plain Adam's
are about a learning rate.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.training.largest_step
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import optax_offload as oo

LEARNING_RATE = 1e-3
SHAPES = {"a": (64, 256), "b": (256, 256), "c": (256, 256), "d": (256, 64)}
CODECS = ("float32", "int8", "int8-companded", "float8", "bfloat16")
# Losses of so many steps at the end are averaged.
LAST = 20
STEPS = 200
# Runs of each; the largest step is that of all.
SEEDS = 2
FLAGS = flags.FLAGS
flags.DEFINE_list("batches", ["1", "32"], "Examples to a batch.")
flags.DEFINE_list("dropouts", ["0", "0.5"], "Parts of a hidden layer that are dropped.")


def loss_of(params: Any, x: Any, target: Any, key: Any, dropout: float) -> jax.Array:
    """The mean squared error of a batch."""
    h = jax.nn.relu(x @ params["a"])
    h = jax.nn.relu(h @ params["b"])
    if dropout:
        h = h * jax.random.bernoulli(key, 1 - dropout, h.shape) / (1 - dropout)
    return jnp.mean((jax.nn.relu(h @ params["c"]) @ params["d"] - x @ target) ** 2)


def train(codec: Any, batch: int, dropout: float, seed: int, steps: int) -> Any:
    """The largest step, in learning rates, and the mean of the last losses."""
    tx: Any = optax.adam(LEARNING_RATE)
    if codec != "float32":
        tx = oo.low_bit(tx, ".*/(mu|nu)/.*", codec)
    random = np.random.default_rng(seed)
    params = {
        name: jnp.asarray(random.normal(0, np.sqrt(2 / shape[0]), shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    target = jnp.asarray(random.normal(0, 1 / 8, (64, 64)), jnp.float32)

    @jax.jit
    def step(params: Any, state: Any, x: Any, key: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, target, key, dropout)
        updates, state = tx.update(gradients, state, params)
        largest = optax.tree.max(jax.tree.map(jnp.abs, updates)) / LEARNING_RATE
        return optax.apply_updates(params, updates), state, largest, loss

    state, found = tx.init(params), []
    for number in range(steps):
        x = jnp.asarray(random.standard_normal((batch, 64)), jnp.float32)
        key = jax.random.key(number)
        params, state, largest, loss = step(params, state, x, key)
        found.append((float(largest), float(loss)))
    return max(a for a, _ in found), statistics.fmean(b for _, b in found[-LAST:])


def main(argv: Sequence[str]) -> None:
    """Prints a table in Markdown."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    print("| batch, dropout |", " | ".join(CODECS), "|")
    print("| --- |", " | ".join(["---:"] * len(CODECS)), "|")
    for batch in FLAGS.batches:
        for dropout in FLAGS.dropouts:
            cells = []
            for codec in CODECS:
                runs = [
                    train(codec, int(batch), float(dropout), seed, STEPS)
                    for seed in range(SEEDS)
                ]
                loss = statistics.fmean(loss for _, loss in runs)
                cells.append(f"{max(step for step, _ in runs):.3g}, {loss:.3f}")
            print(f"| {batch}, {dropout} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    app.run(main)
