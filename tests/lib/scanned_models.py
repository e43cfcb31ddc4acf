"""Small models of scanned layers, and training them fused and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import EVERYTHING, committed, plain
from jax import lax

import optax_offload as oo

LAYERS = 4
BATCH = jnp.arange(8) * 5 % 32
DONATED: dict[str, Any] = {"donate_argnums": (0, 1)}


def make_params() -> Any:
    """Stacked layers, and an embedding and a head outside of them."""
    shapes = {
        "embedding": (32, 16),
        "head": (16, 32),
        "layers": {"in": (LAYERS, 16, 24), "out": (LAYERS, 24, 16)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [jax.random.normal(k, s) / 4 for k, s in zip(keys, leaves, strict=True)]
    return committed(jax.tree.unflatten(treedef, made))


def layer(h: Any, w: Any) -> tuple[Any, Any]:
    """One layer, as the body of a scan."""
    return h + jnp.tanh(h @ w["in"]) @ w["out"], None


def scanned(h: Any, layers: Any) -> Any:
    """All layers."""
    return lax.scan(layer, h, layers)[0]


def loss_with(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss, given what applies the layers to hidden values."""

    def loss(params: Any, tokens: Any) -> Any:
        h = apply(params["embedding"][tokens], params["layers"])
        return 4 * jnp.mean((h @ params["head"] - jax.nn.one_hot(tokens, 32)) ** 2)

    return loss


loss = loss_with(scanned)


def make_step(tx: Any, loss: Any = loss) -> Callable[..., Any]:
    """A train step: gradients, update, parameters."""
    tx = optax.with_extra_args_support(plain(tx))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(
            grads,
            state,
            params,
            value=value,
            grad=grads,
            value_fn=lambda p: loss(p, tokens),
        )
        return optax.apply_updates(params, updates), state, value

    return step


def offloaded(tx: Any) -> Any:
    """With all state in host memory."""
    return oo.offload(plain(tx), EVERYTHING)


def train(
    step: Any, tx: Any, params: Any = None, batch: Any = BATCH, steps: int = 5
) -> Any:
    """The results of the last of some steps, jitted already."""
    params = make_params() if params is None else jax.tree.map(jnp.copy, params)
    state, rest = committed(jax.jit(plain(tx).init)(params)), []
    for _ in range(steps):
        params, state, *rest = step(params, state, batch)
    return params, state, *rest
