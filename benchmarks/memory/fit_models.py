r"""The smallest target that known models fit: no offload, the usual recipe, and ours.

Full fine-tuning with Adam, of `examples/models.py`: parameters in bfloat16, float32
copies of them beside Adam's moments in the state, clipping by the global norm, remat on
each layer. Each target is compiled for, from the smallest on, until the step fits the
default budget of `optax_offload.plan`; a target whose memory is less than the
parameters, the gradients (of no fused step) and the state that stays is passed over.
What was compiled is kept beside the results, and is not compiled again (ours and fused
are, if the library has changed). Models called `..._lora` train adapters (LoRA) over a
frozen base, which "nf4 base" and "int8 base" keep in host memory in 4 and 8 bits.

With `--batch_on` it is the largest batch instead: as many sequences on each device of
these targets as fit the same budget.

Run (the second is one row):
    python -m benchmarks.memory.fit_models
    python -m benchmarks.memory.fit_models --models=llama3_8b --families=gpu \
        --modes=ours
    python -m benchmarks.memory.fit_models --models=llama3_8b --batch_on=h100
    python -m benchmarks.memory.fit_models --models=llama3_70b_lora --families=gpu \
        --modes="nf4 base" --context=2048
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

import optax_offload as oo
from benchmarks.common.steps import (
    MODES,
    USUAL_MODES,
    as_it_is,
    library_digest,
    step_in_mode,
)
from benchmarks.memory.search import Probe, largest
from examples import models
from optax_offload import _plan, aot

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["llama3_8b", "llama3_70b"], "Of examples/models.py.")
flags.DEFINE_list("families", ["gpu", "h100", "v5p", "v5e"], "Targets to go through.")
flags.DEFINE_list("modes", USUAL_MODES, f"Of {', '.join(MODES)}.")
flags.DEFINE_integer("context", 4096, "Tokens in a sequence, one on each device.")
flags.DEFINE_list("batch_on", [], "Targets to find the largest batch on.")
flags.DEFINE_string("out", "out/fit_models", "Where the .json goes.")

# From small to large.
TARGETS = {
    "gpu": ["rtx4090", "a100-40", "h100", "h200", "b200"],
    "h100": ["h100", "h100:2", "h100:4", "h100:8", "h100:16", "h100:32"],
    "v5e": ["v5e:1x1", "v5e:2x2", "v5e:2x4"],
    "v5p": ["v5p:1x1x1", "v5p:2x1x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"],
}
# Whatever the mode: a single chip for 8B, several for 70B.
ROWS = [
    ("llama3_8b", "gpu"),
    ("llama3_70b", "h100"),
    ("llama3_70b", "v5p"),
    ("gpt3_175b", "h100"),
    ("llama3_8b_lora", "gpu"),
    ("llama3_8b_lora", "v5e"),
    ("llama3_70b_lora", "gpu"),
    ("llama3_405b_lora", "gpu"),
]


class Prober:
    """Compiles steps, and remembers what they need."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, Any] = {}
        if path.exists():
            self.known = json.loads(path.read_text())

    def __call__(
        self, model: str, target: aot.Target, mode: str, batch: int = 1
    ) -> dict[str, Any]:
        """What a step needs, and whether that is known from compiling it."""
        key = json.dumps(
            [
                jax.__version__,
                library_digest(mode),
                *(model, target.name, mode, FLAGS.context, batch),
            ]
        )
        if key not in self.known:
            make_step = functools.partial(
                getattr(models, model), context=FLAGS.context, batch=batch
            )
            self.known[key] = probe(make_step, target, mode)
            self.path.write_text(json.dumps(self.known, indent=1) + "\n")
        found = self.known[key]
        sign = "" if "used_bytes" in found else "at least "
        print(
            f"  {model} {mode} on {target.name}, {batch} x {FLAGS.context} tokens: "
            f"{sign}{needed(found) / 2**30:.1f} of "
            f"{_plan.default_budget_bytes(target) / 2**30:.1f} GiB "
            f"({found['seconds']:.0f} s)",
            flush=True,
        )
        return found


def needed(found: dict[str, Any]) -> int:
    """The bytes that a step needs, or the least that it does."""
    return found.get("used_bytes") or found["least_bytes"]


def probe(make_step: Any, target: aot.Target, mode: str) -> dict[str, Any]:
    """Compiles a step, unless it is plain that it cannot fit."""
    budget = _plan.default_budget_bytes(target)
    wrap = MODES[mode]
    step = step_in_mode(make_step, target, wrap)
    least = least_bytes(step, gradients=wrap.step is as_it_is)
    if least > budget:
        return {"least_bytes": least, "fits": False, "seconds": 0.0}
    started = time.perf_counter()
    try:
        compiled = _plan.compile_step(step, target)
        peak, modelled = aot.peak(compiled), aot.step_time(compiled, target).seconds
        used, host = peak.peak_bytes, peak.host_peak_bytes
    except aot.DoesNotFitError as error:
        used, host, modelled = error.used_bytes, None, None
    return {
        "used_bytes": used,
        "host_bytes": host,
        "step_seconds": modelled,
        "fits": used <= budget,
        "seconds": time.perf_counter() - started,
    }


def least_bytes(step: oo.Step, gradients: bool) -> int:
    """Arguments in device memory, and gradients if any: as much as parameters."""
    params, *rest = step.args

    def on_device(tree: Any) -> int:
        rows = oo.memory_report(tree).rows
        return sum(r.nbytes_per_device for r in rows if r.actual == "device")

    return (1 + gradients) * on_device(params) + on_device(rest)


def smallest(prober: Prober, model: str, family: str, mode: str) -> dict[str, Any]:
    """The first target that a model fits."""
    for name in TARGETS[family]:
        target = aot.Target(name)
        found = prober(model, target, mode)
        if found["fits"]:
            return {"target": name, "devices": target.device_count, **found}
    return {"target": None}


def largest_batch(prober: Prober, model: str, name: str, mode: str) -> dict[str, Any]:
    """The most sequences on each device of a target."""
    target = aot.Target(name)
    budget = _plan.default_budget_bytes(target)

    def probe(batch: int) -> Probe:
        found = prober(model, target, mode, batch)
        return Probe(found["fits"], needed(found), found["seconds"])

    if not probe(1).fits:
        return {"target": name, "batch": 0}
    # Of one sequence some is there whatever their number; the search corrects that.
    batch = largest(probe, budget, first=8)
    return {"target": name, "batch": batch, **prober(model, target, mode, batch)}


def print_batches(prober: Prober) -> list[dict[str, Any]]:
    """Finds the largest batches, and prints them."""
    rows = []
    for model in FLAGS.models:
        for name in FLAGS.batch_on:
            for mode in FLAGS.modes:
                row = {"model": model, "mode": mode}
                row |= largest_batch(prober, model, name, mode)
                rows.append(row)
                gib = row.get("used_bytes", 0) / 2**30
                print(
                    f"{model:12s} {name:9s} {mode:15s} {row['batch']:4d} sequences on "
                    f"each device, {row['batch'] * FLAGS.context} tokens, {gib:.1f} GiB"
                )
    return rows


def print_targets(prober: Prober) -> list[dict[str, Any]]:
    """Finds the smallest target of each row, and prints the table."""
    rows = []
    for model, family in ROWS:
        if model not in FLAGS.models or family not in FLAGS.families:
            continue
        for mode in FLAGS.modes:
            row = {"model": model, "family": family, "mode": mode}
            rows.append(row | smallest(prober, model, family, mode))
    print(
        f"\n{'model':16s} {'among':6s} {'mode':15s} smallest      GiB of it, on host, "
        "modelled seconds"
    )
    for row in rows:
        sizes = [row.get(k) for k in ("used_bytes", "host_bytes")]
        figures = [None if n is None else n / 2**30 for n in sizes]
        figures.append(row.get("step_seconds"))
        shown = ["      -" if x is None else f"{x:7.2f}" for x in figures]
        name = row["target"] or "none of these"
        start = f"{row['model']:16s} {row['family']:6s} {row['mode']:15s} {name:13s}"
        print(start, *shown)
    return rows


def main(argv: Sequence[str]) -> None:
    """Finds the smallest targets, or the largest batches."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    out = Path(FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    prober = Prober(out.with_suffix(".probes.json"))
    rows = print_batches(prober) if FLAGS.batch_on else print_targets(prober)
    table = {"jax": jax.__version__, "context": FLAGS.context, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"also in {out}.json")


if __name__ == "__main__":
    app.run(main)
