r"""What formats of state and parameters do to the loss, in two small trainings.

Adamw, with a schedule and clipping, and both moments in each codec; in *linear* 8 bits,
which the library has not, to show what the codecs are for; and parameters in bfloat16.
Each run is compared with the float32 run of its seed: the same parameters to begin with
and the same batches. How far apart runs end that differ in nothing that matters, shows
"float32, begun 1 % away": smaller differences mean nothing.

Runs that are finished are kept in `--runs` and not run again.

Run:
    JAX_PLATFORMS=cpu python -m benchmarks.training.low_bit
    JAX_PLATFORMS=cpu python -m benchmarks.training.low_bit --tasks=image \
        --seeds=1 --runs=out/tried --out=out/tried --picture=out/tried.png
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags
from matplotlib.figure import Figure

from benchmarks.common import command
from benchmarks.training.tasks import TASKS
from benchmarks.training.variants import VARIANTS, encoded_share

B2 = 0.999
# The highest of the schedule.
LEARNING_RATE = 2e-3
# How many points a curve has.
POINTS = 20
LEAST_ENCODED = 0.9
# Of float32's loss: what is worse is not compared with it.
DIVERGED = 10
# What a run says beside its losses: these are the same for all seeds.
SIZES = ("encoded_share", "parameter_bytes", "state_bytes_per_parameter")
# The curves of the picture; the tables have all variants.
DRAWN = (
    "float32, begun 1 % away",
    "int8",
    "bfloat16 parameters",
    "bfloat16 parameters, remainder, int8",
)

FLAGS = flags.FLAGS


@functools.cache
def program(task: str, variant: str, steps: int, b2: float = B2) -> Any:
    """What starts, what takes a step, and the loss: compiled once for all seeds."""
    work, way = TASKS[task], VARIANTS[variant]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, steps // 10, steps
    )
    adamw = way.optimizer(optax.adamw(schedule, b2=b2))
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return work.loss(
            work.model.apply({"params": params}, work.inputs(batch)), batch
        )

    def start(key: jax.Array, batch: Any) -> Any:
        params = work.model.init(key, work.inputs(batch))["params"]
        if way.perturbed:
            params = perturbed(params, jax.random.fold_in(key, 1))
        params = jax.tree.map(lambda p: p.astype(way.dtype), params)
        return params, tx.init(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(start), jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss_of)


def perturbed(params: Any, key: jax.Array) -> Any:
    """Each weight a hundredth part larger or smaller, or less than that."""
    structure = jax.tree.structure(params)
    keys = structure.unflatten(jax.random.split(key, structure.num_leaves))

    def near(p: Any, key: Any) -> Any:
        return p * (1 + 0.01 * jax.random.uniform(key, p.shape, minval=-1, maxval=1))

    return jax.tree.map(near, params, keys)


def run(
    task: str, variant: str, seed: int, steps: int, b2: float = B2
) -> dict[str, Any]:
    """Trains once; what it came to."""
    start, step, held_out_loss = program(task, variant, steps, b2)
    held_out = TASKS[task].held_out()
    params, state = start(jax.random.key(seed), held_out[0])
    share = encoded_share(state)
    assert not VARIANTS[variant].encoded or share >= LEAST_ENCODED, share
    curve: list[tuple[int, float]] = []
    started = time.perf_counter()
    for number, batch in enumerate(TASKS[task].batches(steps, seed), start=1):
        params, state = step(params, state, batch)
        if number % max(1, steps // POINTS) == 0:
            curve.append((number, float(held_out_loss(params, held_out[0]))))
    losses = [float(held_out_loss(params, batch)) for batch in held_out]
    count = sum(p.size for p in jax.tree.leaves(params))
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    return {
        "loss": statistics.fmean(losses),
        "curve": curve,
        "steps": steps,
        "encoded_share": share,
        "parameters": count,
        "state_bytes_per_parameter": nbytes / count,
        "parameter_bytes": jnp.dtype(VARIANTS[variant].dtype).itemsize,
        "seconds": time.perf_counter() - started,
    }


def finished(task: str, variant: str, seed: int) -> dict[str, Any]:
    """A run, from its file if it was run before."""
    steps = TASKS[task].steps
    b2 = "" if FLAGS.b2 == B2 else f"b2={FLAGS.b2}-"
    name = f"{task}-{steps}-{b2}{variant}-{seed}.json".replace(", ", "-")
    file = Path(FLAGS.runs) / name.replace(" ", "_")
    if not file.exists():
        found = run(task, variant, seed, steps, FLAGS.b2)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found) + "\n")
        print(f"{name}: {found['loss']:.4f} in {found['seconds']:.0f} s", flush=True)
    return json.loads(file.read_text())


def row(variant: str, runs: list[Any], references: list[Any]) -> dict[str, Any]:
    """What the runs of a variant came to, over float32's of the same seeds."""
    ratios = [a["loss"] / b["loss"] for a, b in zip(runs, references, strict=True)]
    diverged = not all(ratio < DIVERGED for ratio in ratios)  # NaN is not less.
    over = {"ratio": statistics.fmean, "least": min, "most": max}
    return {
        "variant": variant,
        "losses": [r["loss"] for r in runs],
        **{name: None if diverged else of(ratios) for name, of in over.items()},
        **{name: runs[0][name] for name in SIZES},
        "curves": [r["curve"] for r in runs],
    }


def print_table(task: str, rows: list[dict[str, Any]]) -> None:
    """Held-out losses, over float32's, and bytes; a dash where a run diverged."""
    figures = ("loss", "over", "least", "most", "encoded", "bytes", "of state")
    command.print_header((f"{task:56s}",), figures)
    for r in rows:
        rest = [r[name] for name in ("ratio", "least", "most", *SIZES)]
        found = (statistics.fmean(r["losses"]), *rest)
        command.print_row((f"{r['variant']:56s}",), found, digits=4)


def plot(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Writes the curves of some variants over float32's, a panel for each task."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for panel, (task, rows) in zip(panels, tables.items(), strict=True):
        reference = mean_curve(rows[0])
        for r in rows:
            if r["variant"] not in DRAWN:
                continue
            steps, losses = zip(*mean_curve(r), strict=True)
            over = [a / b for a, (_, b) in zip(losses, reference, strict=True)]
            panel.plot(steps, over, label=r["variant"])
        panel.axhline(1, color="lightgray", linewidth=0.8, zorder=0)
        panel.set(title=task, xlabel="step", ylim=(0.95, 1.1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="held-out loss over float32's")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", frameon=False, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def mean_curve(r: dict[str, Any]) -> list[tuple[int, float]]:
    """The mean of a variant's curves over its seeds."""
    points = zip(*r["curves"], strict=True)
    return [(p[0][0], statistics.fmean(loss for _, loss in p)) for p in points]


def main() -> None:
    """Trains what is not trained yet, and prints, writes and draws all of it."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for task in FLAGS.tasks:
        # All that there is of a seed first: what is stopped has something to show.
        seeds = [
            {variant: finished(task, variant, seed) for variant in VARIANTS}
            for seed in range(FLAGS.seeds)
        ]
        references = [runs["float32"] for runs in seeds]
        tables[task] = [
            row(variant, [runs[variant] for runs in seeds], references)
            for variant in VARIANTS
        ]
        print_table(task, tables[task])
    command.write(b2=FLAGS.b2, tasks=tables)
    plot(tables, Path(FLAGS.picture))


if __name__ == "__main__":
    flags.DEFINE_list("tasks", list(TASKS), "Of tasks.py.")
    flags.DEFINE_integer("seeds", 3, "Runs of each.")
    flags.DEFINE_float("b2", B2, "Of adamw: what remains of a second moment.")
    flags.DEFINE_string("runs", "out/low_bit", "Where finished runs are kept.")
    flags.DEFINE_string("picture", "docs/pictures/low-bits.png", "Of the curves.")
    command.run(main, out="benchmarks/results/low_bit")
