"""Random keys, one for each row."""

from __future__ import annotations

from jax.extend import core as jex

from optax_offload._rows.rules.elementwise import Elementwise
from optax_offload._rows.rules.registry import Rows, Unary, rule


@rule("random_bits", "random_split", "random_unwrap", "random_wrap", "random_seed")
class RandomBits(Unary):
    """Each row needs a key of its own, as one key for all gives a slice other bits.

    The axes that a key's results have more or fewer are the last ones.
    """

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return axis


@rule("random_fold_in")
class RandomFoldIn(Elementwise):
    """A key for each row, or a number for each row, or both."""

    arithmetic = False
