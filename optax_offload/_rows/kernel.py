"""Equations for a row, apart from what moves the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._program import Builder, bound, is_store, is_transfer, variables
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


def body_on_device(
    body: jex.ClosedJaxpr, loaded: Collection[int], stored: Collection[int]
) -> jex.ClosedJaxpr:
    """The body of a scan that others load and store some rows for.

    Args:
      body: The body, which loads and stores them itself.
      loaded: The positions of the arguments that it takes on the device.
      stored: The positions of the results that it leaves there.
    """
    jaxpr, builder = body.jaxpr, Builder()
    invars = list(jaxpr.invars)
    for i in loaded:
        invars[i] = jex.Var(_memory.device_type(jaxpr.invars[i].aval))
    given = {a: b for a, b in bound(jaxpr.invars, invars).items() if a is not b}
    before: dict[Any, Any] = {}
    for e in jaxpr.eqns:
        of = [given[a] for a in variables(e.invars) if a in given]
        if of:
            builder.rename(e.outvars, of)
            continue
        if is_store(e):
            before[e.outvars[0]] = e.invars[0]
        builder.add(e)
    outvars = list(jaxpr.outvars)
    for k in stored:
        outvars[k] = before[outvars[k]]
    results = builder.read_all(outvars)
    changed = jaxpr.replace(invars=invars, eqns=builder.equations, outvars=results)
    return jex.ClosedJaxpr(changed, body.consts)
