"""Decompositions and solvers, of one matrix for each index of leading axes."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from optax_offload._program import shape
from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    only,
    rule,
)

# fmt: off
_OF_MATRICES = (
    "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product",
    "lu", "ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve",
    "tridiagonal",
)
# fmt: on


@rule(*_OF_MATRICES)
class Matrices(RowRule):
    """The first operand is a matrix; all have the same axes in front, as rows are."""

    # Axes of the first operand that are not leading ones.
    own_axes = 2

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        axis = only(ins, e)
        self._check_leads(e, axis)
        return Axes([axis] * len(e.invars), [axis] * len(e.outvars))

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        axis = only(outs, e)
        self._check_leads(e, axis)
        return [axis] * len(e.invars)

    def _check_leads(self, e: jex.JaxprEqn, axis: int) -> None:
        if axis >= len(shape(e.invars[0])) - self.own_axes:
            raise NotRowLocalError(e.primitive.name)


@rule("lu_pivots_to_permutation", "tridiagonal_solve")
class Vectors(Matrices):
    """The first operand is a vector: pivots, or a diagonal."""

    own_axes = 1
