"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from optax_offload._rows.rules.registry import (
    Axes,
    Axis,
    NotRowLocalError,
    RowRule,
    Rows,
    only,
    rule,
)


@rule("dot_general")
class DotGeneral(RowRule):
    """Rows have to be a batch axis of both operands."""

    def forward(self, e: jex.JaxprEqn, ins: Sequence[Axis], rows: Rows) -> Axes:
        _, batch = e.params["dimension_numbers"]
        side = 0 if ins[0] is not None else 1
        if ins[side] not in batch[side]:
            raise NotRowLocalError(e.primitive.name)
        at = batch[side].index(ins[side])
        axes = [batch[0][at], batch[1][at]]
        if ins[1 - side] not in (None, axes[1 - side]):
            raise NotRowLocalError(e.primitive.name)
        return Axes(axes, [at])

    def backward(self, e: jex.JaxprEqn, outs: Sequence[Axis], rows: Rows) -> list[Axis]:
        _, batch = e.params["dimension_numbers"]
        at = only(outs, e)
        if at >= len(batch[0]):
            raise NotRowLocalError(e.primitive.name)
        return [batch[0][at], batch[1][at]]
