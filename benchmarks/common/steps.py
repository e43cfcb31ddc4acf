"""The train steps that the benchmarks compare, and compiling them for a target."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Layout, with_layout_constraint

import optax_offload as oo
from benchmarks.common.alone import ROOT
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
      streamed: Options of `oo.jit`; None for a step as it is.
      is_ours: Whether the library has a part in it.
      on_host: A regex of the parameters that rest on the host; "" for none.
      base: Rules of the frozen base under adapters; () leaves it where it is.
    """

    optimizer: Wrap
    streamed: Mapping[str, Any] | None = None
    is_ours: bool = True
    on_host: str = ""
    base: tuple[oo.Rule, ...] = ()

    def jit(self, fn: Callable[..., Any], **options: Any) -> Any:
        """A step, jitted as a user would: by `oo.jit`, if it is streamed."""
        if self.streamed is None:
            return jax.jit(fn, **options)
        return oo.jit(fn, **self.streamed, **options)


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


def adam(g: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
    """An update of Adam's, without the correction of its first steps."""
    mu = 0.9 * mu + 0.1 * g
    nu = 0.999 * nu + 0.001 * g * g
    return -1e-3 * mu / (jnp.sqrt(nu) + 1e-8), mu, nu


def updated_on_host(_: Any) -> optax.GradientTransformation:
    """Adam, whose moments are in host memory and updated there (F70).

    Each leaf's update is a host computation, and the next leaf's gradient waits on the
    device for it. (By blocks of rows it is worse: F72.)
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    # Until JAX 0.11 it has another name.
    run_on: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    places = {"out_memory_spaces": (device, host, host)}
    run: Any = run_on(adam, compute_type="device_host", **places)

    def init(params: Any) -> Any:
        zeros = lambda p: jax.device_put(jnp.zeros_like(p), host)  # noqa: E731
        return jax.tree.map(zeros, params), jax.tree.map(zeros, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        results: list[Any] = []
        for g, *moments in zip(leaves, *map(jax.tree.leaves, state), strict=True):
            if results:
                g, _ = lax.optimization_barrier((g, results[-1][0]))
            # A GPU's compiler fails unless the layout is named (F26).
            g = with_layout_constraint(g, Layout(tuple(range(g.ndim))))
            results.append(run(jax.device_put(g, host), *moments))
        u, *state = (structure.unflatten(r) for r in zip(*results, strict=True))
        return u, tuple(state)

    return optax.GradientTransformation(init, update)


# The workloads are sharded along last axes, which JAX's Auto mode does not tell: so
# their matrices may be sliced along the first.
OURS = functools.partial(oo.offload, rules=oo.Rule(".*", slice_axis=0))
# Gradients that have to wait for a norm need nothing more if they are computed twice.
TWICE = {"late_gradients": "recompute"}
AT_REST = {"residuals": "host"}
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
MODES: dict[str, Mode] = {
    "no offload": Mode(as_it_is, is_ours=False),
    "recipe": Mode(recipe, is_ours=False),
    "on the host": Mode(updated_on_host, is_ours=False),
    "ours": Mode(OURS),
    "fused": Mode(OURS, {}),
    "fused twice": Mode(OURS, TWICE),
    "fused stored": Mode(OURS, {"late_gradients": "host"}),
    "fused alone": Mode(as_it_is, TWICE),
    "parameters": Mode(OURS, {}, on_host=LAYERS),
    "residuals": Mode(OURS, AT_REST, on_host=LAYERS),
    # No row is loaded ahead, and updates are in parts.
    "least": Mode(functools.partial(OURS, window_bytes=2**23), AT_REST, on_host=LAYERS),
    "six bytes": Mode(SIX_BYTES, AT_REST, on_host=LAYERS),
    "six bytes least": Mode(SIX_BYTES_IN_PARTS, AT_REST, on_host=LAYERS),
    "six bytes all": Mode(SIX_BYTES_IN_PARTS, AT_REST, on_host=".*"),
    "nf4 base": Mode(OURS, AT_REST, base=IN_FOUR_BITS),
    "int8 fused": Mode(INT8, {}),
    "int8 alone": Mode(INT8_ALONE),
    "int8 fused alone": Mode(INT8_ALONE, TWICE),
}
USUAL_MODES = ["no offload", "recipe", "ours", "fused"]


def step_in_mode(make_step: Any, target: aot.Target, mode: Mode) -> oo.Step:
    """A step of `examples/models.py` as a mode has it."""
    step = _plan.StepFactory(make_step, target).step(mode.optimizer)
    args, out_shardings = step.args, step.out_shardings
    if mode.base:
        adapters, state, base, tokens = args
        args = adapters, state, oo.place(base, mode.base), tokens
    elif mode.on_host:
        params = oo.set_memory_kind(args[0], mode.on_host, "pinned_host")
        shardings = jax.tree.map(lambda x: x.sharding, params)
        args, out_shardings = (params, *args[1:]), (shardings, *out_shardings[1:])
    jitted = mode.jit(
        step.fn, donate_argnums=step.donate_argnums, out_shardings=out_shardings
    )
    return oo.Step(jitted, args)


def train_step(workload: Workload, tx: Any) -> Callable[[Any, Any, jax.Array], Any]:
    """The step of (params, state, x): gradients, an update, new params and state."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(workload.loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def of_workload(
    workload: Workload, params: Any, x: Any, mode: Mode
) -> tuple[Any, tuple[Any, Any, Any]]:
    """A mode's optimizer, and the arguments of its step.

    Args:
      workload: What is trained.
      params: Its parameters, as they are placed without offload.
      x: Its input.
      mode: The way of training.
    """
    if mode.on_host:
        params = oo.set_memory_kind(params, mode.on_host, "pinned_host")
    tx: Any = mode.optimizer(workload.optimizer)
    return tx, (params, oo.eval_shape(tx.init, params), x)


def compile_step(
    workload: Workload, target: aot.Target, mode: Mode
) -> jax.stages.Compiled:
    """Compiles a train step, with params and state donated and kept where they are.

    Raises:
      aot.DoesNotFitError: it needs more memory than the target has.
    """
    tx, args = of_workload(workload, *workload.on(target), mode)
    jitted = mode.jit(
        train_step(workload, tx),
        out_shardings=jax.tree.map(lambda s: s.sharding, args[:2]),
        donate_argnums=(0, 1),
    )
    return aot.compile(jitted, *args, target=target)


def bytes_on_device(tree: Any) -> int:
    """Those of its arrays that are in device memory, on each device."""
    rows = oo.memory_report(tree).rows
    return sum(r.nbytes_per_device for r in rows if r.actual == "device")


def digest(mode: str) -> str:
    """A digest of what results of a mode depend on: what is trained, and the library.

    Of modes in which the library has no part, results are good for all versions of it.
    """
    return digest_of(
        "benchmarks/common", "examples", *["optax_offload"] * MODES[mode].is_ours
    )


def digest_of(*folders: str) -> str:
    """A digest of the Python files in folders of the repository."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
