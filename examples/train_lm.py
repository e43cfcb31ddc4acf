"""Trains a small Transformer in Flax linen, with Adam's moments in host memory.

Only the optimizer changes: `make_optimizer` in `lm_program.py` wraps it in
`oo.offload`. The losses are those of `--nooffload`. At the end the step is compiled for
two chips that are not attached, with and without offload (`lm_chips.py`).

Run:
    python examples/train_lm.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_chips
import lm_data
import lm_program
import numpy as np
from absl import app, flags
from flax import linen as nn
from flax.training.train_state import TrainState
from lm_model import causal_attention, next_byte_loss
from lm_program import Settings

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_list(
    "chips",
    ["v5e", "h100"],
    "Chips to compile the step for in the end, with `--offload`; --chips= for none.",
)


class Block(nn.Module):
    """Causal attention, then an MLP, each on normalized features."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        y = nn.RMSNorm(name="attention_norm")(x)
        x += nn.MultiHeadDotProductAttention(
            num_heads=self.heads,
            use_bias=False,
            attention_fn=causal_attention,
            name="attention",
        )(y)
        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(4 * width, use_bias=False, name="mlp_in")(y))
        return x + nn.Dense(width, use_bias=False, name="mlp_out")(y), None


class Transformer(nn.Module):
    """A decoder that reads bytes and returns logits of the next ones."""

    settings: Settings

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        settings = self.settings
        embedding = nn.Embed(lm_data.VOCABULARY_SIZE, settings.width, name="embedding")
        # One stacked leaf per weight, with a leading layer axis.
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=settings.layers,
        )
        x, _ = layers(settings.heads, name="layers")(embedding(tokens), None)
        return embedding.attend(nn.RMSNorm(name="final_norm")(x))


def create_state(settings: Settings, config: oo.OffloadConfig | None) -> TrainState:
    """Returns new parameters and the optimizer state that goes with them."""
    model = Transformer(settings)
    tokens = jnp.zeros((1, settings.context), jnp.int32)
    variables = model.init(jax.random.key(settings.seed), tokens)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=lm_program.make_optimizer(settings, config),
    )


def loss_fn(
    params: Mapping[str, Any], state: TrainState, tokens: jax.Array
) -> jax.Array:
    """Returns the mean loss of a batch, in nats per byte."""
    logits = state.apply_fn({"params": params}, tokens[:, :-1])
    return next_byte_loss(logits, tokens)


def step_fn(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """Returns the state after one update, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_fn)(state.params, state, tokens)
    return state.apply_gradients(grads=gradients), loss


train_step = jax.jit(step_fn, donate_argnums=0)


@jax.jit
def evaluation_step(state: TrainState, tokens: jax.Array) -> jax.Array:
    """Returns the loss of a batch."""
    return loss_fn(state.params, state, tokens)


def train(
    settings: Settings, config: oo.OffloadConfig | None
) -> tuple[list[float], TrainState]:
    """Returns the loss of every step, and the state after the last."""
    state = create_state(settings, config)
    losses = []
    for step, tokens in enumerate(lm_program.training_batches(settings), start=1):
        state, loss = train_step(state, tokens)
        lm_program.log_loss(step, loss, settings)
        losses.append(loss)
    return [float(loss) for loss in losses], state


def evaluate(
    state: TrainState, settings: Settings, text: lm_data.Text | None = None
) -> float:
    """Returns the mean loss over a held-out text, in nats per byte."""
    batches = lm_program.held_out_batches(settings, text)
    return float(np.mean([evaluation_step(state, tokens) for tokens in batches]))


def main(argv: Sequence[str]) -> None:
    """Trains, evaluates, and says where everything is."""
    settings, config, plot = lm_program.read_flags(argv)
    losses, state = train(settings, config)
    held_out_loss = evaluate(state, settings)
    lm_program.finish(losses, held_out_loss, state.opt_state, config, plot)
    if config is not None:
        picture = plot.with_stem(f"{plot.stem}_peaks")
        chips = FLAGS.chips
        lm_chips.report(step_fn, create_state, settings, config, chips, picture)


if __name__ == "__main__":
    app.run(main)
