"""Primitives that have no rows, each with the reason why not."""

from __future__ import annotations

from optax_offload._rows.rules.registry import RowRule, rule


class Refused(RowRule):
    """A leaf that goes through the equation is updated whole."""


@rule("cholesky_update", "select_and_scatter")
class Single(Refused):
    """`jax.vmap` has no rule for it, so that it is never of several rows."""


@rule("rng_bit_generator", "rng_uniform")
class Generator(Refused):
    """One state makes the numbers of all rows: a slice's would be others."""


@rule("conv_general_dilated")
class Convolution(Refused):
    """`jax.vmap` makes channels or images of rows, so that they are no axis."""


# fmt: off
_COLLECTIVES = (
    "all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum",
    "ragged_all_to_all",
)
# fmt: on


@rule(*_COLLECTIVES)
class Collective(Refused):
    """In the body of a `jax.shard_map`, which is an equation without a rule."""


@rule("after_all", "create_token", "dce_sink")
class Ordered(Refused):
    """Without a value: for order, or to be kept."""
