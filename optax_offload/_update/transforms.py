"""What `jax.vmap`, `jax.jvp` and `jax.grad` make of an update as a whole.

Taken apart, as JAX would, an update has slices of host buffers at positions that differ
by member of a population, and tangents that are written into buffers that are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_offload import _memory
from optax_offload._update import keys

Function = Callable[..., tuple[Any, Any]]
Stream = Callable[[Function, tuple[Any, ...]], tuple[Any, Any]]


def transformable(
    fn: Function, stream: Stream, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Evaluates ``stream(fn, args)``, in a way that JAX can transform.

    - Under `jax.vmap` the update of a whole population is streamed, as one update whose
      batch axis is the leading axis of every leaf; so are its rules applied.
    - Under `jax.jvp` the update is streamed, and tangents are computed beside it, on
      the device as a whole.
    - Under `jax.grad` it raises: what reverse mode keeps would be on the device, which
      is what offloading is to avoid.

    Args:
      fn: A function that returns (updates, state).
      stream: Evaluates such a function with arguments wherever they are.
      args: The arguments, pytrees of arrays.

    Raises:
      TypeError: When a result is differentiated in reverse mode.
    """
    # JAX's check of keys takes those that come out of a function with a rule of its own
    # for used ones: their data goes in and out.
    given = keys.Places.of(args)
    made: list[keys.Places] = []

    def leave(out: tuple[Any, Any]) -> tuple[Any, Any]:
        made[:] = [keys.Places.of(out)]
        return keys.data(out)

    @jax.custom_batching.custom_vmap
    def run(*data: Any) -> tuple[Any, Any]:
        return leave(stream(fn, given.keys(data)))

    @run.def_vmap
    def batched(axis_size: int, in_batched: list[Any], *data: Any) -> Any:
        axes = tuple(jax.tree.map(lambda b: 0 if b else None, in_batched))
        population = jax.vmap(fn, in_axes=axes, axis_size=axis_size)
        out = leave(transformable(population, stream, given.keys(data)))
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(lambda *data: run(*data))

    @differentiable.defjvp
    def forward(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        def on_data(*data: Any) -> tuple[Any, Any]:
            return keys.data(fn(*given.keys(data)))

        out = differentiable(*primals)
        on_device = jax.tree.map(_on_device, (primals, tangents))
        _, out_tangents = jax.jvp(on_data, *on_device)
        out_tangents = jax.tree.map(_forward_only, out_tangents)
        return out, jax.tree.map(_beside, out_tangents, out)

    data = differentiable(*keys.data(args))
    return made[0].keys(data)


def _is_float0(x: Any) -> bool:
    """Whether it is the tangent of an integer or of a random key."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _on_device(x: Any) -> Any:
    traced = isinstance(x, jax.Array) and not _is_float0(x)
    return _memory.transfer(x, "device") if traced else x


def _beside(tangent: Any, primal: Any) -> Any:
    """A tangent in the memory of what it is the tangent of."""
    if _is_float0(tangent):
        return tangent
    return _memory.transfer(tangent, _memory.kind_of_type(jax.typeof(primal)))


def _forward_only(tangent: Any) -> Any:
    """The tangent, in a way that forbids its transposition."""
    if _is_float0(tangent):
        return np.zeros(tangent.shape, jax.dtypes.float0)

    def refuse(residuals: Any, cotangent: Any) -> Any:
        raise TypeError(
            "an offloaded update is differentiated in reverse mode (jax.grad, "
            "jax.vjp), for which all of its state would have to stay on the device. "
            "Differentiate through the inner optimizer, before it is given to "
            "offload(...), or in forward mode (jax.jvp, jax.jacfwd)"
        )

    return jax.custom_derivatives.linear_call(lambda _, t: t, refuse, (), tangent)
