"""Equations for a row, apart from what moves the row."""

from __future__ import annotations

import dataclasses

from jax.extend import core as jex

from optax_offload._program import Builder, is_transfer, variables
from optax_offload._rows import RowLocal


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Equations for a row, with all that they take and give on the device.

    Attributes:
      rows: The equations, without those that move something.
      sources: The variables of the step that its inputs are loaded from, one for each.
      targets: The variables of the step that its outputs are stored to, one for each.
    """

    rows: RowLocal
    sources: tuple[jex.Var, ...]
    targets: tuple[jex.Var, ...]


def kernel_of(rows: RowLocal) -> Kernel:
    """Takes transfers out of equations."""
    builder = Builder()
    for e in filter(is_transfer, rows.equations):
        (before,), (after,) = variables(e.invars), e.outvars
        if before in rows.inputs and builder.read(before) is before:
            builder.rename([before], [after])
        else:
            builder.rename([after], [builder.read(before)])
    for e in rows.equations:
        if not is_transfer(e):
            builder.add(e)

    def name(v: jex.Var) -> jex.Var:
        found = builder.read(v)
        assert isinstance(found, jex.Var)
        return found

    device = dataclasses.replace(
        rows,
        equations=tuple(builder.equations),
        inputs=tuple(map(name, rows.inputs)),
        outputs=tuple(map(name, rows.outputs)),
    )
    return Kernel(device, rows.inputs, rows.outputs)
