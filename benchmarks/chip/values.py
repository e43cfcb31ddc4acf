"""Every form of step on the chip against plain on the chip, and what goes with them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import optax_offload as oo
from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError
from benchmarks.chip.training import Training, halved
from benchmarks.common.alone import ROOT
from benchmarks.common.differences import mean, ulps
from benchmarks.common.steps import MODES, MOMENTS, OURS, SIX_BYTES, Mode, as_it_is
from benchmarks.common.workloads import Workload, decoder, gated, leaves, stacked

# In units of the last place of each leaf's maximum, as `tests/system` has it for five
# steps on a CPU.
ULPS = 32
# Of the learning rate, on average over a leaf: `tests/system/test_placement.py` allows
# so much to parameters whose gradients were computed in another program.
DRIFT = 0.1
# The same where nothing is coded. Of a gradient that is nearly zero an update by Adam
# may be far away, in units of the last place, though the mean is not.
CLOSE_DRIFT = 1e-3
LEARNING_RATE = 1e-3
STEPS = 5
CODECS: tuple[Any, ...] = ("int8", "int8-companded", "float8", "bfloat16")
SECONDS_OF_TESTS = 200
# Of what the tests print last.
OUTPUT_CHARACTERS = 1500
# Of a matrix: rows and slices of it are worth a transfer.
WIDTH = 256
TOKENS = 64
# Adam's moments of a matrix.
STATE_BYTES = 8 * WIDTH**2


class Form(NamedTuple):
    """A form of step, and what it is held against.

    Attributes:
      work: The name of what is trained.
      mode: The step.
      said: A regex of what the schedule has to say, for the form to be as it is called.
      codecs: The rules of state in codecs. That of the plain step is too, and the mean
        difference is bounded: a code that rounds the other way is far away.
      steps: So many are taken; of many the mean difference is bounded.
    """

    work: str
    mode: Mode
    said: str = ""
    codecs: tuple[oo.Rule, ...] = ()
    steps: int = STEPS


def in_windows(states: float) -> Mode:
    """Updates in windows of so many matrices' states."""
    return Mode(functools.partial(OURS, window_bytes=int(states * STATE_BYTES)))


def in_codec(name: Any) -> Form:
    """Moments in a codec, all on the host."""
    rules = oo.Rule(MOMENTS, codec=name), oo.Rule(".*", optional=True)
    mode = Mode(functools.partial(oo.offload, rules=rules), {})
    return Form("gated", mode, codecs=rules)


MIXED = functools.partial(
    oo.offload, rules=(oo.Rule(".*/mu/.*"), oo.Rule(".*", "device"))
)
FORMS: dict[str, Form] = {
    "offload, whole": Form("leaves", in_windows(64)),
    "offload, in slices": Form("stacked", in_windows(0.5), "slices"),
    "offload, in loops": Form("clipped leaves", in_windows(1), "over 4 groups, in"),
    "fused": Form("gated", MODES["fused"], "never on the device whole"),
    "late gradients on the host": Form(
        "decoder", MODES["fused stored"], "stored to host memory"
    ),
    "late gradients recomputed": Form("decoder", MODES["fused twice"], "runs twice"),
    "late gradients on the device": Form(
        "decoder", Mode(OURS, {"late_gradients": "device"})
    ),
    "parameters on the host": Form(
        "gated", MODES["parameters"], "of rows in each iteration"
    ),
    "residuals on the host": Form("gated", MODES["residuals"], "residuals rest"),
    "all of it, clipped": Form("decoder", MODES["residuals"], "residuals rest"),
    "mixed placements, 30 steps": Form(
        "gated", Mode(MIXED, {}, on_host="layers/(gate|out)"), steps=30
    ),
    "masters as remainders": Form(
        "half gated", MODES["six bytes"], codecs=tuple(SIX_BYTES.keywords["rules"])
    ),
    **{f"codec {name}": in_codec(name) for name in CODECS},
}
# Of toys the part `peaks` has masters as remainders; codecs differ in codes only.
NO_TOYS = ("masters as remainders", *(f"codec {name}" for name in CODECS[1:]))


ADAMW: Any = optax.adamw(LEARNING_RATE)
CLIPPED: Any = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def trained(work: Workload, optimizer: Any = ADAMW) -> Workload:
    """What is trained, with gradients that are large beside Adam's epsilon.

    Beside it updates would be as far off as rounding puts gradients from zero.
    """
    loss = lambda params, x: 1e4 * work.loss(params, x)  # noqa: E731
    return dataclasses.replace(work, loss=loss, optimizer=optimizer)


# Layers under a scan; those of the decoder have attention.
GATED = functools.partial(gated, 4 * TOKENS, 4, WIDTH, 2 * WIDTH, vocabulary=256)
DECODER = functools.partial(
    decoder, True, 3, WIDTH, 4, vocabulary=256, batch=4, context=TOKENS
)
WORKS: dict[str, Callable[[], Workload]] = {
    "leaves": lambda: trained(leaves(4, WIDTH, TOKENS)),
    "clipped leaves": lambda: trained(leaves(4, WIDTH, TOKENS), CLIPPED),
    "stacked": lambda: trained(stacked(4, WIDTH, TOKENS)),
    "gated": lambda: trained(GATED()),
    "half gated": lambda: halved(trained(GATED())),
    "decoder": lambda: trained(DECODER(), CLIPPED),
}


def cases(setting: Setting) -> Mapping[str, Case]:
    """The forms, and the tests of what else is done with their arrays."""
    names = [n for n in FORMS if not (setting.dry and n in NO_TOYS)]
    return {
        **{name: functools.partial(compare, name) for name in names},
        "the accelerator tests": functools.partial(tests, setting),
    }


def compare(name: str) -> Figures:
    """A form after some steps, and how far it is from plain."""
    form = FORMS[name]
    training, got = after(form)
    want = plain_results(form.work, form.codecs, form.steps)
    away = mean(got[0], want[0]) / LEARNING_RATE
    moved = mean(want[0], begun(form.work)) / LEARNING_RATE
    if form.codecs or form.steps > STEPS:
        # Of state in codes it is the parameters that count.
        far, within, bound = ulps(got[0], want[0]), away <= DRIFT, f"mean {DRIFT}"
    else:
        far = ulps(got, want)
        within = away <= CLOSE_DRIFT or far <= ULPS
        bound = f"{ULPS} ulps, or mean {CLOSE_DRIFT}"
    schedule = training.schedule()
    as_called = re.search(form.said, schedule) is not None
    return {
        "ulps": far,
        "drift": away,
        "bound": bound,
        "moved": moved,
        # Of steps that train nothing a difference would say nothing.
        "within": bool(within) and moved > 1 and as_called,
        "as_called": as_called,
        "schedule": schedule,
    }


def after(form: Form) -> tuple[Training, Any]:
    """The training of a form, and its parameters and state after its steps."""
    training = Training(WORKS[form.work](), form.mode)
    training.make(begun(form.work))
    training.run(form.steps)
    return training, jax.tree.map(np.array, training.carry)


@functools.lru_cache
def begun(name: str) -> Any:
    """The parameters that all forms begin with."""
    random, params = np.random.default_rng(0), WORKS[name]().params
    scale = WIDTH**-0.5
    draw = lambda p: (scale * random.standard_normal(p.shape)).astype(p.dtype)  # noqa: E731
    return jax.tree.map(draw, params)


@functools.lru_cache
def plain_results(name: str, codecs: tuple[oo.Rule, ...], steps: int) -> Any:
    """Parameters and state after plain steps, with state of these rules' codecs."""
    wrap = functools.partial(oo.low_bit, rules=codecs, codec=None)
    mode = Mode(wrap if codecs else as_it_is, is_ours=False)
    training, found = after(Form(name, mode, steps=steps))
    training.free()
    return found


def tests(setting: Setting) -> Figures:
    """`pytest -m accelerator`: what else is done with state, on this device."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "tests", "-m", "accelerator"]
    command += ["--tb=short", "-p", "no:cacheprovider"]
    command += ["-k", "peak"] * setting.dry
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_OF_TESTS,
    )
    return {
        "output": done.stdout[-OUTPUT_CHARACTERS:],
        "bound": "all pass",
        "within": done.returncode == 0,
    }


PART = Part(
    "values",
    minutes=8,
    case_seconds=SECONDS_OF_TESTS + 20,
    cases=cases,
    environment={
        # A difference is to be that of the forms, not of the kernels that were chosen.
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
        # The accelerator tests are a process beside this one.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    },
)
