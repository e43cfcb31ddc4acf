"""Small train steps, traced and taken apart, with what of them rests on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import EVERYTHING
from jax import lax
from jax.extend import core as jex

import optax_offload as oo
from optax_offload._places import memory
from optax_offload._program import Step, take_apart
from optax_offload._schedule.follow import Scan

LAYERS, WIDTH = 6, 8


def offloaded(tx: Any, **options: Any) -> Any:
    """An optimizer, all of whose state that is no number rests on the host."""
    return oo.offload(tx, EVERYTHING, **options)


def at_rest(tree: Any) -> Any:
    """The types of a tree, all arrays with axes on the host."""
    return jax.tree.map(
        lambda x: memory.host_type(_type(x)) if x.shape else _type(x), tree
    )


def _type(x: Any) -> Any:
    return jax.typeof(jax.ShapeDtypeStruct(x.shape, x.dtype))


def on_device(tree: Any) -> Any:
    """The types of a tree, all on the device."""
    return jax.tree.map(_type, tree)


def stack(layers: int = LAYERS, width: int = WIDTH) -> Any:
    """The type of layers that are scanned over."""
    return jax.ShapeDtypeStruct((layers, width, width), jnp.float32)


def loss(w: Any, x: Any) -> Any:
    """A scan over layers, and a number."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return jnp.sum(h**2)


def two_matrices(params: Any, x: Any) -> Any:
    """A scan over layers of two matrices; the backward pass meets `b` first."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w["a"]) @ w["b"], None

    return jnp.sum(lax.scan(layer, x, params)[0] ** 2)


def unrolled(layers: Any, x: Any) -> Any:
    """The mean square of what layers in a Python loop make."""
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def matrices(count: int = 5, width: int = 16) -> list[Any]:
    """The parameters of so many layers of such a loop."""
    return [jnp.full((width, width), 0.1 * (i + 1)) for i in range(count)]


def train_step(
    tx: Any, loss: Callable[..., Any] = loss, *, value: bool = False
) -> Callable[..., Any]:
    """Gradients, an update, and new parameters; the loss too if its value is wanted."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        if value:
            number, grads = jax.value_and_grad(loss)(params, *batch)
        else:
            number, grads = None, jax.grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), state
        return (*new, number) if value else new

    return step


def traced(step: Callable[..., Any], types: Sequence[Any]) -> jex.ClosedJaxpr:
    """A step, as if all of its arguments were on the device."""
    with memory.as_on_device(True):
        return jax.make_jaxpr(step)(*map(on_device, types))


def step_of(fn: Callable[..., Any], *types: Any) -> Step:
    """The step of a function that moves values itself."""
    return take_apart(jax.make_jaxpr(fn)(*types))


def scans_of(step: Step) -> list[Scan]:
    """The scans of a step, in order."""
    return [
        Scan(i, e)
        for i, e in enumerate(step.program.equations)
        if e.primitive.name == "scan"
    ]


def taken_apart(step: Callable[..., Any], *types: Any, **options: Any) -> Step:
    """A step of arguments of such types, which say where they rest.

    Args:
      step: The step.
      *types: A tree of types for each argument.
      **options: Options of `take_apart`.
    """
    leaves = jax.tree.leaves(types)
    return take_apart(traced(step, types), leaves, **options)


def trained(
    inner: Any,
    params: Any = None,
    *,
    params_at_rest: bool = False,
    loss: Callable[..., Any] = loss,
    wrap: Callable[[Any], Any] = offloaded,
    residuals: bool = False,
) -> Step:
    """A step of scanned layers, whose state rests on the host.

    Args:
      inner: The optimizer.
      params: The types of its parameters; one stack by default.
      params_at_rest: Whether they rest on the host too.
      loss: The loss of parameters and of hidden values.
      wrap: Offloads the optimizer.
      residuals: Whether residuals rest on the host.
    """
    params = stack() if params is None else params
    tx = wrap(inner)
    state = at_rest(jax.eval_shape(inner.init, params))
    x = on_device(jax.ShapeDtypeStruct((2, WIDTH), jnp.float32))
    params = (at_rest if params_at_rest else on_device)(params)
    return taken_apart(train_step(tx, loss), params, state, x, residuals=residuals)
