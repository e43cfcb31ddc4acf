"""`fuse_backward`: the update inside the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from optax_offload._backward import emit
from optax_offload._backward.plan import Held, Plan, plan
from optax_offload._backward.step import take_apart


def fuse_backward(
    step: Callable[..., Any], how: Held | None = None
) -> Callable[..., Any]:
    @functools.wraps(step)
    def fused(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(step, return_shape=True)(*args, **kwargs)
        found = plan(take_apart(closed), how)
        if not found.scans:
            return step(*args, **kwargs)
        results = emit.run(found, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return fused
