"""Trains `train_lm.py`'s model in the device memory of one of its layers.

The layers' parameters, Adam's moments and residuals rest in host memory. Three lines
differ from `train_lm.py`: one says which parameters rest there, and two jit with
`oo.jit`. The state is made one layer at a time. Half way it is saved, and restored
straight into host memory.

Run:
    python examples/one_layer.py
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import lm_program
import numpy as np
import orbax.checkpoint as ocp
import train_lm
from absl import app, flags, logging
from flax.training.train_state import TrainState
from lm_program import Settings

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_string("saved", "out/one_layer", "Directory of the checkpoint.")

LAYERS = "layers/.*"


def create_state(settings: Settings, config: oo.OffloadConfig | None) -> TrainState:
    """Returns a new state whose layers rest on the host."""
    state = train_lm.create_state(settings, config)
    return state.replace(params=oo.set_memory_kind(state.params, LAYERS, "pinned_host"))


train_step = oo.jit(train_lm.step_fn, donate_argnums=0, residuals="host")


@oo.jit
def evaluation_step(state: TrainState, tokens: jax.Array) -> jax.Array:
    """Returns the loss of a batch."""
    return train_lm.loss_fn(state.params, state, tokens)


def main(argv: Sequence[str]) -> None:
    """Makes the state, trains, saves, restores, trains on, and evaluates."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells much of each save.
    settings, config, _ = lm_program.read_flags(argv)
    state = oo.jit(lambda: create_state(settings, config))()
    batches = enumerate(lm_program.training_batches(settings), start=1)
    half = settings.steps // 2
    for step, tokens in itertools.islice(batches, half):
        state, loss = train_step(state, tokens)
        lm_program.log_loss(step, loss, settings)

    directory = Path(FLAGS.saved).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, state, force=True)
        checkpointer.wait_until_finished()
        template: Any = oo.eval_shape(lambda: create_state(settings, config))
        state = checkpointer.restore(directory, template)
    print(f"saved and restored step {int(state.step)}", flush=True)

    for step, tokens in batches:
        state, loss = train_step(state, tokens)
        lm_program.log_loss(step, loss, settings)
    held_out = lm_program.held_out_batches(settings)
    losses = [float(evaluation_step(state, tokens)) for tokens in held_out]
    print(f"held-out loss {np.mean(losses):.4f} nats per byte\n")
    print(train_step.schedule(state, next(lm_program.held_out_batches(settings))))
    print()
    print(oo.memory_report(state))


if __name__ == "__main__":
    app.run(main)
