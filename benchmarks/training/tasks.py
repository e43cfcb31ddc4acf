"""Two small trainings on real data: a language model, and a network that denoises.

Their data ship with Python and with matplotlib. Last axes are multiples of 256, so that
every codec has blocks to encode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import linen as nn
from matplotlib import image

from examples import lm_data, lm_model

PATCH = 16
NOISE = 0.2


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train, and what shows how well.

    Attributes:
      model: The network.
      loss: The mean loss of a batch, given what the network makes of it.
      inputs: What the network reads of a batch.
      batches: Batches for so many steps, given a seed.
      held_out: The data that is not trained on, as batches of one size.
      steps: So many steps by default.
    """

    model: nn.Module
    loss: Callable[[Any, Any], jax.Array]
    inputs: Callable[[Any], Any]
    batches: Callable[[int, int], Iterator[Any]]
    held_out: Callable[[], list[Any]]
    steps: int


class Decoder(nn.Module):
    """A Transformer of one layer that reads bytes and returns logits of the next."""

    width: int = 256
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, name=name)

        embedding = nn.Embed(lm_data.VOCABULARY_SIZE, self.width, name="embedding")
        x = embedding(tokens)
        y = nn.RMSNorm(name="attention_norm")(x)
        # One matrix each: Flax's own attention has the features of a head as last axis.
        heads = (*x.shape[:-1], self.heads, self.width // self.heads)
        q, k, v = (dense(self.width, name)(y).reshape(heads) for name in "qkv")
        y = lm_model.causal_attention(q, k, v).reshape(x.shape)
        x += dense(self.width, "attention_out")(y)
        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.gelu(dense(2 * self.width, "mlp_in")(y))
        x += dense(self.width, "mlp_out")(y)
        return embedding.attend(nn.RMSNorm(name="final_norm")(x))


class Denoiser(nn.Module):
    """An MLP that takes the noise off a patch of an image."""

    width: int = 256

    @nn.compact
    def __call__(self, patch: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, name="in")(patch)
        for layer in range(2):
            x += nn.Dense(self.width, name=f"hidden{layer}")(nn.gelu(x))
        return nn.Dense(PATCH * PATCH, name="out")(nn.gelu(x))


def photograph() -> tuple[np.ndarray, np.ndarray]:
    """The channels of matplotlib's photograph, and those of its right quarter."""
    file = matplotlib.get_data_path() + "/sample_data/grace_hopper.jpg"
    pixels = np.asarray(image.imread(file), np.float32) / 255
    channels = np.moveaxis(pixels, -1, 0)
    border = channels.shape[-1] * 3 // 4
    return channels[..., :border], channels[..., border:]


def patches(channels: np.ndarray, count: int, generator: Any) -> Any:
    """Patches at random places, noisy and as they are, without their mean."""
    n, height, width = channels.shape
    at = [generator.integers(s, size=count) for s in (n, height - 15, width - 15)]
    rows, columns = (a[:, None] + np.arange(PATCH) for a in at[1:])
    clean = channels[at[0][:, None, None], rows[:, :, None], columns[:, None, :]]
    clean = clean.reshape(count, -1)
    clean = 4 * (clean - clean.mean(axis=-1, keepdims=True))
    noisy = clean + 4 * NOISE * generator.standard_normal(clean.shape, np.float32)
    return jnp.asarray(noisy), jnp.asarray(clean)


def patch_batches(steps: int, seed: int) -> Iterator[Any]:
    """Patches of three quarters of the photograph."""
    train, _ = photograph()
    generator = np.random.default_rng(seed)
    return (patches(train, 64, generator) for _ in range(steps))


def patch_held_out() -> list[Any]:
    """Patches of the other quarter."""
    _, held_out = photograph()
    generator = np.random.default_rng(10**6)
    return [patches(held_out, 512, generator) for _ in range(8)]


def text_held_out() -> list[jax.Array]:
    """The first windows of the held-out text."""
    text = lm_data.load_text().held_out
    return list(lm_data.held_out_batches(text, batch=32, context=64))[:8]


TASKS = {
    "text": Task(
        Decoder(),
        lm_model.next_byte_loss,
        lambda tokens: tokens[:, :-1],
        lambda steps, seed: lm_data.training_batches(
            lm_data.load_text().train, batch=4, context=64, steps=steps, seed=seed
        ),
        text_held_out,
        steps=400,
    ),
    "image": Task(
        Denoiser(),
        lambda guess, batch: jnp.mean((guess - batch[1]) ** 2),
        lambda batch: batch[0],
        patch_batches,
        patch_held_out,
        steps=1500,
    ),
}
