"""Random keys, one for each row."""

from __future__ import annotations

from jax.extend import core as jex

from optax_offload._rows.rules.elementwise import Elementwise
from optax_offload._rows.rules.registry import Rows, Unary, rule


@rule("random_bits", "random_split", "random_unwrap", "random_wrap", "random_seed")
class RandomBits(Unary):
    """From a key for each row: from one key for all, a slice's bits would be others.

    What a key makes has its further axes last, or fewer there.
    """

    def to(self, e: jex.JaxprEqn, axis: int, rows: Rows) -> int | None:
        return axis


@rule("random_fold_in")
class RandomFoldIn(Elementwise):
    """A key for each row, or a number for each row, or both."""

    arithmetic = False
