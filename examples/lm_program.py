"""Code around the training loops of the language model examples.

It has the flags, the optimizer, the progress bar, and the report at the end.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import lm_data
import optax
from absl import app, flags
from rich import progress

import optax_offload as oo

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of a model and of its training."""

    steps: int = 150
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 8
    learning_rate: float = 2e-3
    log_every: int = 20
    seed: int = 0


FLAGS = flags.FLAGS
flags.DEFINE_string(
    "config",
    "configs/adam_moments.toml",
    "Rule file: which optimizer state goes to host memory. Relative to the current "
    "directory, or else to the repository.",
)
flags.DEFINE_bool("offload", True, "Keep optimizer state in host memory.")
flags.DEFINE_string(
    "plot",
    None,
    "PNG file for the plot of the losses [default: out/<name of the program>.png].",
)
flags.DEFINE_integer("steps", Settings.steps, "Training steps.", lower_bound=1)
flags.DEFINE_integer("layers", Settings.layers, "Transformer blocks.", lower_bound=1)
flags.DEFINE_integer("width", Settings.width, "Features per byte.", lower_bound=1)
flags.DEFINE_integer("heads", Settings.heads, "Attention heads.", lower_bound=1)
flags.DEFINE_integer("context", Settings.context, "Bytes in a window.", lower_bound=1)
flags.DEFINE_integer("batch", Settings.batch, "Windows in a batch.", lower_bound=1)
flags.DEFINE_float(
    "learning_rate", Settings.learning_rate, "Learning rate after the warmup, its peak."
)
flags.DEFINE_integer(
    "log_every", Settings.log_every, "Steps between printed losses.", lower_bound=1
)
flags.DEFINE_integer("seed", Settings.seed, "Seed of the parameters and the batches.")


def read_flags(
    argv: Sequence[str],
) -> tuple[Settings, oo.OffloadConfig | None, Path]:
    """Returns the settings, the rules (None with `--nooffload`), and the plot's path.

    Args:
        argv: What absl leaves of the command line: the name of the program.
    """
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(FLAGS, name) for name in names})
    config = load_config(FLAGS.config) if FLAGS.offload else None
    plot = Path(FLAGS.plot or f"out/{Path(argv[0]).stem}.png")
    return settings, config, plot


def load_config(path: str) -> oo.OffloadConfig:
    """Reads a rule file, looked for here first and then in the repository."""
    return oo.load_config(path if Path(path).exists() else REPOSITORY / path)


def make_optimizer(
    settings: Settings, config: oo.OffloadConfig | None
) -> optax.GradientTransformation:
    """Returns clipped AdamW, its state where `config` says."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=settings.steps // 10,
        decay_steps=settings.steps,
    )
    optimizer = optax.adamw(schedule)
    if config is not None:
        optimizer = oo.offload(optimizer, config)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def training_batches(
    settings: Settings, text: lm_data.Text | None = None
) -> Iterable[jax.Array]:
    """Yields the batches of a training, with a progress bar if a person looks on.

    Args:
        settings: The sizes.
        text: The text; by default the help topics, as for those below.
    """
    batches = lm_data.training_batches(
        (text or lm_data.load_text()).train,
        batch=settings.batch,
        context=settings.context,
        steps=settings.steps,
        seed=settings.seed,
    )
    return progress.track(
        batches,
        description="training",
        total=settings.steps,
        disable=not sys.stdout.isatty(),
    )


def held_out_batches(
    settings: Settings, text: lm_data.Text | None = None
) -> Iterator[jax.Array]:
    """Yields the held-out text once through."""
    held_out = (text or lm_data.load_text()).held_out
    return lm_data.held_out_batches(
        held_out, batch=settings.batch, context=settings.context
    )


def log_loss(step: int, loss: jax.Array, settings: Settings) -> None:
    """Prints the loss of the first, the last, and every `log_every`-th step."""
    # Only a printed loss is read back: any other need not be there yet when the next
    # step is started.
    if step in (1, settings.steps) or step % settings.log_every == 0:
        print(f"step {step:5d}  loss {float(loss):.4f}", flush=True)


def save_plot(
    path: Path, losses: Sequence[float], held_out_loss: float, frequency_loss: float
) -> None:
    """Writes the losses of all steps, beside the two of the held-out text, as PNG."""
    # Not needed to compile a step or to train, and not always installed where that is.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=1, label="training batch")
    axes.plot(len(losses), held_out_loss, "o", label="held-out text")
    axes.axhline(frequency_loss, color="gray", linestyle="--", label="byte frequencies")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def finish(
    losses: Sequence[float],
    held_out_loss: float,
    opt_state: Any,
    config: oo.OffloadConfig | None,
    plot: Path,
) -> None:
    """Prints the held-out loss, saves the plot, and reports where the state is.

    Raises:
        optax_offload.MemoryKindError: The state is not where `config` wants it.
    """
    frequency_loss = lm_data.byte_frequency_loss(*lm_data.load_text())
    print(f"held-out loss {held_out_loss:.4f} nats per byte")
    print(f"guessing by byte frequencies gives {frequency_loss:.4f}")
    save_plot(plot, losses, held_out_loss, frequency_loss)
    print(f"plot of the losses: {plot}\n")

    report = oo.memory_report(opt_state, config)
    print(report)
    if config is not None:
        report.check()
