"""Attention and the loss, which the models of the examples share.

Plain functions of arrays, so linen and NNX modules call the same ones.
"""

import jax
import jax.numpy as jnp
import optax


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, **_: object
) -> jax.Array:
    """Returns causal attention with rotary positions (arXiv:2104.09864).

    An `attention_fn` for the attention layers of Flax. They pass a mask, dropout and
    more along: nothing here uses it.

    Args:
        query: Of shape `(batch, bytes, heads, features)`, as `key` and `value`.
        key: What the queries are compared with.
        value: What is averaged.
    """
    return jax.nn.dot_product_attention(
        _rotate(query), _rotate(key), value, is_causal=True
    )


def _rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of features by angles that grow with the position."""
    pairs = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(pairs, dtype=x.dtype) / pairs)
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=x.dtype), frequencies)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    cosine, sine = cosine[None, :, None, :], sine[None, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], axis=-1
    )


def next_byte_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the bytes after the first, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()
