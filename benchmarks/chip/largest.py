"""The largest models that really take a step, by trying, from what is predicted on.

A layer has 51 million parameters (`workloads.gated`). Each trial is a process of its
own, which makes the model and takes two steps; so is what predicts, by compiling.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import (
    Training,
    count,
    counted_peak,
    gated_or_toy,
    halved,
)
from benchmarks.common import alone
from benchmarks.common.workloads import Workload
from benchmarks.memory.search import interpolated

# From plain to what takes least, and whether parameters are in bfloat16.
MODELS = {
    "plain": ("no offload", False),
    "six bytes": ("six bytes", True),
    "parameters and residuals": ("residuals", False),
    "fused": ("fused", False),
}
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
    work = gated_or_toy(dry, layers=layers)
    return halved(work) if half else work


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each kind of step."""
    names = ["fused"] if setting.dry else [*MODELS]
    return {name: functools.partial(search, setting, name) for name in names}


def search(setting: Setting, name: str) -> Figures:
    """Predicts the largest number of layers, tries it, and bisects from there."""
    began = time.monotonic()
    figures = predict(setting, name)
    layers, most, least = figures["predicted_layers"], 0, None
    trials = []
    while layers and len(trials) < (1 if setting.dry else TRIALS):
        if trials and time.monotonic() - began > SEARCH_SECONDS:
            break
        found = in_a_process(take_a_step, name=name, dry=setting.dry, layers=layers)
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
    asked: dict[str, Any] = {"name": name, "dry": setting.dry}
    found = in_a_process(compiled_peaks, **asked, layers=(few, 2 * few))
    if "failed" in found:
        raise RuntimeError(f"a few layers do not compile: {found['failed']}")
    counts = {}
    for where, limit in (
        ("device", DEVICE_SHARE * setting.memory_bytes),
        ("host", setting.host_bytes),
    ):
        used = dict(zip((few, 2 * few), found[where], strict=True))
        layers = interpolated(used, int(limit))
        if layers is not None:
            counts[where] = layers
    where = min(counts, key=lambda x: counts[x])
    most = max(1, counts[where])
    if setting.dry:
        most = min(most, 8)
    return {
        "predicted_layers": most,
        "predicted_parameters": count(workload(most, MODELS[name][1], setting.dry)),
        "predicted_limit": where,
    }


def compiled_peaks(name: str, dry: bool, layers: Sequence[int]) -> Figures:
    """Of the compiled steps, in bytes; nothing is made."""
    mode, half = MODELS[name]
    peaks = [Training(workload(n, half, dry), mode).peak() for n in layers]
    return {
        "device": [peak.peak_bytes for peak in peaks],
        "host": [peak.host_peak_bytes for peak in peaks],
    }


def take_a_step(name: str, dry: bool, layers: int) -> Figures:
    """Makes a model of so many layers, and takes two steps."""
    mode, half = MODELS[name]
    training = Training(workload(layers, half, dry), mode)
    began = time.perf_counter()
    training.make()
    made = time.perf_counter() - began
    training.run(1)
    return {
        "seconds": training.run(1),
        "making_seconds": made,
        "finite": training.is_finite(),
        "device_bytes": counted_peak(),
    }


def in_a_process(function: Callable[..., Figures], **options: Any) -> Figures:
    """What one of these functions finds, or how its process ended."""
    try:
        return alone.call(function, options, seconds=TRIAL_SECONDS)
    except alone.AloneError as error:
        return {"failed": str(error)}


PART = Part(
    "largest",
    minutes=8,
    case_seconds=240,
    cases=cases,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.95"},
)
