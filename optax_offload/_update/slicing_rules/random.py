"""Random keys, one for each row."""

from __future__ import annotations

from jax.extend import core as jex

from optax_offload._jaxpr import shape
from optax_offload._update.slicing_rules.elementwise import Elementwise
from optax_offload._update.slicing_rules.registry import (
    Rows,
    Unary,
    rule,
)


class _OfKeys(Unary):
    """Each key is used for itself; what one makes has further axes, or fewer."""

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        keys = min(len(shape(e.invars[0])), len(shape(e.outvars[0])))
        return axis if axis < keys else None


@rule("random_bits", "random_split", "random_unwrap", "random_wrap", "random_seed")
class RandomBits(_OfKeys):
    """From a key for each row: from one key for all, a slice's bits would be others."""


@rule("random_fold_in")
class RandomFoldIn(Elementwise):
    """A key for each row, or a number for each row, or both."""

    arithmetic = False
