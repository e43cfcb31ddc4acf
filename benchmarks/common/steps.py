"""The train steps that the benchmarks compare, and compiling them for a target."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

import optax_offload as oo
from benchmarks.common.workloads import Workload
from optax_offload import aot

Wrap = Callable[[Any], Any]


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
MODES: dict[str, Wrap] = {
    "no offload": lambda tx: tx,
    "recipe": recipe,
    "ours": OURS,
}


def train_step(workload: Workload, tx: Any) -> Callable[[Any, Any, jax.Array], Any]:
    """The step of (params, state, x): gradients, an update, new params and state."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(workload.loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compile_step(
    workload: Workload, target: aot.Target, wrap: Wrap
) -> jax.stages.Compiled:
    """Compiles a train step, with params and state donated and kept where they are.

    Raises:
      aot.DoesNotFitError: it needs more memory than the target has.
    """
    params, x = workload.on(target)
    tx = wrap(workload.optimizer)
    state = oo.eval_shape(tx.init, params)
    return aot.compile(
        train_step(workload, tx),
        *(params, state, x),
        target=target,
        out_shardings=jax.tree.map(lambda s: s.sharding, (params, state)),
        donate_argnums=(0, 1),
    )


def library_digest() -> str:
    """A digest of the library: its results are only good for what it is."""
    digest = hashlib.sha256()
    for path in sorted(Path(oo.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
