"""`fuse_backward`: the update inside the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import jax
import numpy as np
from jax.extend import core as jex

from optax_offload import _trees
from optax_offload._emit import streamed
from optax_offload._errors import warn
from optax_offload._program import take_apart
from optax_offload._schedule import FusedStep, Held, plan, refusals

P = ParamSpec("P")
R = TypeVar("R")

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.Ref)


def fuse_backward(step: Callable[P, R], *, held: Held = "auto") -> Callable[P, R]:
    """Moves updates into the backward pass, so that gradients never exist.

    Where layers are scanned (`nn.scan`, `nnx.scan`, `lax.scan`), the backward pass is a
    scan that stacks the gradients of all layers, and the update begins when the last is
    there. Where the equations from such a gradient to new parameters and new state
    treat every layer alone, as those of most optimizers do, they are moved into the
    scan: a layer is updated in the iteration that computes its gradient, in place.
    Offloaded state of that layer is loaded and stored beside it. No equation is
    changed, but the compiler joins others than before, and may round otherwise.

    It is as useful for state that stays on the device. `jit` does it unasked; this is
    for trainers that call `jax.jit` themselves.

    Args:
      step: A train step: a function that computes gradients, updates and new
        parameters, and can be traced.
      held: What to do with gradients whose update needs all of them first, as clipping
        by the global norm does. ``"store"`` has them wait in host memory: exact, at the
        price of their bytes over the link each way. ``"twice"`` runs the backward pass
        twice, the first time for the norm alone. ``"auto"`` takes what a model of an
        accelerator and its link has for faster, and leaves the gradients of steps
        without offloaded state, for which either costs time. ``"leave"`` leaves all.

    Returns:
      A function of the same arguments and results. Where nothing can be fused, it is
      the step, equation for equation. `jit(step).schedule(*args)` tells what is fused,
      and why the rest is not.

    Raises:
      ValueError: ``held`` is none of these.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3))
      >>> def step(params, state, x):
      ...     layer = lambda h, w: (jnp.tanh(h @ w), None)
      ...     loss = lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0])
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.ones((4, 128, 128))
      >>> step = jax.jit(oo.fuse_backward(step), donate_argnums=(0, 1))
      >>> params, state = step(params, tx.init(params), jnp.ones((8, 128)))
      >>> state[0].mu.sharding.memory_kind
      'pinned_host'
    """
    check_held(held, "held")
    untyped: Callable[..., Any] = step

    @functools.wraps(step)
    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)]

        def flat(*values: Any) -> Any:
            given = list(leaves)
            for i, x in zip(traced, values, strict=True):
                given[i] = x
            args, kwargs = jax.tree.unflatten(structure, given)
            return untyped(*args, **kwargs)

        values = [leaves[i] for i in traced]
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*values)
        found = plan_of(closed, held)
        warn_of_refusals(found, "held", shape)
        if not found.scans:
            return step(*args, **kwargs)
        return jax.tree.unflatten(jax.tree.structure(shape), streamed(found, values))

    return fused


def check_held(held: object, name: str) -> None:
    """Raises if this says nothing of gradients that have to wait."""
    if held not in get_args(Held):
        allowed = ", ".join(map(repr, get_args(Held)))
        raise ValueError(f"{name} is {held!r}; it must be one of {allowed}")


def plan_of(closed: jex.ClosedJaxpr, held: Held | Literal[False]) -> FusedStep:
    """What of a step is fused, given its jaxpr; where ``held`` is False, nothing."""
    step = take_apart(closed)
    return plan(step, held) if held else FusedStep(step, (), (), False)


def warn_of_refusals(found: FusedStep, option: str, results: Any) -> None:
    """Warns where gradients do not wait in the way that was asked for by name.

    Args:
      found: What is fused of a step.
      option: The name of the option by which it was asked for.
      results: A tree of the step's results, or of what stands for them.
    """
    paths = [path for path, _ in _trees.leaves_with_paths(results)]
    for message in refusals(found, option, paths):
        warn(message)
