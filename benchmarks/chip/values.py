"""Every form of step on the chip against plain on the chip, and what goes with them."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
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
from benchmarks.chip.machine import ROOT
from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError
from benchmarks.chip.training import Training, halved, random_params
from benchmarks.common.steps import LAYERS, MOMENTS, Mode, as_it_is, train_step
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
LONG_STEPS = 30
CODECS: tuple[Any, ...] = ("int8", "int8-companded", "float8", "bfloat16")
SECONDS_OF_TESTS = 200


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of step, and what it is held against.

    Attributes:
      work: The name of what is trained.
      rules: Rules of the offloaded optimizer; the plain one has state of their codecs.
      window: The window, in states of a matrix; None for the library's own.
      streamed: Options of `oo.stream`; None for a step as it is.
      on_host: A regex of the parameters that rest on the host.
      steps: So many are taken.
      by_drift: Whether the mean difference is bounded, and not the largest one: a code
        of a codec that rounds the other way is far away.
      said: A regex of what the schedule has to say, for the form to be as it is called.
    """

    work: str
    rules: tuple[oo.Rule, ...] = (oo.Rule(".*"),)
    window: float | None = None
    streamed: Mapping[str, Any] | None = None
    on_host: str = ""
    steps: int = STEPS
    by_drift: bool = False
    said: str = ""

    def mode(self, dry: bool) -> Mode:
        """As of the other benchmarks."""
        window = None if self.window is None else int(self.window * 8 * width(dry) ** 2)
        wrap = functools.partial(oo.offload, rules=self.rules, window_bytes=window)
        if self.streamed is None:
            return Mode(wrap)
        step = functools.partial(oo.stream, **self.streamed)
        return Mode(wrap, step, on_host=self.on_host)

    @property
    def codecs(self) -> tuple[oo.Rule, ...]:
        """The rules, if there are codecs in them."""
        return self.rules if any(rule.codec for rule in self.rules) else ()


# Of toys the part `largest` has masters as remainders; codecs differ in codes only.
NO_TOYS = ("masters as remainders", *(f"codec {name}" for name in CODECS[1:]))


def coded(codec: Any) -> tuple[oo.Rule, ...]:
    """Moments in a codec, all on the host."""
    return oo.Rule(MOMENTS, codec=codec), oo.Rule(".*", optional=True)


REMAINDERS = (
    oo.Rule(MOMENTS, codec="int8"),
    oo.Rule("(.*/)?master/.*", codec="bfloat16-remainder"),
    oo.Rule(".*", optional=True),
)
MIXED = (oo.Rule(".*/mu/.*"), oo.Rule(".*", "device"))
FORMS: dict[str, Form] = {
    "offload, whole": Form("leaves", window=64),
    "offload, in slices": Form("stacked", window=0.5, said="slices"),
    "offload, in loops": Form("clipped leaves", window=1, said="over 4 groups, in"),
    "fused": Form("gated", streamed={}, said="never on the device whole"),
    "late gradients on the host": Form(
        "decoder", streamed={"late_gradients": "host"}, said="stored to host memory"
    ),
    "late gradients recomputed": Form(
        "decoder", streamed={"late_gradients": "recompute"}, said="runs twice"
    ),
    "late gradients on the device": Form(
        "decoder", streamed={"late_gradients": "device"}
    ),
    "parameters on the host": Form(
        "gated", streamed={}, on_host=LAYERS, said="of rows in each iteration"
    ),
    "residuals on the host": Form(
        "gated", streamed={"residuals": "host"}, on_host=LAYERS, said="residuals rest"
    ),
    "all of it, clipped": Form(
        "decoder", streamed={"residuals": "host"}, on_host=LAYERS, said="residuals rest"
    ),
    "mixed placements, 30 steps": Form(
        "gated",
        rules=MIXED,
        streamed={},
        on_host="layers/(gate|out)",
        steps=LONG_STEPS,
        by_drift=True,
    ),
    "masters as remainders": Form(
        "half gated",
        rules=REMAINDERS,
        streamed={"residuals": "host"},
        on_host=LAYERS,
        by_drift=True,
    ),
    **{
        f"codec {codec}": Form("gated", coded(codec), streamed={}, by_drift=True)
        for codec in CODECS
    },
}


def width(dry: bool) -> int:
    """Of a matrix."""
    return 128 if dry else 512


def workload(name: str, dry: bool) -> Workload:
    """What is trained: small, but with rows and slices that are worth a transfer."""
    side = width(dry)
    if name in ("leaves", "clipped leaves"):
        work = leaves(4, side, 64)
        work = enlarged(work)
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

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return 1e4 * work.loss(params, x)

    return dataclasses.replace(work, loss=loss)


def cases(setting: Setting) -> Mapping[str, Case]:
    """The forms, and what else is done with their arrays."""
    names = [n for n in FORMS if not (setting.dry and n in NO_TOYS)]
    return {
        **{name: functools.partial(compare, setting, name) for name in names},
        "init": functools.partial(make, setting),
        "effects": functools.partial(effects, setting),
        "offload_states and back": functools.partial(there_and_back, setting),
        "checkpoint and resume": functools.partial(resume, setting),
        "the accelerator tests": functools.partial(tests, setting),
    }


def compare(setting: Setting, name: str) -> Figures:
    """A form after some steps, and how far it is from plain."""
    form = FORMS[name]
    work = workload(form.work, setting.dry)
    training = Training(work, form.mode(setting.dry))
    training.begin(begun(form.work, setting.dry))
    training.run(form.steps)
    want = plain_results(form.work, form.codecs, form.steps, setting.dry)
    got = on_numpy(training.carry)
    if form.by_drift:  # Of state in codes it is the parameters that count.
        got, want = got[0], want[0]
    schedule = scheduled(training, form, setting.dry)
    moved = drift(want, begun(form.work, setting.dry)) / LEARNING_RATE
    found = {"ulps": ulps(got, want), "drift": drift(got, want) / LEARNING_RATE}
    near = found["drift"] <= (DRIFT if form.by_drift else CLOSE_DRIFT)
    within = near or (found["ulps"] <= ULPS and not form.by_drift)
    figures: Figures = {
        "steps": form.steps,
        **found,
        "bound": f"mean {DRIFT}"
        if form.by_drift
        else f"{ULPS} ulps, or mean {CLOSE_DRIFT}",
        "moved": moved,
        # Of steps that train nothing a difference would say nothing.
        "within": bool(within) and moved > 1,
        "as_called": re.search(form.said, schedule) is not None,
        "schedule": schedule,
    }
    return figures


@functools.lru_cache
def begun(name: str, dry: bool) -> Any:
    """The parameters that all forms begin with."""
    make = functools.partial(random_params, workload(name, dry))
    return on_numpy(jax.jit(make)(jax.random.key(0)))


@functools.lru_cache
def plain_training(name: str, codecs: tuple[oo.Rule, ...], dry: bool) -> Training:
    """The plain step, with state of these rules' codecs."""
    wrap = functools.partial(oo.low_bit, rules=codecs, codec=None)
    mode = Mode(wrap if codecs else as_it_is, is_ours=False)
    return Training(workload(name, dry), mode)


@functools.lru_cache
def plain_results(name: str, codecs: tuple[oo.Rule, ...], steps: int, dry: bool) -> Any:
    """Parameters and state after plain steps."""
    training = plain_training(name, codecs, dry)
    training.begin(begun(name, dry))
    training.run(steps)
    found = on_numpy(training.carry)
    training.free()
    return found


def scheduled(training: Training, form: Form, dry: bool) -> str:
    """What is done with the form, in the library's words."""
    params, state = training.structs
    tx: Any = form.mode(dry).optimizer(training.work.optimizer)
    if form.streamed is None:
        return str(tx.schedule(training.carry[0]))
    step = oo.jit(train_step(training.work, tx), **form.streamed)
    return str(step.schedule(params, state, training.work.x))


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
        scale = max(float(np.abs(y).max(initial=0)), 1e-300) * unit
        worst = max(worst, float(np.abs(x - y).max(initial=0)) / scale)
        if not np.isfinite(x).all():
            return float("inf")
    return worst


def drift(got: Any, want: Any) -> float:
    """The largest mean difference of a leaf of parameters."""
    params = (x[0] if isinstance(x, tuple) else x for x in (got, want))
    first, second = (jax.tree.leaves(p) for p in params)
    return max(
        float(np.abs(x.astype(np.float64) - y.astype(np.float64)).mean())
        for x, y in zip(first, second, strict=True)
    )


def kinds(tree: Any) -> list[str | None]:
    """The memory kind of each leaf."""
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def at_rest(setting: Setting) -> Training:
    """A training with parameters, state and residuals on the host, begun."""
    form = FORMS["residuals on the host"]
    training = Training(workload(form.work, setting.dry), form.mode(setting.dry))
    training.begin(begun(form.work, setting.dry))
    return training


def make(setting: Setting) -> Figures:
    """A model and its state made row by row, against made whole."""
    training = at_rest(setting)
    key = jax.random.key(3)
    got, want = oo.jit(training.init)(key), jax.jit(training.init)(key)
    found = ulps(on_numpy(got), on_numpy(want))
    placed = kinds(got) == kinds(training.carry)
    bound = 1  # As `tests/program/test_at_rest.py`.
    return {
        "ulps": found,
        "bound": f"{bound} ulps, and where it belongs",
        "within": found <= bound and placed,
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
    training = at_rest(setting)
    training.run(2)
    before, placed = on_numpy(training.carry), kinds(training.carry)
    tree: Any = training.carry
    ways: dict[Any, dict[str, Any]] = {"pinned_host": {}}
    try:
        import tensorstore

        del tensorstore
        folder = setting.folder / "states"
        shutil.rmtree(folder, ignore_errors=True)
        ways["disk"] = {"directory": folder}
    except ImportError:
        pass
    same = True
    for kind, options in ways.items():
        there = oo.offload_states(tree, memory_kind=kind, block=True, **options)
        tree = oo.reload_states(there, block=True)
        equal = jax.tree.map(np.array_equal, on_numpy(tree), before)
        same = same and all(jax.tree.leaves(equal)) and kinds(tree) == placed
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
    training = at_rest(setting)
    training.run(2)
    folder = setting.folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), training.carry)
        checkpointer.wait_until_finished()
        training.run(3)
        want = on_numpy(training.carry)
        template = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding),
            training.structs,
        )
        training.carry = checkpointer.restore(folder.resolve(), template)
    placed = kinds(training.carry) == kinds(training.structs)
    training.run(3)
    equal = jax.tree.map(np.array_equal, on_numpy(training.carry), want)
    return {
        "bound": "the same bits, restored where they belong",
        "within": placed and all(jax.tree.leaves(equal)),
    }


def tests(setting: Setting) -> Figures:
    """`pytest -m accelerator`, as far as it gets in its time."""
    command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "tests"]
    if setting.dry:
        command += ["-k", "peak"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_OF_TESTS,
        )
        text, ended = done.stdout + done.stderr, True
    except subprocess.TimeoutExpired as error:
        said: Any = error.stdout or b""  # Bytes, whatever was asked for.
        text = said if isinstance(said, str) else said.decode(errors="replace")
        ended = False
    (setting.folder / "tests.log").write_text(text)
    if "No module named pytest" in text:
        raise SkippedError("pytest is not installed")
    words = re.findall(r"^tests/.+? (PASSED|FAILED|SKIPPED|ERROR)", text, re.M)
    counts = {word.lower(): words.count(word) for word in dict.fromkeys(words)}
    failed = re.findall(r"^(tests/.+?) (?:FAILED|ERROR)", text, re.MULTILINE)
    return {
        "counts": counts,
        "ended": ended,
        "failed": failed,
        "bound": "all pass",
        "within": bool(counts) and not failed and ended,
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
