"""Equations for a row, apart from what moves the row."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend import core as jex

from optax_offload._backward.step import is_transfer
from optax_offload._jaxpr import variables
from optax_offload._update import RowLocal


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Equations for a row, with all that they take and give on the device.

    Attributes:
      rows: The equations, without those that move something.
      sources: For each of its inputs the variable of the step that it is loaded from.
      targets: For each of its outputs the variable of the step that is stored.
    """

    rows: RowLocal
    sources: tuple[jex.Var, ...]
    targets: tuple[jex.Var, ...]


def kernel(rows: RowLocal) -> Kernel:
    """Takes transfers out of equations."""
    names: dict[jex.Var, jex.Var] = {}
    for e in rows.equations:
        if not is_transfer(e):
            continue
        (before,), (after,) = variables(e.invars), e.outvars
        if before in rows.inputs and before not in names:
            names[before] = after
        names.setdefault(after, names.get(before, before))
        if names[after] is after:
            del names[after]

    def name(a: Any) -> Any:
        return names.get(a, a) if isinstance(a, jex.Var) else a

    equations = tuple(
        e.replace(invars=[name(a) for a in e.invars])
        for e in rows.equations
        if not is_transfer(e)
    )
    device = dataclasses.replace(
        rows,
        equations=equations,
        inputs=tuple(map(name, rows.inputs)),
        outputs=tuple(map(name, rows.outputs)),
    )
    return Kernel(device, rows.inputs, rows.outputs)
