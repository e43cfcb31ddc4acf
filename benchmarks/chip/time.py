"""Times of steps, in turns with plain, beside what a model predicts of the program."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import Training, count, gated_or_toy
from benchmarks.common import turns
from benchmarks.common.spans import of_profile
from benchmarks.common.workloads import Workload
from optax_offload import aot

PLAIN = "no offload"
FORMS = ["ours", "fused", "residuals", "recipe", "int8 fused", "parameters"]
ROUNDS = 3
# So long is a turn, if a step is not longer.
TURN_SECONDS = 1.0
MOST_STEPS = 10
PROFILED_STEPS = 2
TOKENS = (4096, 16384)


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each size and form; plain first, of which the others are multiples."""
    # Toys of the other forms are run by other parts.
    sizes, forms = ((32,), ["residuals"]) if setting.dry else (TOKENS, FORMS)
    return {
        f"{tokens} tokens/{mode}": functools.partial(measure, setting, tokens, mode)
        for tokens in sizes
        for mode in [PLAIN, *forms]
    }


# The plain training of the size that is measured, kept while that is the same.
_PLAIN: dict[int, Training] = {}


def plain_of(work: Workload) -> Training:
    """It, with its arrays."""
    tokens = work.x.shape[0]
    if tokens not in _PLAIN:
        while _PLAIN:
            _PLAIN.popitem()[1].free()
        _PLAIN[tokens] = Training(work, PLAIN)
        _PLAIN[tokens].make()
        _PLAIN[tokens].run(1)
    return _PLAIN[tokens]


def measure(setting: Setting, tokens: int, mode: str) -> Figures:
    """Compiles a form of the step, and times it in turns with the plain one."""
    work = gated_or_toy(setting.dry, tokens=tokens)
    plain = plain_of(work)
    training = plain if mode == PLAIN else Training(work, mode)
    try:
        figures: Figures = {"tokens": tokens, "parameters": count(work)}
        figures |= prediction(setting, training)
        if training is not plain:
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


def timed(training: Training, plain: Training) -> Figures:
    """Turns of some steps each: the median of what a form takes, and of the ratio."""
    steps = max(1, min(MOST_STEPS, int(TURN_SECONDS / training.run(1))))
    ways = {PLAIN: plain, "own": training}
    found = turns.in_turns(
        {name: lambda way=way: {"step": way.run(steps)} for name, way in ways.items()},
        ROUNDS,
    )
    median = turns.median(found, "own", "step")
    return {
        "seconds": median,
        "all_seconds": found["own"]["step"],
        "plain_seconds": turns.median(found, PLAIN, "step"),
        "ratio": turns.ratio(found, "own", PLAIN, "step"),
        "tokens_per_second": training.work.x.shape[0] / median,
        "steps_in_a_turn": steps,
        "finite": training.is_finite(),
        **profile(training),
    }


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


PART = Part(
    "time",
    minutes=7,
    case_seconds=150,
    cases=cases,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.92"},
)
