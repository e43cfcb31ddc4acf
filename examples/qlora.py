"""Trains adapters over `train_lm.py`'s model, which rests in host memory in 4 bits.

The model first learns English from Python's help topics. Then its matrices are frozen
in NF4 (QLoRA, arXiv 2305.14314), and two small matrices beside each learn to continue
Python's source. The same adapters are trained over the matrices in bfloat16, to see
what 4 bits cost. Half way all is saved and restored. In the end the adapters are
merged, and the step is compiled for two chips that are not attached.

Run:
    python examples/qlora.py
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lm_data
import lm_program
import numpy as np
import optax
import orbax.checkpoint as ocp
import train_lm
from absl import app, flags, logging
from flax import linen as nn
from flax import traverse_util
from flax.training.train_state import TrainState
from lm_model import next_byte_loss
from lm_program import Settings

import optax_offload as oo
from optax_offload import aot

FLAGS = flags.FLAGS
FLAGS.set_default("chips", ["rtx4090", "v5e:1x1"])
FLAGS.set_default("steps", 100)
flags.DEFINE_integer("adapter_steps", 60, "Steps of the adapters.", lower_bound=2)
flags.DEFINE_string("saved", "out/qlora", "Directory of the checkpoint.")

RANK = 8
MIB = 2**20
# The rules for each base. Norms and the embedding, which is the head too, are in none.
BASES: dict[str, Any] = {
    "bfloat16": (),
    "nf4": oo.Rule("layers/.*/kernel", codec="nf4", min_bytes=0),
}
# Adapters are small, and so are their moments: all of these rest on the host.
MOMENTS = oo.Rule(".*/(mu|nu)/.*", min_bytes=0)


class Losses(NamedTuple):
    """Losses over held-out source, in nats per byte."""

    before: float
    after: float
    merged: float


def add_adapter(
    call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> jax.Array:
    """Adds to the result of a dense layer that of two small matrices.

    Linen calls it in the place of each module's method (`nn.intercept_methods`).
    """
    y = call(*args, **kwargs)
    dense = context.module
    if not isinstance(dense, (nn.Dense, nn.DenseGeneral)):
        return y
    x = args[0].reshape(*args[0].shape[:2], -1)
    outputs = math.prod(y.shape[2:])
    a = dense.param("lora_a", nn.initializers.he_uniform(), (x.shape[-1], RANK))
    b = dense.param("lora_b", nn.initializers.zeros, (RANK, outputs))
    return y + (x @ a @ b).reshape(y.shape)


def is_adapter(path: Sequence[str]) -> bool:
    """Returns whether a parameter is one of those that `add_adapter` makes."""
    return path[-1] in ("lora_a", "lora_b")


def create_state(settings: Settings) -> TrainState:
    """Returns new adapters, and the state of their optimizer."""
    model = train_lm.Transformer(settings)
    tokens = jnp.zeros((1, settings.context), jnp.int32)
    with nn.intercept_methods(add_adapter):
        params = model.init(jax.random.key(settings.seed), tokens)["params"]
    flat = traverse_util.flatten_dict(params)
    adapters = {path: x for path, x in flat.items() if is_adapter(path)}
    return TrainState.create(
        apply_fn=model.apply,
        params=traverse_util.unflatten_dict(adapters),
        tx=oo.offload(optax.adamw(settings.learning_rate), MOMENTS),
    )


def loss_fn(
    adapters: Mapping[str, Any],
    base: Mapping[str, Any],
    state: TrainState,
    tokens: jax.Array,
) -> jax.Array:
    """Returns the mean loss of a batch, in nats per byte."""
    flat = traverse_util.flatten_dict(base) | traverse_util.flatten_dict(adapters)
    params = traverse_util.unflatten_dict(flat)
    with nn.intercept_methods(add_adapter):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
    return next_byte_loss(logits, tokens)


def step_fn(
    state: TrainState, base: Mapping[str, Any], tokens: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Returns the state after one update of the adapters, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_fn)(state.params, base, state, tokens)
    return state.apply_gradients(grads=gradients), loss


train_step = oo.jit(step_fn, donate_argnums=0)


@oo.jit
def evaluation_step(
    state: TrainState, base: Mapping[str, Any], tokens: jax.Array
) -> jax.Array:
    """Returns the loss of a batch."""
    return loss_fn(state.params, base, state, tokens)


def train(
    state: TrainState, base: Any, batches: Iterable[jax.Array], settings: Settings
) -> TrainState:
    """Returns the state after one step for each batch."""
    for step, tokens in enumerate(batches, start=int(state.step) + 1):
        state, loss = train_step(state, base, tokens)
        lm_program.log_loss(step, loss, settings)
    return state


def evaluate(
    state: TrainState, base: Any, settings: Settings, source: lm_data.Text
) -> float:
    """Returns the mean loss over held-out source, in nats per byte."""
    batches = lm_program.held_out_batches(settings, source)
    return float(np.mean([evaluation_step(state, base, x) for x in batches]))


def in_bfloat16(params: Any) -> Any:
    """Returns parameters with matrices of bfloat16, or structs of such ones."""

    def cast(path: tuple[Any, ...], x: Any) -> Any:
        if path[-1] != "kernel":
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.bfloat16)
        return x.astype(jnp.bfloat16)

    return traverse_util.path_aware_map(cast, params)


def save_and_restore(
    state: TrainState, base: Any, rules: Any, settings: Settings
) -> tuple[TrainState, Any]:
    """Saves adapters, their state and the base, and returns what a restart reads."""
    directory = Path(FLAGS.saved).absolute()
    params = oo.eval_shape(lambda: train_lm.create_state(settings, None)).params
    template = {
        "state": oo.eval_shape(lambda: create_state(settings)),
        "base": oo.place(in_bfloat16(params), rules),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, {"state": state, "base": base}, force=True)
        checkpointer.wait_until_finished()
        saved: Any = checkpointer.restore(directory, template)
    print(f"saved and restored step {int(saved['state'].step)}", flush=True)
    return saved["state"], saved["base"]


def merge(adapters: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the base with the products of the adapters added, for the plain model."""
    decoded = oo.low_bit_decode(base)
    decoded = jax.device_put(decoded, jax.memory.Space.Device)
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(decoded)
    low: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(adapters)
    for *layer, name in low:
        if name == "lora_a":
            kernel = flat[*layer, "kernel"]
            product = low[*layer, "lora_a"] @ low[*layer, "lora_b"]
            merged = kernel + product.reshape(kernel.shape)
            flat[*layer, "kernel"] = merged.astype(kernel.dtype)
    return traverse_util.unflatten_dict(flat)


def adapt(
    name: str, trained: TrainState, base: Any, settings: Settings
) -> tuple[dict[str, Any], Losses]:
    """Returns a base with the state of adapters trained over it, and the losses."""
    print(f"\nadapters over a base in {name}", flush=True)
    source = lm_data.load_source(held_out_fraction=0.01)
    state = oo.jit(lambda: create_state(settings))()
    before = evaluate(state, base, settings, source)
    batches = iter(lm_program.training_batches(settings, source))
    first = itertools.islice(batches, settings.steps // 2)
    state = train(state, base, first, settings)
    state, base = save_and_restore(state, base, BASES[name], settings)
    state = train(state, base, batches, settings)
    after = evaluate(state, base, settings, source)
    merged = trained.replace(params=merge(state.params, base))
    merged_loss = train_lm.evaluate(merged, settings, source)
    return {"base": base, "state": state}, Losses(before, after, merged_loss)


def table(losses: Mapping[str, Losses]) -> str:
    """A column for each base."""
    rows = ["held-out source  " + "".join(f"{name:>10s}" for name in losses)]
    for name in Losses._fields:
        cells = (f"{getattr(column, name):10.4f}" for column in losses.values())
        rows.append(f"{name:17s}{''.join(cells)}")
    return "\n".join(rows)


def report_chips(trees: Mapping[str, dict[str, Any]], settings: Settings) -> None:
    """Prints what the step takes on chips, or says in one line why it does not."""
    if not FLAGS.chips:
        return
    print(f"\ncompiling this step for {' and '.join(FLAGS.chips)}:", flush=True)
    shape = settings.batch, settings.context + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    rows = ["a step    base      device, MiB   host, MiB    modeled, ms"]
    for chip, (name, tree) in itertools.product(FLAGS.chips, trees.items()):
        target, args = aot.Target(chip), (tree["state"], tree["base"], tokens)
        try:
            compiled = aot.compile(train_step, *args, target=target)
        except (ImportError, OSError, RuntimeError) as error:  # No compiler, or memory.
            print(f"not compiled: {str(error).splitlines()[0]}")
            return
        peak, time = aot.peak(compiled), aot.step_time(compiled, target)
        rows.append(
            f"{chip:10s}{name:10s}{peak.peak_bytes / MIB:11.2f}"
            f"{peak.host_peak_bytes / MIB:12.2f}{1000 * time.seconds:15.2f}"
        )
    print("\n".join(rows))


def main(argv: Sequence[str]) -> None:
    """Trains a base, freezes it, trains adapters, merges, and says where all is."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells much of each save.
    settings, config, _ = lm_program.read_flags(argv)
    _, trained = train_lm.train(settings, config)
    plain = in_bfloat16(trained.params)
    bases = {name: oo.place(plain, rules) for name, rules in BASES.items()}

    settings = dataclasses.replace(settings, steps=FLAGS.adapter_steps)
    trees: dict[str, dict[str, Any]] = {}
    losses: dict[str, Losses] = {}
    for name, base in bases.items():
        trees[name], losses[name] = adapt(name, trained, base, settings)
    print(f"\n{table(losses)}\n")
    print(oo.memory_report(trees["nf4"]))
    report_chips(trees, settings)


if __name__ == "__main__":
    app.run(main)
