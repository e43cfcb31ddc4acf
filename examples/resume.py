"""Trains as `train_lm.py` does, and can be killed at any time.

It saves the state every `--save_every` steps with Orbax. Run the same command again,
and it continues from the newest checkpoint with the losses that it would have had.
Offloaded state is restored straight into host memory, because the template made by
`oo.eval_shape` says where every leaf belongs.

Run:
    python examples/resume.py
"""

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_program
import orbax.checkpoint as ocp
import train_lm
from absl import app, flags, logging
from flax.training.train_state import TrainState
from lm_program import Settings

import optax_offload as oo

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoints", "out/checkpoints", "Directory of the checkpoints.")
flags.DEFINE_integer("save_every", 20, "Steps between checkpoints.", lower_bound=1)

DIGESTS = "SHA256SUMS"


def digest(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_digests(checkpoint: Path) -> None:
    """Writes the digests of a checkpoint's files into it, as `sha256sum` does.

    Orbax does not see it when the numbers in a file have changed on disk.
    """
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    lines = [f"{digest(file)}  {file.relative_to(checkpoint)}\n" for file in files]
    partial = checkpoint / f"{DIGESTS}.partial"
    partial.write_text("".join(lines))
    os.replace(partial, checkpoint / DIGESTS)


def check_digests(checkpoint: Path) -> None:
    """Compares the files of a checkpoint with their digests, if it has any.

    There are none if the program was killed before it wrote them.

    Raises:
        RuntimeError: Files have changed or are gone.
    """
    digests = checkpoint / DIGESTS
    lines = digests.read_text().splitlines() if digests.exists() else []
    damaged = []
    for line in lines:
        known, name = line.split("  ", maxsplit=1)
        file = checkpoint / name
        if not file.exists() or digest(file) != known:
            damaged.append(str(file))
    if damaged:
        raise RuntimeError(
            f"damaged since it was saved: {', '.join(damaged)}. To go on from the "
            f"checkpoint before, if there is one: rm -r {checkpoint}"
        )


def save(manager: ocp.CheckpointManager, step: int, state: TrainState) -> None:
    """Saves, and returns when all is on disk."""
    manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    write_digests(Path(manager.directory) / str(step))


def restore(
    manager: ocp.CheckpointManager, settings: Settings, config: oo.OffloadConfig | None
) -> TrainState:
    """Returns the state of the newest checkpoint, or a new one."""
    step = manager.latest_step()
    if step is None:
        return train_lm.create_state(settings, config)
    check_digests(Path(manager.directory) / str(step))
    template = oo.eval_shape(lambda: train_lm.create_state(settings, config))
    state: Any = manager.restore(step, args=ocp.args.StandardRestore(template))
    return state


def main(argv: Sequence[str]) -> None:
    """Restores what is there, trains on, and saves."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells much of each save
    settings, config, plot = lm_program.read_flags(argv)
    directory = Path(FLAGS.checkpoints).absolute()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory, options=options) as manager:
        state = restore(manager, settings, config)
        start = int(state.step)
        print(f"at step {start}", flush=True)
        # The batches that are drawn first are those that have been seen.
        batches = itertools.islice(
            lm_program.training_batches(settings), start, settings.steps
        )
        for step, tokens in enumerate(batches, start=start + 1):
            state, loss = train_lm.train_step(state, tokens)
            lm_program.log_loss(step, loss, settings)
            if step % FLAGS.save_every == 0 or step == settings.steps:
                save(manager, step, state)
                print(f"saved step {step}", flush=True)

    print(f"held-out loss {train_lm.evaluate(state, settings):.4f} nats per byte")
    # The rules are those of the second part of the chain that `make_optimizer` makes.
    under = "opt_state/1" if config else ""
    report = oo.memory_report(state, config, under=under)
    print(report)
    plot.parent.mkdir(parents=True, exist_ok=True)
    report.plot(plot)
    print(f"where everything is: {plot}")
    if config is not None:
        report.check()


if __name__ == "__main__":
    app.run(main)
