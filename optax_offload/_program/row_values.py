"""Stacked results that follow from rows at rest alone are computed again from these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._program.bodies import Body
from optax_offload._program.build import flatten
from optax_offload._program.graph import Program, passed_on, variables
from optax_offload._program.primitives import facts


@dataclasses.dataclass(frozen=True)
class RowValue:
    """A value that is computed row by row from values that rest on the host.

    Attributes:
      sources: The values.
      jaxpr: The equations for one row of each.
    """

    sources: tuple[Any, ...]
    jaxpr: jex.Jaxpr

    def row(self, rows: Sequence[Any]) -> Any:
        """It, given the rows."""
        (value,) = jax.core.eval_jaxpr(self.jaxpr, (), *rows)
        return value

    def whole(self) -> Any:
        """All rows of it, on the device."""
        loaded = [_memory.transfer(x, "device") for x in self.sources]
        _, rows = lax.scan(lambda _, rows: (None, self.row(rows)), None, loaded)
        return rows


def rests(x: Any) -> bool:
    """Returns whether a value is not on the device, so that it has to be loaded."""
    return isinstance(x, RowValue) or (
        isinstance(x, jax.core.Tracer) and _memory.on_host(x)
    )


def made_of_rows(
    body: Body,
    xs: Sequence[Any],
    kept: Sequence[bool],
) -> dict[jex.Var, Any]:
    """Finds the stacked results of a scan that follow from rows at rest alone.

    Args:
      body: The body of the scan.
      xs: The values that it takes rows of.
      kept: For each of these, whether its body takes it where it rests.
    """
    program = flatten(body.closed)
    source = {
        v: x
        for v, x, keep in zip(body.split(program.invars).xs, xs, kept, strict=True)
        if rests(x) and not isinstance(x, RowValue) and not keep
    }
    found: dict[jex.Var, Any] = {
        v: source[program.invars[i]]
        for v, i in passed_on(body).items()
        if program.invars[i] in source
    }
    for v, a in zip(body.stacked, body.given(program.outvars).stacked, strict=True):
        if not isinstance(a, jex.Var) or not source or v in found:
            continue
        positions = _of_rows(program, a, source)
        if positions is None:
            continue
        equations = [program.equations[i] for i in positions]
        used = {x for e in equations for x in variables(e.invars)}
        taken = [x for x in source if x in used]
        if taken:
            jaxpr = jex.Jaxpr((), taken, [a], equations, debug_info=program.debug_info)
            found[v] = RowValue(tuple(source[x] for x in taken), jaxpr)
    return found


def _of_rows(
    program: Program, wanted: jex.Var, source: Mapping[jex.Var, Any]
) -> list[int] | None:
    """The equations that lead from rows to a value; None if they take more."""
    found: set[int] = set()
    waiting = [wanted]
    while waiting:
        v = waiting.pop()
        if v in source:
            continue
        i = program.producers.get(v)
        if i is None or not facts(program.equations[i]).again:
            return None
        if i not in found:
            found.add(i)
            waiting += variables(program.equations[i].invars)
    return sorted(found)
