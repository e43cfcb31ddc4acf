"""tunix's `PeftTrainer`, over a base that qwix quantized and that rests on the host.

The trainer's step runs under `oo.jit`: `nnx.jit` would load all of the base at once.

Run, after pip install google-tunix:
    python examples/lora/tunix_peft.py
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

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


class Trainer(peft_trainer.PeftTrainer):
    """The trainer, jitting with `oo.jit`."""

    def jit_train_and_eval_step(
        self, skip_jit: bool = False, cache_nnx_graph: bool = False
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Returns the steps, of a batch."""
        step, evaluate = super().jit_train_and_eval_step(skip_jit=True)
        step = oo.jit(step, donate_argnums=(0, 1))
        return (
            functools.partial(step, self.model, self.optimizer),
            functools.partial(oo.jit(evaluate), self.model),
        )


x = jnp.ones((16, 128))
model = Model(nnx.Rngs(0))  # With the weights of a checkpoint.
provider = qwix.LoraProvider(
    module_path=".*", weight_qtype="nf4", tile_size=64, rank=8, alpha=8.0
)
model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))
oo.set_memory_kind(model, ".*/array/(qvalue|scale)", "pinned_host")

tx = oo.offload(optax.adamw(1e-2), oo.Rule(".*/(mu|nu)/.*", min_bytes=0))
config = peft_trainer.TrainingConfig(eval_every_n_steps=3, max_steps=3)
trainer = Trainer(model, tx, config)
trainer.with_loss_fn(lambda model, x: jnp.mean((model(x) - 1) ** 2))
trainer.with_gen_model_input_fn(lambda x: {"x": x})
batches = [jax.random.normal(jax.random.key(i), (16, 128)) for i in range(3)]
trainer.train(batches, eval_ds=batches, skip_jit=True)
history = trainer.metrics_logger.get_metric_history("", "loss", "train")
losses = [float(loss) for loss in history]
base = nnx.state(trainer.model, nnx.Not(nnx.LoRAParam))
print("losses", losses)
print(oo.memory_report(base))
