"""Two small Flax models take turns on one device.

One model learns to tell text from the same bytes sorted; the other is a language model.
Before each turn the other model's parameters and optimizer state move off the device,
to host memory or to disk, and its own come back. At the end all losses are compared
with a run that keeps both models on the device.

Run:
    python examples/two_models.py
    python examples/two_models.py --memory_kind=disk
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lm_data
import numpy as np
import optax
from absl import app, flags
from flax import linen as nn
from flax.training.train_state import TrainState

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_integer("turns", 4, "Turns of each model.", lower_bound=1)
flags.DEFINE_integer("steps", 10, "Training steps in a turn.", lower_bound=1)
flags.DEFINE_integer("width", 128, "Features of both models.", lower_bound=1)
flags.DEFINE_integer("batch", 32, "Windows in a batch.", lower_bound=1)
flags.DEFINE_integer("context", 32, "Bytes in a window.", lower_bound=1)
flags.DEFINE_enum(
    "memory_kind",
    "pinned_host",
    ["pinned_host", "unpinned_host", "disk"],
    "Where a model waits for its turn.",
)
flags.DEFINE_string(
    "directory", None, "Where to write with --memory_kind=disk [default: temporary]."
)
flags.DEFINE_bool(
    "offload", True, "Keep Adam's moments in host memory also during a model's turn."
)
flags.DEFINE_integer("seed", 0, "Seed of the parameters and the batches.")

Step = Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]


class Language(nn.Module):
    """Guesses each byte from the eight before it."""

    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(lm_data.VOCABULARY_SIZE, self.width)(tokens)
        x = nn.gelu(nn.Conv(4 * self.width, [8], padding="CAUSAL")(x))
        return nn.Dense(lm_data.VOCABULARY_SIZE)(x)


class Scores(nn.Module):
    """Scores a window of bytes: high if it looks like text."""

    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(lm_data.VOCABULARY_SIZE, self.width)(tokens)
        x = nn.gelu(nn.Conv(4 * self.width, [4])(x)).mean(axis=-2)
        return nn.Dense(1)(x)[..., 0]


def language_loss(state: TrainState, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of guessing the next byte, in nats."""
    logits = state.apply_fn({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def scores_loss(state: TrainState, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of telling windows from the same bytes sorted, in nats."""
    both = jnp.concatenate([tokens, jnp.sort(tokens)])
    scores = state.apply_fn({"params": params}, both)
    is_text = jnp.arange(len(both)) < len(tokens)
    return optax.sigmoid_binary_cross_entropy(
        scores, is_text.astype(scores.dtype)
    ).mean()


def make_step(loss_fn: Callable[[TrainState, Any, jax.Array], jax.Array]) -> Step:
    """A train step of a loss, whose state is updated in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda params: loss_fn(state, params, tokens)
        )(state.params)
        return state.apply_gradients(grads=gradients), loss

    return step


def create_state(model: nn.Module, seed: int) -> TrainState:
    """Parameters and Adam's state of a model."""
    optimizer = optax.adamw(3e-3)
    if FLAGS.offload:
        optimizer = oo.offload(optimizer, r".*/(mu|nu)/.*")
    tokens = jnp.zeros((1, FLAGS.context), jnp.int32)
    params = jax.device_put(
        model.init(jax.random.key(seed), tokens)["params"], jax.devices()[0]
    )
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def batches() -> Iterator[jax.Array]:
    """The batches of both models, one after the other."""
    return lm_data.training_batches(
        lm_data.load_text().train,
        batch=FLAGS.batch,
        context=FLAGS.context,
        steps=2 * FLAGS.turns * FLAGS.steps,
        seed=FLAGS.seed,
    )


def train(
    leave: Callable[[str, TrainState], TrainState],
    come_back: Callable[[TrainState], TrainState],
    log: Callable[[str], None],
) -> dict[str, list[float]]:
    """Trains both models in turns.

    Args:
        leave: Called with a model's name and its state at the end of its turn.
        come_back: Called with what `leave` returned when its next turn begins.
        log: Takes lines of text.

    Returns:
        The losses of all steps, of each model.
    """
    states = {
        "language": create_state(Language(FLAGS.width), FLAGS.seed),
        "scores": create_state(Scores(FLAGS.width), FLAGS.seed + 1),
    }
    steps = {"language": make_step(language_loss), "scores": make_step(scores_loss)}
    losses: dict[str, list[float]] = {name: [] for name in states}
    data = batches()
    states = {name: leave(name, state) for name, state in states.items()}
    for turn in range(1, FLAGS.turns + 1):
        for name in states:
            states[name] = come_back(states[name])
            log(f"turn {turn}, {name} on the device")
            for row in describe(states):
                log(row)
            for _ in range(FLAGS.steps):
                states[name], loss = steps[name](states[name], next(data))
                losses[name].append(float(loss))
            log(f"  loss {losses[name][-1]:.4f}")
            states[name] = leave(name, states[name])
    return losses


def describe(states: dict[str, TrainState]) -> list[str]:
    """Says how many bytes of each state are where."""
    rows = []
    for name, state in states.items():
        totals = oo.memory_report(state).totals
        # The step counter is a Python number before the first step.
        where = [f"{n:,} bytes in {kind}" for kind, n in totals.items() if kind]
        rows.append(f"  {name:9s} {', '.join(where)}")
    return rows


def main(argv: Sequence[str]) -> None:
    """Trains two models in turns, and compares with both on the device all the time."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(FLAGS.directory or temporary)

        def leave(name: str, state: TrainState) -> TrainState:
            on_disk = FLAGS.memory_kind == "disk"
            return oo.offload_states(
                state,
                memory_kind=FLAGS.memory_kind,
                directory=root / name if on_disk else None,
                block=True,  # The other needs the memory.
            )

        losses = train(leave, oo.reload_states, print)
    expected = train(lambda _, state: state, lambda state: state, lambda _: None)
    if losses != expected:
        raise AssertionError(f"{losses}\nis not, without moving states,\n{expected}")
    count = sum(map(len, losses.values()))
    print(f"all {count} losses are those of both models on the device all the time")
    print(f"from {np.mean([x[0] for x in losses.values()]):.4f}", end=" ")
    print(f"to {np.mean([x[-1] for x in losses.values()]):.4f} on the mean of both")


if __name__ == "__main__":
    app.run(main)
