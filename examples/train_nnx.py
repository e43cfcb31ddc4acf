"""Trains a small Transformer in Flax NNX, with Adam's moments in host memory.

Two lines change: `make_optimizer` in `lm_program.py` wraps the optimizer that
`nnx.Optimizer` is given in `oo.offload`, and `oo.jit` takes the place of `nnx.jit`. The
losses are those of `--nooffload`.

Run:
    python examples/train_nnx.py
"""

from collections.abc import Sequence

import jax
import lm_program
import numpy as np
from absl import app
from flax import nnx
from lm_data import VOCABULARY_SIZE
from lm_model import causal_attention, next_byte_loss
from lm_program import Settings

import optax_offload as oo


class Block(nnx.Module):
    """Causal attention, then an MLP, each on normalized features."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        width = settings.width
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            settings.heads,
            width,
            use_bias=False,
            decode=False,
            attention_fn=causal_attention,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.attention_norm(x))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A decoder that reads bytes and returns logits of the next ones."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        width = settings.width
        self.embedding = nnx.Embed(VOCABULARY_SIZE, width, rngs=rngs)
        self.layers = nnx.List(
            [Block(settings, rngs=rngs) for _ in range(settings.layers)]
        )
        self.final_norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.attend(self.final_norm(x))


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of a batch, in nats per byte."""
    return next_byte_loss(model(tokens[:, :-1]), tokens)


@oo.jit(donate_argnums=(0, 1))
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array
) -> jax.Array:
    """Updates the model and the optimizer, and returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    return loss


evaluation_step = oo.jit(loss_fn)


def train(
    settings: Settings, config: oo.OffloadConfig | None
) -> tuple[list[float], Transformer, nnx.Optimizer]:
    """Returns the loss of every step, and the model and optimizer after the last."""
    model = Transformer(settings, rngs=nnx.Rngs(settings.seed))
    tx = lm_program.make_optimizer(settings, config)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []
    for step, tokens in enumerate(lm_program.training_batches(settings), start=1):
        loss = train_step(model, optimizer, tokens)
        lm_program.log_loss(step, loss, settings)
        losses.append(loss)
    return [float(loss) for loss in losses], model, optimizer


def evaluate(model: Transformer, settings: Settings) -> float:
    """Returns the mean loss over the held-out text, in nats per byte."""
    batches = lm_program.held_out_batches(settings)
    return float(np.mean([evaluation_step(model, tokens) for tokens in batches]))


def main(argv: Sequence[str]) -> None:
    """Trains, evaluates, and says where everything is."""
    settings, config, plot = lm_program.read_flags(argv)
    losses, model, optimizer = train(settings, config)
    held_out_loss = evaluate(model, settings)
    lm_program.finish(losses, held_out_loss, optimizer.opt_state, config, plot)


if __name__ == "__main__":
    app.run(main)
