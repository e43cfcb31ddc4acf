"""Gradients that are used up row by row, and what is done with them, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._backward.rows import Component
from optax_offload._jaxpr import variables
from optax_offload._update import RowLocal


@dataclasses.dataclass(frozen=True)
class Fused:
    """Gradients of which every row is used up as soon as it is there.

    Attributes:
      component: The gradients, and what follows from them.
      rows: The equations that lead to results, and to what is summed up.
      replaced: For each result the argument whose buffer it is written into.
    """

    component: Component
    rows: RowLocal
    replaced: Mapping[jex.Var, jex.Var | None]

    def parts(self) -> tuple[RowLocal, ...]:
        """Two, if half of what is loaded suffices for a store; else one.

        Outputs of the first that are no results are for the second.
        """
        loads = [v for v in self.rows.inputs if _memory.on_host(v.aval)]
        early = loads[: (len(loads) + 1) // 2]
        missing = set(loads[len(early) :])
        for e in self.rows.equations:
            if not missing.isdisjoint(variables(e.invars)):
                missing.update(e.outvars)
        first = [
            v
            for v in self.rows.outputs
            if self.replaced.get(v) in early and v not in missing
        ]
        last = [v for v in self.rows.outputs if v not in first]
        if not (first and last) or len(early) == len(loads):
            return (self.rows,)
        return self.rows.split(early, first, last)

    def summed_only(self) -> Fused:
        """What leads to the sums over its rows."""
        component = dataclasses.replace(self.component, results=())
        operands = dict.fromkeys(v for s in component.sums for v in s.operands)
        return Fused(component, self.rows.restricted([*operands]), {})
