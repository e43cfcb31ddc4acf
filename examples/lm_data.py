"""Text that ships with Python, byte by byte, to train a language model on.

The English is that of Python's own `help()` topics, the source that of its standard
library: both are real, and nothing is downloaded.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY_SIZE = 256


class Text(NamedTuple):
    """Two uint8 arrays, one value per byte of the text."""

    train: np.ndarray
    held_out: np.ndarray


def load_text(held_out_fraction: float = 0.1) -> Text:
    """Returns the help topics, the last part of their bytes held out."""
    return _split("\n\n".join(topics.values()), held_out_fraction)


def load_source(held_out_fraction: float = 0.1) -> Text:
    """Returns Python's modules from a to d, the last part of their bytes held out."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    source = "\n\n".join(module.read_text(encoding="utf-8") for module in modules)
    return _split(source, held_out_fraction)


def _split(whole: str, held_out_fraction: float) -> Text:
    # Some topics contain others whole: with each paragraph kept once, no paragraph
    # of the held-out text stands in the training text.
    paragraphs = dict.fromkeys(whole.split("\n\n"))
    text = np.frombuffer("\n\n".join(paragraphs).encode(), np.uint8)
    held_out_bytes = int(len(text) * held_out_fraction)
    return Text(train=text[:-held_out_bytes], held_out=text[-held_out_bytes:])


def training_batches(
    text: np.ndarray, *, batch: int, context: int, steps: int, seed: int
) -> Iterator[jax.Array]:
    """Yields `steps` batches of windows drawn at random.

    Each is int32 of shape `(batch, context + 1)`: `context` bytes to read, and for
    each of them the next one to guess.
    """
    generator = np.random.default_rng(seed)
    offsets = np.arange(context + 1)
    for _ in range(steps):
        starts = generator.integers(len(text) - context, size=(batch, 1))
        yield jnp.asarray(text[starts + offsets], jnp.int32)


def held_out_batches(
    text: np.ndarray, *, batch: int, context: int
) -> Iterator[jax.Array]:
    """Yields the text once through, in windows like those of `training_batches`.

    All batches have the same size, at most `batch`: windows that do not fill one more
    at the end are left out.
    """
    count = len(text) // (context + 1)
    windows = text[: count * (context + 1)].reshape(count, context + 1)
    batch = min(batch, count)
    for start in range(0, count - batch + 1, batch):
        yield jnp.asarray(windows[start : start + batch], jnp.int32)


def byte_frequency_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the loss of guessing each held-out byte by how often `train` has it.

    In nats per byte. Every count is one higher than seen, so that a byte `train` does
    not have costs a finite amount.
    """
    counts = np.bincount(train, minlength=VOCABULARY_SIZE) + 1
    return float(-np.log(counts / counts.sum())[held_out].mean())
