"""Updates of optax optimizers as the planner sees them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from optax_offload import _program
from optax_offload._ground import trees
from optax_offload._program import Input, Output, Update
from optax_offload._schedule import schedule as scheduled


def traced(
    tx: Any,
    params: Any,
    *,
    slice_axis: int | None = None,
    path: str = ".*",
    scalars: bool = False,
    in_place: bool = True,
) -> Update:
    """An update of an optimizer whose chosen state is on the host.

    Args:
      tx: the optimizer.
      params: its parameters, or their types.
      slice_axis: of all inputs.
      path: a regex that the path of a leaf matches, if it goes.
      scalars: whether leaves without axes go too.
      in_place: whether outputs replace inputs.
    """
    state = jax.eval_shape(tx.init, params)
    update = lambda g, s, p: tx.update(g, s, p)  # noqa: E731
    closed, out = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    flat_out = jax.tree_util.tree_flatten_with_path(out)[0]
    first = len(jax.tree.leaves(params))

    def on_host(name: str, x: Any) -> bool:
        return bool((x.ndim or scalars) and re.fullmatch(path, name))

    inputs = [Input(False, slice_axis)] * first
    inputs += [
        Input(on_host(name, x), slice_axis)
        for name, x in trees.leaves_with_paths(state)
    ]
    inputs += [Input(False, slice_axis)] * first
    outputs: list[Output] = []
    for k, (keys, x) in enumerate(flat_out):
        name = trees.path_string(keys[1:])
        stored = k >= first and on_host(name, x)
        kind = "pinned_host" if stored else "device"
        outputs.append(Output(name, kind, k if in_place else None, k < first))
    return Update(_program.flatten(closed), tuple(inputs), tuple(outputs))


def plan_of(
    tx: Any, params: Any, *, window_bytes: int | None = None, **options: Any
) -> tuple[Any, list[list[str]]]:
    """The schedule of an update whose non-scalar state is all on the host.

    Args:
      tx: the optimizer.
      params: the types of its parameters.
      window_bytes: how much may be on the device at once.
      options: of `traced`.

    Returns:
      The schedule, and for each of its groups the paths of the updates in it.
    """
    update = traced(tx, params, **options)
    schedule = scheduled(update, window_bytes)
    names = [
        [update.outputs[k].path for k in g.outputs if update.outputs[k].is_update]
        for g in schedule.groups
    ]
    return schedule, names


def stacked(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """A leaf of each shape."""
    return {f"w{i}": jax.ShapeDtypeStruct(s, dtype) for i, s in enumerate(shapes)}
