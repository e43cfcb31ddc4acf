"""LoRA with qwix over a Flax NNX model, whose base rests in host memory in NF4.

qwix quantizes the base, and adds adapters. One line moves the base to the host.

Run, after pip install qwix:
    python examples/lora/qwix_nnx.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx

import optax_offload as oo


class Block(nnx.Module):
    """A residual block."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.up = nnx.Linear(128, 512, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(512, 128, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Blocks in a list."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


x = jnp.ones((16, 128))
model = Model(nnx.Rngs(0))  # With the weights of a checkpoint.
provider = qwix.LoraProvider(
    module_path=".*", weight_qtype="nf4", tile_size=64, rank=8, alpha=8.0
)
model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))
oo.set_memory_kind(model, ".*/array/(qvalue|scale)", "pinned_host")
tx = oo.offload(optax.adamw(1e-2), oo.Rule(".*/(mu|nu)/.*", min_bytes=0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
adapters = nnx.DiffState(0, nnx.LoRAParam)


@oo.jit(donate_argnums=(0, 1))
def train_step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """Updates the adapters and their state, and returns the loss."""

    def loss_fn(model: Any) -> jax.Array:
        return jnp.mean((model(x) - 1) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn, argnums=adapters)(model)
    optimizer.update(model, grads)
    return loss


losses = []
for step in range(3):
    x = jax.random.normal(jax.random.key(step), (16, 128))
    losses.append(float(train_step(model, optimizer, x)))
base = nnx.state(model, nnx.Not(nnx.LoRAParam))
print("losses", losses)
print(oo.memory_report(base))
