"""`master_weights`: float32 weights in the state, for parameters in fewer bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_offload._ground import trees
from optax_offload._ground.extra_args import Transformation, as_transformation
from optax_offload._low_bit.codecs import Bfloat16Remainder


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      master: The parameters in float32; `optax.MaskedNode` where they are so already.
      inner_state: The state of the transformation inside.
    """

    master: Any
    inner_state: Any


def master_weights(
    inner: Transformation,
) -> optax.GradientTransformationExtraArgs:
    """Updates float32 copies of parameters that are kept in fewer bits.

    A bfloat16 parameter loses an update of less than a 256th of itself. Its float32
    copy does not. The copy is in the state, ``inner`` updates it, and the parameter is
    the rounded copy. With `low_bit` and ``"bfloat16-remainder"`` the state stores only
    the half that the parameter lacks: 4 bytes for both.

    Args:
      inner: any optax transformation. It sees float32 gradients and float32 parameters.
        `optax.apply_if_finite` goes inside: around this it takes no bfloat16 gradients.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its updates are float32; added to the
      parameters by `optax.apply_updates` they give the rounded copies. Parameters that
      shrink to less than 2**-16 of themselves in one step may differ by a float32
      rounding of what they were, and then so do their copies.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: from ``update``, ``params`` were not given.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.master_weights(optax.sgd(1e-3))
      >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
      >>> state = tx.init(params)
      >>> for _ in range(8):  # Steps that a bfloat16 alone would not see.
      ...     updates, state = tx.update({"w": jnp.ones(4)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["w"][0]
      Array(0.992188, dtype=bfloat16)
    """
    inner = as_transformation(inner, "master_weights")

    def init(params: optax.Params) -> MasterWeightsState:
        master = jax.tree.map(_master, params)
        return MasterWeightsState(master, inner.init(_full(master, params)))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_weights needs params: tx.update(grads, state, params)"
            )
        weights = _full(state.master, params)
        gradients = jax.tree.map(
            lambda g, w: g.astype(w.dtype) if _is_short(g) else g, updates, weights
        )
        updates, inner_state = inner.update(
            gradients, state.inner_state, weights, **extra_args
        )
        new = optax.apply_updates(weights, updates)
        updates = jax.tree.map(_difference, params, updates, new)
        landed = optax.apply_updates(params, updates)
        master = jax.tree.map(_kept, params, new, landed)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def master_paths(state: Any) -> set[str]:
    """The paths of all master weights in a state."""
    paths: set[str] = set()
    nodes, _ = trees.flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, MasterWeightsState)
    )
    for keys, node in nodes:
        if isinstance(node, MasterWeightsState):
            inside, _ = trees.flatten_with_path(node.master)
            key = jax.tree_util.GetAttrKey("master")
            paths.update(trees.path_string((*keys, key, *k)) for k, _ in inside)
    return paths


def _is_short(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def _master(p: Any) -> Any:
    return jnp.asarray(p).astype(jnp.float32) if _is_short(p) else optax.MaskedNode()


def _full(master: Any, params: Any) -> Any:
    """The parameters, in float32 where there are copies."""
    return jax.tree.map(
        lambda p, m: p if isinstance(m, optax.MaskedNode) else m, params, master
    )


def _kept(p: Any, new: Any, landed: Any) -> Any:
    """The weight of which the parameter will be the rounded one.

    A parameter that all but vanishes may become a neighbour of the rounded weight, or
    zero: one float32 addition does not lead everywhere. Of another parameter the
    remainder would make another weight, and of zero NaN.
    """
    if not _is_short(p):
        return optax.MaskedNode()
    if p.dtype != jnp.bfloat16:
        return new
    got, wanted = (
        lax.bitcast_convert_type(x, jnp.uint16)
        for x in (landed, Bfloat16Remainder.upper(new))
    )
    # Not by a cast to float32, which XLA may take back together with the one before.
    bits = lax.shift_left(got.astype(jnp.uint32), jnp.uint32(16))
    return jnp.where(got == wanted, new, lax.bitcast_convert_type(bits, jnp.float32))


def _difference(p: Any, update: Any, new: Any) -> Any:
    """Returns the update from a parameter to the new one."""
    if not _is_short(p):
        return update
    if p.dtype == jnp.bfloat16:
        rounded = Bfloat16Remainder.upper(new)
    else:
        rounded = new.astype(p.dtype)
    return rounded.astype(jnp.float32) - p.astype(jnp.float32)
