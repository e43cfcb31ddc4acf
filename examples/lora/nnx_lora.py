"""LoRA with Flax's own `nnx.LoRALinear`, over a base in host memory in NF4.

Run:
    python examples/lora/nnx_lora.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_offload as oo


class Block(nnx.Module):
    """A residual block, with adapters in both ways that Flax has."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.up = nnx.LoRALinear(128, 512, lora_rank=8, use_bias=False, rngs=rngs)
        down = nnx.Linear(512, 128, use_bias=False, rngs=rngs)
        self.down = nnx.LoRA(512, 8, 128, base_module=down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Blocks in a list."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.checkpoint(layer)(x)
        return x


model = Model(nnx.Rngs(0))  # With the weights of a checkpoint.
oo.place(model, oo.Rule(".*/kernel", codec="nf4", min_bytes=0))
tx = oo.offload(optax.adamw(1e-2), oo.Rule(".*/(mu|nu)/.*", min_bytes=0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
adapters = nnx.DiffState(0, nnx.LoRAParam)


@oo.jit(donate_argnums=(0, 1))
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """Updates the adapters and their state, and returns the loss."""

    def loss_fn(model: Model) -> jax.Array:
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
