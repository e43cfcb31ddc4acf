r"""Peaks of whole steps, and what fits, by compiling for chips that need not be here.

What is compiled is in the ways of `common/steps.py`, which `--modes` names. `--find`:

- `peak`: the memory of each workload, in MiB. `saved` is the share of what moved by
  which the peak is lower than that of "no offload"; `ms` the modeled time of a step;
  `floor` its ratio to the longer of its computation and the busier direction of the
  link; `CPU s` what tracing, lowering and compiling took.
- `least`: the least device memory that it compiles for, by bisection. Short of memory a
  compiler trades time for it, so the peak on a roomy chip says less about what fits.
- `layers`: how many layers of the scanned decoder fit a target, of width 2048.
- `target`: the smallest target that a model of `examples/models.py` fits, with all
  parameters trained (or adapters, of one that is called `..._lora`), one sequence on
  each device. It fits if it is within the default budget of `optax_offload.plan`.

What was compiled is kept beside the results, and is not compiled again while JAX, the
workloads and (of modes in which it has a part) the library are the same.

Run:
    python -m benchmarks.memory.peaks
    python -m benchmarks.memory.peaks --workloads=gated --targets=h100
    python -m benchmarks.memory.peaks --find=least --workloads=leaves,stacked,tutorial
    python -m benchmarks.memory.peaks --find=layers --targets=h100,v5e:1x1
    python -m benchmarks.memory.peaks --find=target --models=llama3_70b_lora:gpus \
        --modes="nf4 base" --context=2048
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

import optax_offload as oo
from benchmarks.common import command
from benchmarks.common.steps import (
    MODES,
    USUAL_MODES,
    bytes_on_device,
    compile_step,
    digest,
    step_in_mode,
)
from benchmarks.common.turns import clocked
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS
from benchmarks.memory.search import largest
from examples import models
from optax_offload import _plan, aot
from optax_offload._ground.units import GIB, MIB

FLAGS = flags.FLAGS
Probe = dict[str, Any]
WIDTH = 2048
# The part that the least memory may be off by.
TOLERANCE = 0.01
# From small to large.
FAMILIES = {
    "gpus": ["rtx4090", "a100-40", "h100", "h200", "b200"],
    "h100s": ["h100", "h100:2", "h100:4", "h100:8", "h100:16", "h100:32"],
    "v5es": ["v5e:1x1", "v5e:2x2", "v5e:2x4"],
    "v5ps": ["v5p:1x1x1", "v5p:2x1x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"],
}


class Prober:
    """Compiles steps, and remembers what they need."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, Probe] = {}
        if path.exists():
            self.known = json.loads(path.read_text())

    def __call__(self, name: str, target: aot.Target, mode: str, **sizes: int) -> Probe:
        """What a workload or a model needs, and whether it fits."""
        of = (name, target.name, target.memory_bytes, mode, sizes)
        key = json.dumps([jax.__version__, digest(mode), *of])
        if key not in self.known:
            found, seconds, _ = clocked(compiled, name, target, mode, sizes)
            self.known[key] = found | {"seconds": seconds}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1) + "\n")
        found = self.known[key]
        numbers = ", ".join(f"{n} {what}" for what, n in sizes.items())
        print(
            f"  {name} {mode} on {target.name} {numbers}: "
            f"{'' if found['compiled'] else 'at least '}"
            f"{found['used_bytes'] / GIB:.2f} of {target.memory_bytes / GIB:.2f} GiB"
            f"{'' if found['fits'] else ': does not fit'} ({found['seconds']:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        return found


def compiled(name: str, target: aot.Target, mode: str, sizes: dict[str, int]) -> Probe:
    """Compiles a step, unless it is plain that it cannot fit."""
    is_model = name not in WORKLOADS
    budget = _plan.default_budget_bytes(target) if is_model else None
    found: Probe = {"compiled": True, "fits": True}
    try:
        if is_model:
            step = model_step(name, target, mode, sizes)
            least = least_bytes(step, gradients=MODES[mode].streamed is None)
            if budget is not None and least > budget:
                return {"compiled": False, "fits": False, "used_bytes": least}
            making = functools.partial(
                aot.compile,
                step.fn,
                *step.args,
                target=target,
                donate_argnums=step.donate_argnums,
                out_shardings=step.out_shardings,
            )
        else:
            of = (WORKLOADS[name](**sizes), target, MODES[mode])
            making = functools.partial(compile_step, *of)
        program, _, found["cpu_seconds"] = clocked(making)
        took = aot.step_time(program, target)
        found |= {"step_seconds": took.seconds, "over_floor": took.over_floor}
        peak: aot.Peak | None = aot.peak(program)
        used = peak.peak_bytes
    except aot.DoesNotFitError as error:
        peak, used = error.peak, error.used_bytes
        found["fits"] = False
    if budget is not None:
        found["fits"] = used <= budget
    if peak is not None:
        for part in ("temporary", "host_argument", "host_temporary", "host_peak"):
            found[f"{part}_bytes"] = getattr(peak, f"{part}_bytes")
    return found | {"used_bytes": used}


def model_step(name: str, target: aot.Target, mode: str, sizes: Any) -> oo.Step:
    """The step of a model of `examples/models.py` in a mode."""
    make_step = functools.partial(getattr(models, name), **sizes)
    return step_in_mode(make_step, target, MODES[mode])


def least_bytes(step: oo.Step, gradients: bool) -> int:
    """Arguments in device memory, and gradients if any: as much as parameters."""
    params, *rest = step.args
    return (1 + gradients) * bytes_on_device(params) + bytes_on_device(rest)


def named_targets() -> list[aot.Target]:
    """Those of the flags."""
    gib = FLAGS.memory_gib
    memory_bytes = None if gib is None else int(gib * GIB)
    return [aot.Target(name, memory_bytes=memory_bytes) for name in FLAGS.targets]


def find_peaks(prober: Prober) -> Iterator[dict[str, Any]]:
    """The peaks of each workload and target, in MiB."""
    figures = ("peak", "host", "host temp", "saved", "ms", "floor", "CPU s")
    command.print_header(("workload", "target", "mode"), figures)
    for name, target in itertools.product(FLAGS.workloads, named_targets()):
        plain = None
        for mode in FLAGS.modes:
            found = prober(name, target, mode)
            plain = found["used_bytes"] if mode == "no offload" else plain
            moved = found.get("host_argument_bytes")
            saved = None
            if plain is not None and moved:
                saved = (plain - found["used_bytes"]) / moved
            host = [found.get(f"host_{x}_bytes") for x in ("argument", "temporary")]
            mib = [None if n is None else n / MIB for n in (found["used_bytes"], *host)]
            ms = found.get("step_seconds", math.nan) * 1e3
            took = (ms, found.get("over_floor"), found.get("cpu_seconds"))
            command.print_row((name, target.name, mode), (*mib, saved, *took))
            row = {"workload": name, "target": target.name, "mode": mode}
            yield row | found | {"saved": saved}


def find_least(prober: Prober) -> Iterator[dict[str, Any]]:
    """The least memory that compiles and the most that does not, in MiB."""
    command.print_header(("workload", "target", "mode"), ("fits", "does not"))
    for name, target, mode in itertools.product(
        FLAGS.workloads, FLAGS.targets, FLAGS.modes
    ):
        roomy = prober(name, aot.Target(target), mode)
        if not roomy["fits"]:
            raise ValueError(f"{name} does not fit {target!r}; take a larger chip")
        # What a compiler reports and what it asks for are not the same to the byte.
        fits, too_little = int(roomy["used_bytes"] * 1.05), 0
        while fits - too_little > TOLERANCE * fits:
            tried = (fits + too_little) // 2
            if prober(name, aot.Target(target, memory_bytes=tried), mode)["fits"]:
                fits = tried
            else:
                too_little = tried
        command.print_row((name, target, mode), (fits / MIB, too_little / MIB))
        row = {"workload": name, "target": target, "mode": mode}
        yield row | {"fits_bytes": fits, "too_little_bytes": too_little}


def find_layers(prober: Prober) -> Iterator[dict[str, Any]]:
    """The largest decoders, in layers and billions of parameters."""
    make = WORKLOADS["decoder_scanned"]
    command.print_header(("target", "mode"), ("layers", "billions"))
    for target, mode in [(t, m) for t in named_targets() for m in FLAGS.modes]:

        def probe(layers: int, of: Any = (target, mode)) -> tuple[bool, int]:
            found = prober("decoder_scanned", *of, width=WIDTH, layers=layers)
            return found["fits"], found["used_bytes"]

        layers = largest(probe, target.memory_bytes, first=16)
        work = make(layers=max(layers, 1), width=WIDTH)
        count = sum(p.size for p in jax.tree.leaves(work.params)) * bool(layers)
        command.print_row((target.name, mode), (layers, count / 1e9))
        row = {"target": target.name, "mode": mode}
        yield row | {"layers": layers, "parameters": count}


def find_target(prober: Prober) -> Iterator[dict[str, Any]]:
    """The smallest targets, with GiB of the device and host, and modeled seconds."""
    command.print_header(("model", "mode", "target"), ("GiB", "on host", "seconds"))
    for named, mode in itertools.product(FLAGS.models, FLAGS.modes):
        model, _, family = named.partition(":")
        fitting, found = "none of these", {}
        for name in FAMILIES.get(family, [family]):
            sizes = {"context": FLAGS.context, "batch": 1}
            found = prober(model, aot.Target(name), mode, **sizes)
            if found["fits"]:
                fitting = name
                break
        sizes = [found.get(f"{part}_bytes") for part in ("used", "host_peak")]
        gib = [None if n is None else n / GIB for n in sizes]
        command.print_row((model, mode, fitting), (*gib, found.get("step_seconds")))
        yield {"model": model, "mode": mode, "target": fitting, **found}


FINDERS = {
    "peak": find_peaks,
    "least": find_least,
    "layers": find_layers,
    "target": find_target,
}


def main() -> None:
    """Finds what is asked for, and prints a row for each."""
    prober = Prober(Path(FLAGS.out).with_suffix(".probes.json"))
    rows = [*FINDERS[FLAGS.find](prober)]
    command.write(find=FLAGS.find, memory_gib=FLAGS.memory_gib, rows=rows)


if __name__ == "__main__":
    flags.DEFINE_enum("find", "peak", list(FINDERS), "What is looked for.")
    command.define_shared(
        targets=["h100", "v5e:2x2"], workloads=USUAL_WORKLOADS, modes=USUAL_MODES
    )
    flags.DEFINE_list(
        "models",
        ["llama3_8b:gpus", "llama3_70b:h100s", "llama3_70b:v5ps"],
        f"Of examples/models.py, each with a target or of {', '.join(FAMILIES)}.",
    )
    flags.DEFINE_integer("context", 4096, "Tokens in a sequence of a model.")
    flags.DEFINE_float("memory_gib", None, "Of a target, if less than it has.")
    command.run(main, out="out/peaks")
