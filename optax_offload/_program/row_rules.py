"""How equations give blocks of rows: rules that the table of primitives refers to.

A value of so many rows is as many blocks of its leading axis, one after the other, each
of which follows from the same block of operands. Of most values a block is a row, with
its axis of size one; of what was flattened it is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core as jex
from jax.sharding import NamedSharding

from optax_offload._program.graph import Atom, shape


class ByRows(NamedTuple):
    """An equation for a block of its results.

    Attributes:
      rows: For each operand, whether it takes a block of it too, and not all of it.
      params: The parameters that change.
    """

    rows: tuple[bool, ...]
    params: Mapping[str, Any]


# Of an equation, and the number of rows in all; None if a block takes more than blocks.
RowRule: TypeAlias = Callable[[jex.JaxprEqn, int], ByRows | None]


def elementwise(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """Operands are as long as results, or the same for all rows."""
    return None if _is_spread(e) else _where_as_long(e)


def along(
    axes: Callable[[jex.JaxprEqn], Iterable[int]], resized: str | None = None
) -> RowRule:
    """An equation along some axes treats rows alone if the leading one is none.

    Args:
      axes: The axes of its first operand that an equation is along.
      resized: The parameter that has the sizes of the result.
    """

    def rule(e: jex.JaxprEqn, count: int) -> ByRows | None:
        if 0 in axes(e) or _is_spread(e):
            return None
        params = _resized(e, resized, count) if resized else {}
        return ByRows(tuple(bool(shape(a)) for a in e.invars), params)

    return rule


def broadcast(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """A block of its operand is broadcast, or all of it if it has no such axis."""
    if _is_spread(e) or len(e.invars) != 1:
        return None
    has_rows = 0 in e.params["broadcast_dimensions"] and _is_as_long(e.invars[0], e)
    return ByRows((has_rows,), _resized(e, "shape", count))


def reshape(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """The leading axis may be joined with others, or divided again."""
    (a, *more), (size, *_) = e.invars, shape(e.outvars[0])
    before = shape(a)[:1]
    if more or e.params["dimensions"] is not None or _is_spread(e):
        return None
    if not before or before[0] % count or size % count:
        return None
    return ByRows((True,), _resized(e, "new_sizes", count))


def iota(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """Counts the same in each row, along another axis."""
    if e.invars or e.params["dimension"] == 0 or _is_spread(e):
        return None
    return ByRows((), _resized(e, "shape", count))


def gather(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """Takes from one table by rows of indices, or the same of each row, or its own."""
    numbers = e.params["dimension_numbers"]
    operand, _ = map(shape, e.invars)
    if 0 not in numbers.offset_dims:  # The leading axis of the indices.
        if 0 not in numbers.start_indices_batching_dims:
            return ByRows((False, True), {})
        at = numbers.start_indices_batching_dims.index(0)
        return (
            ByRows((True, True), {}) if numbers.operand_batching_dims[at] == 0 else None
        )
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if 0 in (*gone, *numbers.start_index_map):
        return None
    if e.params["slice_sizes"][0] != operand[0]:
        return None
    sizes = (operand[0] // count, *e.params["slice_sizes"][1:])
    return ByRows((True, False), {"slice_sizes": sizes})


def constraint(e: jex.JaxprEqn, count: int) -> ByRows | None:
    """A row is spread as all are, unless these are spread over devices."""
    return _where_as_long(e) if _keeps_rows_together(e.params["sharding"]) else None


def sliced(e: jex.JaxprEqn) -> list[int]:
    """The axes of which a slice is taken."""
    some = e.params["strides"] or (1,) * len(shape(e.invars[0]))
    taken = zip(e.params["start_indices"], e.params["limit_indices"], some, strict=True)
    whole = ((0, n, 1) for n in shape(e.invars[0]))
    pairs = enumerate(zip(taken, whole, strict=True))
    return [i for i, (some, every) in pairs if some != every]


def sliced_at_positions(e: jex.JaxprEqn) -> list[int]:
    """The axes of which a slice is taken somewhere."""
    pairs = zip(e.params["slice_sizes"], shape(e.invars[0]), strict=True)
    return [i for i, (some, every) in enumerate(pairs) if some != every]


def padded(e: jex.JaxprEqn) -> list[int]:
    """The axes along which something is padded."""
    return [i for i, x in enumerate(e.params["padding_config"]) if any(x)]


def permuted(e: jex.JaxprEqn) -> list[int]:
    """The axes that are not where they were."""
    return [i for i, axis in enumerate(e.params["permutation"]) if axis != i]


def looks_up(e: jex.JaxprEqn) -> bool:
    """Returns whether a gather takes from a table that is smaller than its result."""
    return _size(e.invars[0]) < _size(e.outvars[0])


def takes_most(e: jex.JaxprEqn) -> bool:
    """Returns whether a slice is half of its operand or more."""
    return 2 * _size(e.outvars[0]) >= _size(e.invars[0])


def _size(a: Atom) -> int:
    return math.prod(shape(a))


def _is_as_long(a: Atom, e: jex.JaxprEqn) -> bool:
    return shape(a)[:1] == shape(e.outvars[0])[:1]


def _where_as_long(e: jex.JaxprEqn) -> ByRows | None:
    rows = tuple(_is_as_long(a, e) for a in e.invars)
    others = (a for a, x in zip(e.invars, rows, strict=True) if not x)
    if not all(shape(a)[:1] in ((), (1,)) for a in others):
        return None
    return ByRows(rows, {})


def _resized(e: jex.JaxprEqn, name: str, count: int) -> dict[str, Any]:
    size, *others = e.params[name]
    return {name: (size // count, *others)}


def _is_spread(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation says that rows are spread over a mesh."""
    asked = (e.params.get(x) for x in ("sharding", "out_sharding"))
    return any(x is not None and not _keeps_rows_together(x) for x in asked)


def _keeps_rows_together(to: Any) -> bool:
    return isinstance(to, NamedSharding) and not any(to.spec[:1])
