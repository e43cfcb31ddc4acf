"""Every form of step on the chip against plain on the chip, and what goes with them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback

import optax_offload as oo
from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError
from benchmarks.chip.training import Training, halved, random_params
from benchmarks.common.alone import ROOT
from benchmarks.common.steps import MODES, MOMENTS, Mode, as_it_is
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


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of step, and what it is held against.

    Attributes:
      work: The name of what is trained.
      mode: The step.
      said: A regex of what the schedule has to say, for the form to be as it is called.
      window: The window, in states of a matrix; None for the library's own.
      coded: Whether state is in codecs. That of the plain step is too, and the mean
        difference is bounded: a code that rounds the other way is far away.
      steps: So many are taken.
    """

    work: str
    mode: Mode
    said: str = ""
    window: float | None = None
    coded: bool = False
    steps: int = STEPS

    @property
    def by_drift(self) -> bool:
        """Whether the mean difference is bounded, and not the largest one."""
        return self.coded or self.steps > STEPS

    def training(self, dry: bool) -> Training:
        """A training of it, begun."""
        wrap: Any = self.mode.optimizer
        if self.window is not None:
            nbytes = int(self.window * 8 * width(dry) ** 2)
            wrap = functools.partial(wrap, window_bytes=nbytes)
        mode = self.mode._replace(optimizer=wrap)
        training = Training(workload(self.work, dry), mode)
        training.begin(begun(self.work, dry))
        return training


def in_codec(name: Any) -> Form:
    """Moments in a codec, all on the host."""
    rules = oo.Rule(MOMENTS, codec=name), oo.Rule(".*", optional=True)
    mode = Mode(functools.partial(oo.offload, rules=rules), {})
    return Form("gated", mode, coded=True)


OURS = MODES["ours"]
MIXED = functools.partial(
    oo.offload, rules=(oo.Rule(".*/mu/.*"), oo.Rule(".*", "device"))
)
FORMS: dict[str, Form] = {
    "offload, whole": Form("leaves", OURS, window=64),
    "offload, in slices": Form("stacked", OURS, "slices", window=0.5),
    "offload, in loops": Form("clipped leaves", OURS, "over 4 groups, in", window=1),
    "fused": Form("gated", MODES["fused"], "never on the device whole"),
    "late gradients on the host": Form(
        "decoder", MODES["fused stored"], "stored to host memory"
    ),
    "late gradients recomputed": Form("decoder", MODES["fused twice"], "runs twice"),
    "late gradients on the device": Form(
        "decoder", OURS._replace(streamed={"late_gradients": "device"})
    ),
    "parameters on the host": Form(
        "gated", MODES["parameters"], "of rows in each iteration"
    ),
    "residuals on the host": Form("gated", MODES["residuals"], "residuals rest"),
    "all of it, clipped": Form("decoder", MODES["residuals"], "residuals rest"),
    "mixed placements, 30 steps": Form(
        "gated", Mode(MIXED, {}, on_host="layers/(gate|out)"), steps=30
    ),
    "masters as remainders": Form("half gated", MODES["six bytes"], coded=True),
    **{f"codec {name}": in_codec(name) for name in CODECS},
}
# Of toys the part `largest` has masters as remainders; codecs differ in codes only.
NO_TOYS = ("masters as remainders", *(f"codec {name}" for name in CODECS[1:]))


def width(dry: bool) -> int:
    """Of a matrix."""
    return 128 if dry else 512


def workload(name: str, dry: bool) -> Workload:
    """What is trained: small, but with rows and slices that are worth a transfer."""
    side = width(dry)
    if name.endswith("leaves"):
        work = enlarged(leaves(4, side, 64))
    elif name == "stacked":
        work = enlarged(stacked(4, side, 64))
    elif name == "decoder":
        work = decoder(True, 3, side, 4, vocabulary=256, batch=4, context=64)
    else:
        work = gated(256, 4, side, 2 * side, vocabulary=256)
    optimizer: Any = optax.adamw(LEARNING_RATE)
    if name in ("clipped leaves", "decoder"):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    work = dataclasses.replace(work, optimizer=optimizer)
    return halved(work) if name == "half gated" else work


def enlarged(work: Workload) -> Workload:
    """With gradients that are large beside Adam's epsilon.

    Else an update is as far off as a gradient is from zero, and that is what rounding
    makes of it.
    """
    return dataclasses.replace(work, loss=lambda p, x: 1e4 * work.loss(p, x))


def cases(setting: Setting) -> Mapping[str, Case]:
    """The forms, and what else is done with their arrays."""
    names = [n for n in FORMS if not (setting.dry and n in NO_TOYS)]
    others = {
        "init": make,
        "effects": effects,
        "offload_states and back": there_and_back,
        "checkpoint and resume": resume,
        "the accelerator tests": tests,
    }
    return {
        **{name: functools.partial(compare, setting, name) for name in names},
        **{name: functools.partial(case, setting) for name, case in others.items()},
    }


def compare(setting: Setting, name: str) -> Figures:
    """A form after some steps, and how far it is from plain."""
    form, dry = FORMS[name], setting.dry
    training = form.training(dry)
    training.run(form.steps)
    optimizer: Any = form.mode.optimizer
    codecs = tuple(optimizer.keywords["rules"]) if form.coded else ()
    want = plain_results(form.work, codecs, form.steps, dry)
    got = on_numpy(training.carry)
    moved = drift(want[0], begun(form.work, dry))
    away = drift(got[0], want[0])
    if form.by_drift:  # Of state in codes it is the parameters that count.
        far, within = ulps(got[0], want[0]), away <= DRIFT
    else:
        far = ulps(got, want)
        within = away <= CLOSE_DRIFT or far <= ULPS
    close = f"{ULPS} ulps, or mean {CLOSE_DRIFT}"
    schedule = training.schedule()
    as_called = re.search(form.said, schedule) is not None
    return {
        "steps": form.steps,
        "ulps": far,
        "drift": away,
        "bound": f"mean {DRIFT}" if form.by_drift else close,
        "moved": moved,
        # Of steps that train nothing a difference would say nothing.
        "within": bool(within) and moved > 1 and as_called,
        "as_called": as_called,
        "schedule": schedule,
    }


@functools.lru_cache
def begun(name: str, dry: bool) -> Any:
    """The parameters that all forms begin with."""
    make = functools.partial(random_params, workload(name, dry))
    return on_numpy(jax.jit(make)(jax.random.key(0)))


@functools.lru_cache
def plain_results(name: str, codecs: tuple[oo.Rule, ...], steps: int, dry: bool) -> Any:
    """Parameters and state after plain steps, with state of these rules' codecs."""
    wrap = functools.partial(oo.low_bit, rules=codecs, codec=None)
    mode = Mode(wrap if codecs else as_it_is, is_ours=False)
    training = Training(workload(name, dry), mode)
    training.begin(begun(name, dry))
    training.run(steps)
    found = on_numpy(training.carry)
    training.free()
    return found


def on_numpy(tree: Any) -> Any:
    """Copies."""
    return jax.tree.map(np.array, tree)


def ulps(got: Any, want: Any) -> float:
    """The largest difference, in units in the last place of a leaf's largest value."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(y.dtype, jnp.floating):
            worst = max(worst, float("inf") if (x != y).any() else 0.0)
            continue
        unit = float(jnp.finfo(y.dtype).eps)
        x, y = x.astype(np.float64), y.astype(np.float64)
        if not np.isfinite(x).all():
            return float("inf")
        scale = max(float(np.abs(y).max(initial=0)), 1e-300) * unit
        worst = max(worst, float(np.abs(x - y).max(initial=0)) / scale)
    return worst


def drift(params: Any, others: Any) -> float:
    """The largest mean difference of a leaf, in learning rates."""
    means = jax.tree.map(
        lambda x, y: np.abs(x.astype(np.float64) - y.astype(np.float64)).mean(),
        params,
        others,
    )
    return float(max(jax.tree.leaves(means))) / LEARNING_RATE


def kinds(tree: Any) -> list[str | None]:
    """The memory kind of each leaf."""
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def are_same(tree: Any, bits: Any, placed: list[str | None]) -> bool:
    """Whether arrays have these bits, where they belong."""
    equal = jax.tree.map(np.array_equal, on_numpy(tree), bits)
    return all(jax.tree.leaves(equal)) and kinds(tree) == placed


def make(setting: Setting) -> Figures:
    """A model and its state made row by row, against made whole."""
    training = FORMS["residuals on the host"].training(setting.dry)
    key = jax.random.key(3)
    got, want = oo.jit(training.init)(key), jax.jit(training.init)(key)
    found = ulps(on_numpy(got), on_numpy(want))
    bound = 1  # As `tests/program/test_at_rest.py`.
    return {
        "ulps": found,
        "bound": f"{bound} ulps, and where it belongs",
        "within": found <= bound and kinds(got) == kinds(training.carry),
    }


def effects(setting: Setting) -> Figures:
    """Callbacks in the forward scan and after the update: as many as in plain steps."""
    side = width(setting.dry)
    noted: list[str] = []

    def body(h: Any, w: Any) -> Any:
        jax.debug.callback(lambda _: noted.append("forward"), h[0, 0])
        return jnp.tanh(h @ w), None

    def step(tx: Any, params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda w: jnp.mean(lax.scan(body, x, w)[0] ** 2)
        )(params)
        updates, state = tx.update(grads, state, params)
        scale = io_callback(
            lambda: noted.append("asked") or np.float32(1.0),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        updates = jax.tree.map(lambda u: u * scale, updates)
        return optax.apply_updates(params, updates), state, loss

    found = []
    for wrap, jit in ((as_it_is, jax.jit), (oo.offload, oo.jit)):
        tx = wrap(optax.adam(LEARNING_RATE))
        params = jnp.full((4, side, side), 0.01)
        state, x = tx.init(params), jnp.ones((8, side))
        noted.clear()
        jitted = jit(functools.partial(step, tx))
        for _ in range(2):
            params, state, _ = jitted(params, state, x)
        jax.block_until_ready(params)
        jax.effects_barrier()
        found.append(({n: noted.count(n) for n in set(noted)}, np.array(params)))
    (plain_calls, plain), (calls, ours) = found
    distance = ulps(ours, plain)
    return {
        "ulps": distance,
        "bound": f"{ULPS} ulps, and as many calls",
        "calls": calls,
        "within": calls == plain_calls and bool(calls) and distance <= ULPS,
    }


def there_and_back(setting: Setting) -> Figures:
    """A whole training in host memory and on disk, and back: bits and memory kinds."""
    training = FORMS["residuals on the host"].training(setting.dry)
    training.run(2)
    tree: Any = training.carry
    before, placed = on_numpy(tree), kinds(tree)
    ways: dict[Any, dict[str, Any]] = {"pinned_host": {}}
    if importlib.util.find_spec("tensorstore"):
        ways["disk"] = {"directory": setting.empty_folder("states")}
    same = True
    for kind, options in ways.items():
        there = oo.offload_states(tree, memory_kind=kind, block=True, **options)
        tree = oo.reload_states(there, block=True)
        same = same and are_same(tree, before, placed)
    training.carry = tree
    training.run(1)
    return {
        "through": [*ways],
        "bound": "the same bits, where they were",
        "within": same and training.is_finite(),
    }


def resume(setting: Setting) -> Figures:
    """Steps, a checkpoint, steps; again from the checkpoint: the same bits."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise SkippedError("orbax-checkpoint is not installed") from error
    training = FORMS["residuals on the host"].training(setting.dry)
    training.run(2)
    folder = setting.empty_folder("checkpoint").resolve()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, training.carry)
        checkpointer.wait_until_finished()
        training.run(3)
        want = on_numpy(training.carry)
        template = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding),
            training.structs,
        )
        training.carry = checkpointer.restore(folder, template)
    placed = kinds(training.carry) == kinds(training.structs)
    training.run(3)
    return {
        "bound": "the same bits, restored where they belong",
        "within": placed and are_same(training.carry, want, kinds(training.structs)),
    }


def tests(setting: Setting) -> Figures:
    """`pytest -m accelerator`, as far as it gets in its time."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "tests", *["-k", "peak"] * setting.dry]
    log, ended = setting.folder / "tests.log", True
    with log.open("w") as file:
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=file,
                check=False,
                timeout=SECONDS_OF_TESTS,
            )
        except subprocess.TimeoutExpired:
            ended = False
    found = re.findall(
        r"^(tests/.+?) (PASSED|FAILED|SKIPPED|ERROR)", log.read_text(), re.MULTILINE
    )
    words = [word for _, word in found]
    failed = [test for test, word in found if word in ("FAILED", "ERROR")]
    return {
        "counts": {word.lower(): words.count(word) for word in dict.fromkeys(words)},
        "ended": ended,
        "failed": failed,
        "bound": "all pass",
        "within": bool(found) and not failed and ended,
    }


VALUES = Part(
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
