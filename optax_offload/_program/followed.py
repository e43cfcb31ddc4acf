"""What leads from values at rest to scans that take rows of it, followed row by row.

A model may decode all of its parameters before its layers take them. What treats rows
alone is then computed of the rows that a layer takes, where it takes them. Codes on the
device are followed as values at rest are: decoded, they would be several times as many
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.graph import variables
from optax_offload._program.primitives import are_codes, facts
from optax_offload._program.row_values import RowValue, computed, of_stack, rests
from optax_offload._program.wanted import row_counts, rows_of_results

# Smaller integers are codes: of images, bytes and tokens they have this many or more.
BYTE_BITS = 8


class Followed:
    """The equations of a jaxpr that are followed.

    Attributes:
      counts: The number of rows of each variable that is wanted row by row.
    """

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        results: Sequence[int | None],
        values: Mapping[jex.Var, Any],
    ):
        """Finds what is wanted.

        Args:
          jaxpr: The jaxpr.
          results: For each of its results the rows, if it is wanted row by row.
          values: The values of variables as they are by then, each where it was left.
        """
        self.counts = row_counts(jaxpr, results)
        self._values = values
        self._producers = {v: e for e in jaxpr.eqns for v in e.outvars}

    def results(self, e: jex.JaxprEqn) -> Sequence[RowValue] | None:
        """The results of an equation, row by row, if it can be followed."""
        count = rows_of_results(e, self.counts)
        if count is None:
            return None
        # Codes on the device are there in any case.
        limit = max(map(_nbytes, e.outvars)) + decodes(e, self.counts)
        return self._computed(e, count, limit)

    def _computed(
        self, e: jex.JaxprEqn, count: int, limit: int
    ) -> Sequence[RowValue] | None:
        rule = facts(e).rows
        by_rows = rule(e, count) if rule and not compat.has_effects(e) else None
        if by_rows is None:
            return None
        operands: list[Any] = []
        for a, has_rows in zip(e.invars, by_rows.rows, strict=True):
            if has_rows:
                operands.append(self._rows_of(a, count, limit))
            elif isinstance(a, jex.Literal):
                operands.append(a)
            else:
                x = self._values.get(a)
                operands.append(None if rests(x) else x)
            if operands[-1] is None:
                return None
        return computed(e, by_rows, operands, count)

    def _rows_of(
        self, a: jex.Var | jex.Literal, count: int, limit: int
    ) -> RowValue | None:
        """Rows of an operand.

        A stack on the device would be kept for longer: it has to be smaller than what
        is computed of it. One that is the same for all rows is made anew for each.
        """
        x = None if isinstance(a, jex.Literal) else self._values.get(a)
        if isinstance(a, jex.Literal) or x is None:
            return None
        if isinstance(x, RowValue):
            return x if x.count == count else None
        if not rests(x):
            e = self._producers.get(a)
            if e is not None and facts(e).again and len(e.outvars) == 1:
                found = self._computed(e, count, limit)
                if found is not None:
                    return found[0]
            if _nbytes(a) >= limit:
                return None
        return of_stack(x) if x.shape[0] == count else None


def decodes(e: jex.JaxprEqn, counts: Mapping[jex.Var, int]) -> bool:
    """Returns whether codes that are wanted row by row are decoded from here on.

    These are what is named so, and what is made of integers of less than a byte. Other
    integers may be images, which nobody asked to have otherwise than as written.

    Args:
      e: The equation.
      counts: The number of rows of each variable that is wanted row by row.
    """
    if rows_of_results(e, counts) is None:
        return False
    if e.primitive.name == "name":
        return are_codes(e)
    codes = [v for v in variables(e.invars) if v in counts and _is_narrow(v)]
    return bool(codes) and max(map(_nbytes, e.outvars)) > max(map(_nbytes, codes))


def _is_narrow(v: jex.Var) -> bool:
    aval: Any = v.aval
    return (
        jnp.issubdtype(aval.dtype, jnp.integer)
        and jnp.iinfo(aval.dtype).bits < BYTE_BITS
    )


def _nbytes(v: jex.Var) -> int:
    return memory.nbytes_on_each_device(v.aval) if memory.movable_nbytes(v.aval) else 0
