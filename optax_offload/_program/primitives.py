"""What is known of each primitive, a line each; rows along any axis are `_rows`' rules.

A primitive that is not here computes something new of what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.extend import core as jex

from optax_offload._places import memory
from optax_offload._program import row_rules
from optax_offload._program.graph import in_pairs
from optax_offload._program.row_rules import RowRule, along, elementwise


class Facts(NamedTuple):
    """What is known of a primitive.

    Attributes:
      hands_on: What each result has of its operand: the value, maybe in another memory
        or sharding; or its numbers, maybe in another dtype.
      folded: Computes it of scalars that are known before a program runs, by NumPy:
        JAX would do so on devices that may not be here.
      leads: How it leads from an argument to what replaces it: it adds something to
        it, or scales it.
      again: Whether it is cheaper to compute again than to keep.
      again_if: Says so of an equation, where that depends on it.
      layout: Whether it only lays numbers out, as what decodes state does beside
        arithmetic.
      in_place: Whether it writes its result in the place of its first operand.
      summed_by: The primitive that sums up what it gives for some rows.
      rows: What it takes for a block of rows, along the leading axis, of what it gives.
    """

    hands_on: Literal["value", "numbers"] | None = None
    folded: Callable[..., Any] | None = None
    leads: Literal["adds", "scales"] | None = None
    again: bool = False
    again_if: Callable[[jex.JaxprEqn], bool] | None = None
    layout: bool = False
    in_place: bool = False
    summed_by: str | None = None
    rows: RowRule | None = None


# What is arithmetic of what rests, as decoding it, is computed again from that.
_DECODES = Facts(again=True, rows=elementwise)
# The same, where numbers stay what they are, or nearly.
_PASSES = Facts(leads="adds", again=True, rows=elementwise)
# The name of what is decoded, as of `jax.ad_checkpoint.checkpoint_name`.
CODES = "optax_offload codes"

PRIMITIVES: Mapping[str, Facts] = {
    "abs": _DECODES,
    "add": Facts(folded=np.add, leads="adds", again=True, rows=elementwise),
    "add_any": Facts(leads="adds"),
    "and": Facts(folded=np.bitwise_and, again=True, rows=elementwise),
    "bitcast_convert_type": Facts(again=True, layout=True, rows=along(lambda e: ())),
    "broadcast_in_dim": Facts(again=True, layout=True, rows=row_rules.broadcast),
    "clamp": Facts(leads="adds", again=True, rows=elementwise),
    "concatenate": Facts(
        again=True, layout=True, rows=along(lambda e: [e.params["dimension"]])
    ),
    "convert_element_type": Facts(
        hands_on="numbers",
        folded=lambda x: x,
        leads="adds",
        again=True,
        rows=elementwise,
    ),
    "copy": Facts(hands_on="numbers", leads="adds", again=True, rows=elementwise),
    "device_put": Facts(hands_on="value"),
    "div": _DECODES,
    "dot_general": Facts(summed_by="add"),
    "dynamic_slice": Facts(rows=along(row_rules.sliced_at_positions, "slice_sizes")),
    "dynamic_update_slice": Facts(in_place=True),
    "eq": _DECODES,
    "exp2": _DECODES,
    "gather": Facts(again_if=row_rules.looks_up, rows=row_rules.gather),
    "ge": _DECODES,
    "gt": _DECODES,
    "integer_pow": _DECODES,
    "iota": Facts(again=True, rows=row_rules.iota),
    "le": _DECODES,
    "lt": _DECODES,
    "max": Facts(leads="adds", again=True, rows=elementwise),
    "min": Facts(leads="adds", again=True, rows=elementwise),
    "mul": Facts(folded=np.multiply, leads="scales", again=True, rows=elementwise),
    "name": _PASSES,
    "ne": Facts(folded=np.not_equal, again=True, rows=elementwise),
    "neg": _DECODES,
    "not": Facts(folded=np.bitwise_not, again=True, rows=elementwise),
    "optimization_barrier": Facts(hands_on="value", leads="adds"),
    "or": Facts(folded=np.bitwise_or, again=True, rows=elementwise),
    "pad": Facts(rows=along(row_rules.padded)),
    "reduce_and": Facts(summed_by="and"),
    "reduce_max": Facts(summed_by="max"),
    "reduce_min": Facts(summed_by="min"),
    "reduce_or": Facts(summed_by="or"),
    "reduce_precision": _PASSES,
    "reduce_prod": Facts(summed_by="mul"),
    "reduce_sum": Facts(summed_by="add"),
    "rem": _DECODES,
    "reshape": Facts(again=True, layout=True, rows=row_rules.reshape),
    "reshard": Facts(hands_on="value", leads="adds"),
    "rev": Facts(rows=along(lambda e: e.params["dimensions"])),
    "scatter": Facts(in_place=True),
    "scatter-add": Facts(in_place=True),
    "select_n": Facts(leads="adds", again=True, rows=elementwise),
    "sharding_constraint": Facts(
        hands_on="value", leads="adds", rows=row_rules.constraint
    ),
    "shift_left": _DECODES,
    "shift_right_arithmetic": _DECODES,
    "shift_right_logical": _DECODES,
    "sign": _DECODES,
    "slice": Facts(
        again_if=row_rules.takes_most,
        layout=True,
        rows=along(row_rules.sliced, "limit_indices"),
    ),
    "split": Facts(rows=along(lambda e: [e.params["axis"]])),
    "square": _DECODES,
    "squeeze": Facts(
        again=True, layout=True, rows=along(lambda e: e.params["dimensions"])
    ),
    "stack": Facts(again=True, layout=True, rows=along(lambda e: [e.params["axis"]])),
    "stop_gradient": _PASSES,
    "sub": Facts(folded=np.subtract, leads="adds", again=True, rows=elementwise),
    "transpose": Facts(again=True, layout=True, rows=along(row_rules.permuted)),
    "xor": _DECODES,
}
_UNKNOWN = Facts()


def are_codes(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation says of a value that it holds codes."""
    return e.primitive.name == "name" and e.params["name"] == CODES


def facts(e: jex.JaxprEqn) -> Facts:
    """What is known of the primitive of an equation."""
    known = PRIMITIVES.get(e.primitive.name, _UNKNOWN)
    return known if known.again_if is None else known._replace(again=known.again_if(e))


def handed_on(e: jex.JaxprEqn) -> Iterator[tuple[jex.Var, jex.Var]]:
    """Yields each variable that an equation only hands on, with the result for it."""
    if facts(e).hands_on:
        for a, v in in_pairs(e):
            if isinstance(a, jex.Var):
                yield a, v


def singly(e: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """An equation that puts many leaves somewhere, as one for each; any other as is."""
    if e.primitive.name != "device_put" or len(e.invars) == 1:
        return [e]
    return [
        e.replace(
            invars=[a],
            outvars=[v],
            params={name: (values[i],) for name, values in e.params.items()},
        )
        for i, (a, v) in enumerate(in_pairs(e))
    ]


def is_transfer(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation moves one value between memories, or keeps it."""
    return e.primitive.name == "device_put" and any(
        memory.on_host(a.aval) for a in (*e.invars, *e.outvars)
    )


def is_load(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation moves one value from the host to the device."""
    return (
        is_transfer(e) and len(e.invars) == 1 and not memory.on_host(e.outvars[0].aval)
    )


def is_store(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation moves one value from the device to the host."""
    return (
        is_transfer(e) and len(e.invars) == 1 and not memory.on_host(e.invars[0].aval)
    )
