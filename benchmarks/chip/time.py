"""Times of steps, in turns with plain, beside what a model predicts of the program."""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import Training, count
from benchmarks.common.spans import of_profile
from benchmarks.common.workloads import Workload, gated
from optax_offload import aot

PLAIN = "no offload"
FORMS = ["ours", "fused", "residuals", "recipe", "int8 fused", "parameters"]
ROUNDS = 3
# So long is a turn, if a step is not longer.
TURN_SECONDS = 1.0
MOST_STEPS = 10
PROFILED_STEPS = 2
# The share of the device that plain steps fill in the largest size.
FILLED = 0.8


def sizes(setting: Setting) -> Mapping[str, Workload]:
    """Workloads by name: two of 1.3 billion parameters, and one that fills the card."""
    if setting.dry:
        shape: dict[str, Any] = {"width": 64, "inner": 256, "vocabulary": 128}
        return {"toy": gated(tokens=32, layers=3, **shape)}
    return {
        "4096 tokens": gated(tokens=4096),
        "16384 tokens": gated(tokens=16384),
        "filled": gated(tokens=16384, layers=filling_layers(setting)),
    }


def filling_layers(setting: Setting) -> int:
    """So many that plain steps fill the card, as far as the host has room for them.

    A parameter takes 16 bytes of the device, with its gradient and Adam's moments, and
    12 of the host, if it rests there with them; so do residuals.
    """
    tokens = 16384
    one, two = gated(tokens=tokens, layers=1), gated(tokens=tokens, layers=2)
    layer = count(two) - count(one)
    residual = 4 * tokens * 2048
    outside = 16 * (count(one) - layer) + 4 * tokens * 16384 * 2
    on_device = (FILLED * setting.memory_bytes - outside) / (16 * layer + residual)
    on_host = 0.9 * setting.host_bytes / (12 * layer + residual)
    return max(1, int(min(on_device, on_host)))


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each size and form; plain first, of which the others are multiples."""
    names = ["toy"] if setting.dry else ["4096 tokens", "16384 tokens", "filled"]
    # Toys of the other forms are run by other parts.
    forms = ["ours", "residuals"] if setting.dry else FORMS
    return {
        f"{size}/{mode}": functools.partial(measure, setting, size, mode)
        for size in names
        for mode in [PLAIN, *forms]
    }


# The plain training of the size that is measured, kept while that is the same.
_PLAIN: dict[str, Training] = {}


def plain_of(setting: Setting, size: str) -> Training | None:
    """It, with its arrays; None where both would not fit."""
    if size not in _PLAIN:
        while _PLAIN:
            _PLAIN.popitem()[1].free()
        # The largest is timed by itself.
        if size != "filled":
            _PLAIN[size] = Training(sizes(setting)[size], PLAIN)
            _PLAIN[size].make()
            _PLAIN[size].run(1)
    return _PLAIN.get(size)


def measure(setting: Setting, size: str, mode: str) -> Figures:
    """Compiles a form of the step, and times it in turns with the plain one."""
    plain = plain_of(setting, size)
    work = sizes(setting)[size]
    training = plain if plain and mode == PLAIN else Training(work, mode)
    try:
        figures: Figures = {"tokens": work.x.shape[0], "parameters": count(work)}
        figures |= prediction(setting, training)
        if plain is None:
            setting.check_host(training.peak())
        if training.carry is None:
            training.make()
            training.run(1)
        return figures | timed(training, plain)
    finally:
        if training is not plain:
            training.free()


def prediction(setting: Setting, training: Training) -> Figures:
    """The model's time of a program, or why there is none."""
    # A CPU is no target; that a program's text is read is seen of one.
    target = "h100" if setting.dry else setting.target
    try:
        if target is None:
            raise ValueError("no such chip in optax_offload/aot/chips.py")
        found = aot.step_time(training.compiled, target)
    except ValueError as error:
        return {"predicted_seconds": None, "not_predicted": str(error)[:300]}
    return {
        "predicted_seconds": found.seconds,
        "predicted_compute_seconds": found.compute_seconds,
    }


def timed(training: Training, plain: Training | None) -> Figures:
    """Turns of some steps each: the median of what a form takes, and of the ratio."""
    steps = max(1, min(MOST_STEPS, int(TURN_SECONDS / training.run(1))))
    plains, seconds = [], []
    for _ in range(ROUNDS):
        if plain is not None:
            plains.append(plain.run(steps))
        seconds.append(training.run(steps))
    median = statistics.median(seconds)
    figures: Figures = {
        "seconds": median,
        "all_seconds": seconds,
        "tokens_per_second": training.work.x.shape[0] / median,
        "steps_in_a_turn": steps,
        "finite": training.is_finite(),
        **profile(training),
    }
    if plains:
        ratios = [b / a for a, b in zip(plains, seconds, strict=True)]
        figures["plain_seconds"] = statistics.median(plains)
        figures["ratio"] = statistics.median(ratios)
    return figures


def profile(training: Training) -> Figures:
    """Spans of transfers and of kernels in some steps; None where there are none."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                training.run(PROFILED_STEPS)
            return {"profile": of_profile(Path(folder))}
    except Exception as error:
        # The times are there already.
        return {"profile": None, "not_profiled": repr(error)[:300]}


TIME = Part(
    "time",
    minutes=7,
    case_seconds=150,
    cases=cases,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.92"},
)
