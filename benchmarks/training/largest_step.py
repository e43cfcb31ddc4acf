"""The largest steps of 8-bit Adam on a network whose gradients are often zero.

Three layers of ReLU, a linear map to learn, and few examples to a batch: a unit that is
active in one step and not in the next has a gradient of exactly zero then. A second
moment that is lost where the first is kept makes an update of any size; plain Adam's
are about a learning rate.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.training.largest_step
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_offload as oo
from benchmarks.common import command

LEARNING_RATE = 1e-3
SHAPES = {"a": (64, 256), "b": (256, 256), "c": (256, 256), "d": (256, 64)}
CODECS = ("float32", "int8", "int8-companded", "float8", "bfloat16")
# Losses of so many steps at the end are averaged.
LAST = 20
STEPS = 200
# Runs of each; the largest step is that of all.
SEEDS = 2
BATCHES = (1, 32)
# Parts of a hidden layer that are dropped.
DROPOUTS = (0, 0.5)


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


def main() -> None:
    """Prints the largest step of all seeds, and the mean loss."""
    columns = [f"{codec[:7]} {x}" for codec in CODECS for x in ("step", "loss")]
    command.print_header(("batch, dropout",), columns)
    for batch, dropout in itertools.product(BATCHES, DROPOUTS):
        figures = []
        for codec in CODECS:
            seeds = range(SEEDS)
            runs = [train(codec, batch, dropout, seed, STEPS) for seed in seeds]
            steps, losses = zip(*runs, strict=True)
            figures += [max(steps), statistics.fmean(losses)]
        command.print_row((f"{batch}, {dropout}",), figures)


if __name__ == "__main__":
    command.run(main)
