"""The largest models that really take a step, by trying, from what is predicted on.

A layer has 51 million parameters (`workloads.gated`). Each trial is a process of its
own, which makes the model and takes two steps; so is what predicts, by compiling.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_offload as oo
from benchmarks.chip.machine import ROOT
from benchmarks.chip.peaks import predicted
from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import Training, count, counted_peak, halved
from benchmarks.common.workloads import Workload, gated
from examples import models
from optax_offload import aot

# From plain to what takes least, and whether parameters are in bfloat16.
MODELS = {
    "plain": ("no offload", False),
    "six bytes": ("six bytes", True),
    "parameters and residuals": ("residuals", False),
    "fused": ("fused", False),
}
LLAMA = "the shape of Llama 3 8B"
# Of the device: less than the environment below gives, for programs and their buffers.
DEVICE_SHARE = 0.9
# Trials before one took a step and one did not; and how close to each other is enough.
FARTHER, NEARER = 1.06, 0.8
CLOSE = 0.02
TRIALS = 4
TRIAL_SECONDS = 110
# A search begins no trial after so long.
SEARCH_SECONDS = 100


def workload(layers: int, half: bool, dry: bool) -> Workload:
    """A decoder's layers, without attention, of 4096 tokens."""
    if dry:
        work = gated(tokens=32, layers=layers, width=64, inner=256, vocabulary=128)
    else:
        work = gated(layers=layers)
    return halved(work) if half else work


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each kind of step, and a model people know."""
    found: dict[str, Case] = {}
    for name in MODELS:
        found[name] = functools.partial(search, setting, name)
        if name == "six bytes":
            found[LLAMA] = functools.partial(llama, setting)
    if setting.dry:
        return {name: found[name] for name in ("six bytes", LLAMA)}
    return found


def search(setting: Setting, name: str) -> Figures:
    """Predicts the largest number of layers, tries it, and bisects from there."""
    began = time.monotonic()
    figures = predict(setting, name)
    if setting.on_paper:
        return figures
    layers, most, least = figures["predicted_layers"], 0, None
    trials = []
    while layers is not None and len(trials) < (1 if setting.dry else TRIALS):
        if trials and time.monotonic() - began > SEARCH_SECONDS:
            break
        found = in_a_process(setting, "take_a_step", {"name": name, "layers": layers})
        trials.append({"layers": layers, **found})
        if "seconds" in found:
            most = layers
        else:
            least = layers
        layers = following(most, least)
    work = workload(most, MODELS[name][1], setting.dry)
    return figures | {
        "layers": most,
        "failed_layers": least,
        "parameters": count(work) if most else 0,
        "trials": trials,
    }


def following(most: int, least: int | None) -> int | None:
    """The number of layers to try next; None if it is known well enough.

    Args:
      most: The most that took a step, or 0.
      least: The fewest that did not, if any.
    """
    if least is None:
        return max(most + 1, int(most * FARTHER))
    if not most:
        return int(least * NEARER) or None
    middle = (most + least) // 2
    return middle if middle - most > CLOSE * most else None


def predict(setting: Setting, name: str) -> Figures:
    """By the peaks of a few layers and of twice as many, on the device and the host."""
    few = 4
    options = {"name": name, "layers": (few, 2 * few)}
    if setting.on_paper:
        found = compiled_peaks(setting, **options)
    else:
        found = in_a_process(setting, "compiled_peaks", options)
    if "failed" in found:
        raise RuntimeError(f"a few layers do not compile: {found['failed']}")
    limits = {"device_bytes": DEVICE_SHARE * setting.memory_bytes}
    if not setting.on_paper:
        limits["host_bytes"] = setting.host_bytes
    counts = {}
    for where, limit in limits.items():
        one, two = found[where]
        slope = (two - one) / few
        if slope > 0:
            counts[where] = int((limit - one) / slope) + few
    if not counts:  # On paper, where the host has no end.
        return {"predicted_layers": None, "predicted_parameters": None}
    where = min(counts, key=lambda x: counts[x])
    layers = max(1, counts[where])
    if setting.dry:
        layers = min(layers, 8)
    work = workload(layers, MODELS[name][1], setting.dry)
    return {
        "predicted_layers": layers,
        "predicted_parameters": count(work),
        "predicted_limit": where.removesuffix("_bytes"),
    }


def compiled_peaks(setting: Setting, name: str, layers: Sequence[int]) -> Figures:
    """Compiled for the device that is here, or on paper; nothing is made."""
    mode, half = MODELS[name]
    peaks = []
    for work in (workload(n, half, setting.dry) for n in layers):
        if setting.on_paper:
            peaks.append(aot.peak(setting.compiled(work, mode)))
        else:
            peaks.append(Training(work, mode).peak())
    return {
        "device_bytes": [peak.peak_bytes for peak in peaks],
        "host_bytes": [peak.host_peak_bytes for peak in peaks],
    }


def take_a_step(setting: Setting, name: str, layers: int) -> Figures:
    """Makes a model of so many layers, and takes two steps."""
    mode, half = MODELS[name]
    return stepped(Training(workload(layers, half, setting.dry), mode))


def stepped(training: Training) -> Figures:
    """Makes the model, and takes two steps."""
    began = time.perf_counter()
    training.make()
    made = time.perf_counter() - began
    training.run(1)
    return {
        "seconds": training.run(1),
        "making_seconds": made,
        "finite": training.is_finite(),
        "device_bytes": counted_peak(),
        "made_by": training.made_by,
    }


def llama(setting: Setting) -> Figures:
    """All parameters of an 8B model, in six bytes each, with random weights."""
    if setting.on_paper:
        compiled = setting.compiled(llama_workload(setting), "six bytes")
        return predicted(aot.peak(compiled)) | setting.seconds_of(compiled)
    found = in_a_process(setting, "llama_step", {})
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


def llama_step(setting: Setting) -> Figures:
    """Here, if the host has the memory."""
    training = Training(llama_workload(setting), "six bytes")
    peak = training.peak()
    figures = {**predicted(peak), "parameters": count(training.work)}
    if not setting.dry:
        figures |= setting.seconds_of(training.compiled)
    if peak.host_peak_bytes > setting.host_bytes:
        return figures | {
            "failed": f"it needs {peak.host_peak_bytes / 2**30:.0f} GiB of the host, "
            f"which has {setting.host_bytes / 2**30:.0f} GiB for it"
        }
    return figures | stepped(training)


def llama_workload(setting: Setting) -> Workload:
    """The model of `examples/models.py`, in bfloat16; or a toy of it."""
    shape = models.Shape(3, 64, 4, 2, 16, 128, 256) if setting.dry else models.LLAMA3_8B
    context = 32 if setting.dry else 4096
    tokens = jax.ShapeDtypeStruct((1, context + 1), jnp.int32)
    module: Any = models.Decoder(shape)
    params = models.parameter_shapes(module, (tokens,))
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(1.0), oo.master_weights(optax.adamw(3e-4))
    )
    return Workload(
        lambda params, tokens: module.apply({"params": params}, tokens),
        params,
        tokens,
        optimizer,
    )


def in_a_process(setting: Setting, function: str, options: dict[str, Any]) -> Figures:
    """What a function of this module finds, in a process that may die of it."""
    code = (
        "import json, sys; from benchmarks.chip import largest; "
        "from benchmarks.chip.setting import Setting; "
        "found = getattr(largest, sys.argv[1])"
        "(Setting.read(sys.argv[2]), **json.loads(sys.argv[3])); "
        "print(json.dumps(found))"
    )
    arguments = [function, setting.written(), json.dumps(options)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            preexec_fn=_first_to_go,
            capture_output=True,
            text=True,
            check=False,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {TRIAL_SECONDS} s"}
    if done.returncode:
        return {"failed": f"code {done.returncode}: ...{done.stderr[-600:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def _first_to_go() -> None:
    """If the host's memory is short, this process is killed, and not its parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


LARGEST = Part(
    "largest",
    minutes=8,
    case_seconds=240,
    cases=cases,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.95"},
    compiles=True,
)
