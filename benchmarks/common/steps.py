"""The train steps that the benchmarks compare, and compiling them for a target."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import optax_offload as oo
from benchmarks.common.workloads import Workload
from optax_offload import _plan, aot

Wrap = Callable[[Any], Any]


def as_it_is(x: Any) -> Any:
    """What is wrapped in nothing."""
    return x


class Mode(NamedTuple):
    """A way of training.

    Attributes:
      optimizer: Wraps the optimizer.
      step: Wraps the step that is made with it.
      is_ours: Whether the library has a part in it.
      on_host: A regex of the parameters that rest on the host; "" for none.
      base: Rules of the frozen base under adapters; () leaves it where it is.
    """

    optimizer: Wrap
    step: Wrap = as_it_is
    is_ours: bool = True
    on_host: str = ""
    base: tuple[oo.Rule, ...] = ()


def recipe(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """What the JAX tutorial, MaxText and others do: all in, update, all out."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def put(tree: Any, space: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, put(state, device), params)
        return updates, put(state, host)

    return optax.GradientTransformation(
        lambda params: put(inner.init(params), host), update
    )


# The workloads are sharded along last axes, which JAX's Auto mode does not tell: so
# their matrices may be sliced along the first.
OURS = functools.partial(oo.offload, rules=oo.Rule(".*", slice_axis=0))
# Gradients that have to wait for a norm need nothing more if they are computed twice.
TWICE = functools.partial(oo.stream, late_gradients="recompute")
STORED = functools.partial(oo.stream, late_gradients="host")
JITTED = functools.partial(oo.jit, residuals="host")
# Parameters of layers, scanned or of a Python loop.
LAYERS = r"(.*/)?layers(_\d+)?/.*"
# State of which moments are kept in 8 bits, all of it in host memory.
MOMENTS = ".*/(mu|nu)/.*"
INT8 = functools.partial(
    oo.offload,
    rules=[
        oo.Rule(MOMENTS, slice_axis=0, codec="int8"),
        oo.Rule(".*", slice_axis=0, optional=True),
    ],
)
# Four bytes for a bfloat16 parameter and its float32 copy, and two for its moments.
SIX_BYTES = functools.partial(
    oo.offload,
    rules=[
        oo.Rule(MOMENTS, codec="int8", optional=True),
        oo.Rule("(.*/)?master/.*", codec="bfloat16-remainder", optional=True),
        oo.Rule(".*", optional=True),
    ],
)
SIX_BYTES_IN_PARTS = functools.partial(SIX_BYTES, window_bytes=2**28)
INT8_ALONE = functools.partial(oo.low_bit, rules=MOMENTS)
# Matrices in few bits, and tables of the vocabulary in their own.
IN_FOUR_BITS = (oo.Rule(".*/kernel", codec="nf4"), oo.Rule("embedding|lm_head"))
IN_EIGHT_BITS = (oo.Rule(".*/kernel", codec="int8-linear"), IN_FOUR_BITS[1])
MODES: dict[str, Mode] = {
    "no offload": Mode(as_it_is, is_ours=False),
    "recipe": Mode(recipe, is_ours=False),
    "ours": Mode(OURS),
    "fused": Mode(OURS, oo.stream),
    "fused twice": Mode(OURS, TWICE),
    "fused stored": Mode(OURS, STORED),
    "fused alone": Mode(as_it_is, TWICE),
    "parameters": Mode(OURS, oo.stream, on_host=LAYERS),
    "residuals": Mode(
        OURS, functools.partial(oo.stream, residuals="host"), on_host=LAYERS
    ),
    # No row is loaded ahead, and updates are in parts.
    "least": Mode(
        functools.partial(OURS, window_bytes=2**23),
        functools.partial(oo.stream, residuals="host"),
        on_host=LAYERS,
    ),
    "six bytes": Mode(
        SIX_BYTES, functools.partial(oo.stream, residuals="host"), on_host=LAYERS
    ),
    "six bytes least": Mode(
        SIX_BYTES_IN_PARTS,
        functools.partial(oo.stream, residuals="host"),
        on_host=LAYERS,
    ),
    "six bytes all": Mode(
        SIX_BYTES_IN_PARTS,
        functools.partial(oo.stream, residuals="host"),
        on_host=".*",
    ),
    "nf4 base": Mode(OURS, JITTED, base=IN_FOUR_BITS),
    # Before Hopper a GPU's compiler hides no transfer unless it is told to.
    "nf4 base hidden": Mode(
        OURS, functools.partial(JITTED, latency_hiding="on"), base=IN_FOUR_BITS
    ),
    "int8 base": Mode(OURS, JITTED, base=IN_EIGHT_BITS),
    "int8": Mode(INT8),
    "int8 fused": Mode(INT8, oo.stream),
    "int8 alone": Mode(INT8_ALONE),
    "int8 fused alone": Mode(INT8_ALONE, TWICE),
}
USUAL_MODES = ["no offload", "recipe", "ours", "fused"]


def step_in_mode(make_step: Any, target: aot.Target, mode: Mode) -> oo.Step:
    """A step of `examples/models.py` as a mode has it."""
    step = _plan.StepFactory(make_step, target).step(mode.optimizer)
    if mode.base:
        adapters, state, base, tokens = step.args
        args = adapters, state, oo.place(base, mode.base), tokens
        options = {k: getattr(step, k) for k in ("donate_argnums", "out_shardings")}
        return oo.Step(mode.step(step.fn, **options), args)
    step = step._replace(fn=mode.step(step.fn))
    if not mode.on_host:
        return step
    params = oo.set_memory_kind(step.args[0], mode.on_host, "pinned_host")
    shardings = jax.tree.map(lambda x: x.sharding, params)
    return step._replace(
        args=(params, *step.args[1:]),
        out_shardings=(shardings, *step.out_shardings[1:]),
    )


def train_step(workload: Workload, tx: Any) -> Callable[[Any, Any, jax.Array], Any]:
    """The step of (params, state, x): gradients, an update, new params and state."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(workload.loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compile_step(
    workload: Workload, target: aot.Target, mode: Mode
) -> jax.stages.Compiled:
    """Compiles a train step, with params and state donated and kept where they are.

    Raises:
      aot.DoesNotFitError: it needs more memory than the target has.
    """
    params, x = workload.on(target)
    if mode.on_host:
        params = oo.set_memory_kind(params, mode.on_host, "pinned_host")
    tx = mode.optimizer(workload.optimizer)
    state = oo.eval_shape(tx.init, params)
    return aot.compile(
        mode.step(train_step(workload, tx)),
        *(params, state, x),
        target=target,
        out_shardings=jax.tree.map(lambda s: s.sharding, (params, state)),
        donate_argnums=(0, 1),
    )


def library_digest(mode: str) -> str | None:
    """A digest of the library: results of it are only good for what it is.

    None for a mode in which it has no part.
    """
    if not MODES[mode].is_ours:
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(oo.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
