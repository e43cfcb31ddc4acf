"""LoRA with qwix over scanned layers of Flax linen, whose base rests on the host.

Run, after pip install qwix:
    python examples/lora/qwix_linen.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix  # pyright: ignore[reportMissingImports]
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

import optax_offload as oo


class Block(nn.Module):
    """A residual block."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.gelu(nn.Dense(512, use_bias=False)(nn.RMSNorm()(x)))
        return x + nn.Dense(x.shape[-1], use_bias=False)(y), None


class Model(nn.Module):
    """Blocks in a scan."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        return layers(name="layers")(x, None)[0]


x = jnp.ones((16, 128))
weights = Model().init(jax.random.key(0), x)["params"]  # As a checkpoint has them.
provider = qwix.LoraProvider(
    module_path=".*", weight_qtype="nf4", tile_size=64, rank=8, alpha=8.0
)
model: Any = qwix.apply_lora_to_model(Model(), provider)
params = model.init(jax.random.key(1), x)["params"]
# qwix knows how to quantize one layer: of scanned ones, each by itself.
layer = jax.eval_shape(lambda p: jax.tree.map(lambda x: x[0], p), params["layers"])
quantize = jax.vmap(lambda weights: qwix.quantize_params(weights, layer))
base = flatten_dict({"layers": quantize(weights["layers"])})
base = oo.set_memory_kind(base, ".*/array/(qvalue|scale)", "pinned_host")
adapters = {k: v for k, v in flatten_dict(params).items() if "lora" in k[-1]}
adapters = jax.device_put(adapters, jax.devices()[0])
tx = oo.offload(optax.adamw(1e-2), oo.Rule(".*/(mu|nu)/.*", min_bytes=0))
opt_state = tx.init(adapters)


@oo.jit(donate_argnums=(0, 1))
def train_step(adapters: Any, opt_state: Any, base: Any, x: jax.Array) -> Any:
    """Returns new adapters and state, and the loss."""

    def loss_fn(adapters: Any) -> jax.Array:
        params = unflatten_dict(base | adapters)
        return jnp.mean((model.apply({"params": params}, x) - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(adapters)
    updates, opt_state = tx.update(grads, opt_state, adapters)
    return optax.apply_updates(adapters, updates), opt_state, loss


losses = []
for step in range(3):
    x = jax.random.normal(jax.random.key(step), (16, 128))
    adapters, opt_state, loss = train_step(adapters, opt_state, base, x)
    losses.append(float(loss))
print("losses", losses)
print(oo.memory_report(base))
