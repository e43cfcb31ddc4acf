"""What is known of each primitive, a line each; rows have rules of their own.

A primitive that is not here computes something new of what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._program.graph import in_pairs


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
      layout: Whether it only lays numbers out, as what decodes state does beside
        arithmetic.
      in_place: Whether it writes its result in the place of its first operand.
      summed_by: The primitive that sums up what it gives for some rows.
    """

    hands_on: Literal["value", "numbers"] | None = None
    folded: Callable[..., Any] | None = None
    leads: Literal["adds", "scales"] | None = None
    again: bool = False
    layout: bool = False
    in_place: bool = False
    summed_by: str | None = None


PRIMITIVES: Mapping[str, Facts] = {
    "add": Facts(folded=np.add, leads="adds"),
    "add_any": Facts(leads="adds"),
    "and": Facts(folded=np.bitwise_and),
    "bitcast_convert_type": Facts(layout=True),
    "broadcast_in_dim": Facts(again=True, layout=True),
    "clamp": Facts(leads="adds"),
    "concatenate": Facts(layout=True),
    "convert_element_type": Facts(
        hands_on="numbers", folded=lambda x: x, leads="adds", again=True
    ),
    "copy": Facts(hands_on="numbers", leads="adds", again=True),
    "device_put": Facts(hands_on="value"),
    "dot_general": Facts(summed_by="add"),
    "dynamic_update_slice": Facts(in_place=True),
    "max": Facts(leads="adds"),
    "min": Facts(leads="adds"),
    "mul": Facts(folded=np.multiply, leads="scales", again=True),
    "ne": Facts(folded=np.not_equal),
    "neg": Facts(again=True),
    "not": Facts(folded=np.bitwise_not),
    "optimization_barrier": Facts(hands_on="value"),
    "or": Facts(folded=np.bitwise_or),
    "reduce_and": Facts(summed_by="and"),
    "reduce_max": Facts(summed_by="max"),
    "reduce_min": Facts(summed_by="min"),
    "reduce_or": Facts(summed_by="or"),
    "reduce_prod": Facts(summed_by="mul"),
    "reduce_sum": Facts(summed_by="add"),
    "reshape": Facts(again=True, layout=True),
    "reshard": Facts(hands_on="value", leads="adds"),
    "scatter": Facts(in_place=True),
    "scatter-add": Facts(in_place=True),
    "select_n": Facts(leads="adds"),
    "sharding_constraint": Facts(hands_on="value", leads="adds"),
    "slice": Facts(layout=True),
    "squeeze": Facts(again=True, layout=True),
    "stack": Facts(layout=True),
    "sub": Facts(folded=np.subtract, leads="adds"),
    "transpose": Facts(again=True, layout=True),
}
LAYOUT = frozenset(name for name, x in PRIMITIVES.items() if x.layout)
_UNKNOWN = Facts()


def facts(e: jex.JaxprEqn) -> Facts:
    """What is known of the primitive of an equation."""
    return PRIMITIVES.get(e.primitive.name, _UNKNOWN)


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
        _memory.on_host(a.aval) for a in (*e.invars, *e.outvars)
    )


def is_load(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation moves one value from the host to the device."""
    return (
        is_transfer(e) and len(e.invars) == 1 and not _memory.on_host(e.outvars[0].aval)
    )


def is_store(e: jex.JaxprEqn) -> bool:
    """Returns whether an equation moves one value from the device to the host."""
    return (
        is_transfer(e) and len(e.invars) == 1 and not _memory.on_host(e.invars[0].aval)
    )
