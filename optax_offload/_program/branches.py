"""Steps that update and steps that do not: an update as one jaxpr for each case.

`optax.apply_if_finite` decides with a `lax.cond` whether to update, and
`optax.MultiSteps` updates in every step and selects whether to keep it. Taken apart,
a step that keeps its state need not move it, and one that updates is as without them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.bodies import of_platforms
from optax_offload._program.build import Builder
from optax_offload._program.graph import (
    Atom,
    Program,
    dependents,
    dtype,
    needed,
    shape,
    variables,
)
from optax_offload._program.update import Update


@dataclasses.dataclass(frozen=True)
class Branches:
    """An update that differs by a predicate.

    Attributes:
      predicate: A variable without axes: a bool, or the index of one of two branches.
      before: The equations that it takes to know it, as positions.
      outputs: The outputs that it may change, as positions: all but scalars that depend
        on no load, such as a step counter. Each with the input into whose buffer it can
        be written; None where a buffer has to be made.
      beside: The equations of the other outputs, as positions.
      versions: The update if it is 0, and if it is 1. Neither has the equations before;
        what is not among the outputs is 0.
      dropped: The updates that are zero for a value of the predicate, being a product
        with zero, each with that value.
    """

    predicate: jex.Var
    before: tuple[int, ...]
    outputs: Mapping[int, int | None]
    beside: tuple[int, ...]
    versions: tuple[Update, Update]
    dropped: Mapping[jex.Var, int]


def find_branches(update: Update) -> Branches | None:
    """Finds the predicate by which an update moves at most half of its state, or all.

    In the version that keeps the state, an update that is multiplied by a known zero
    is zero: `optax.MultiSteps` computes and drops it, and its product would be -0.0 or
    NaN where the update is negative or is not finite.

    An update with effects is not split, since these would happen in each version, and
    beside both.
    """
    program, stores = update.program, update.stores
    if any(map(compat.has_effects, program.equations)):
        return None
    loaded = {program.invars[i] for i in update.loads if shape(program.invars[i])}
    dependent = dependents(program, loaded)
    predicate = _predicate(program, loaded, dependent, stores)
    if predicate is None:
        return None
    outputs = {
        k: update.in_place(k)
        for k, a in enumerate(program.outvars)
        if shape(a) or (isinstance(a, jex.Var) and a in dependent)
    }
    before = tuple(needed(program.equations, [predicate]))
    others = [a for k, a in enumerate(program.outvars) if k not in outputs]
    beside = set(dataclasses.replace(program, outvars=others).live).difference(before)
    outvars = [a if k in outputs else _zero(a) for k, a in enumerate(program.outvars)]
    program = dataclasses.replace(program, outvars=outvars)
    updates = [k for k, output in enumerate(update.outputs) if output.is_update]
    dropped = set(variables(program.outvars[k] for k in updates))
    zero, one = (
        _version(program, predicate, before, dropped, value) for value in (0, 1)
    )
    moved = [len(_moved(version, loaded, stores)) for version in (zero, one)]
    if min(moved) > len(_moved(program, loaded, stores)) / 2:
        return None
    versions = (
        dataclasses.replace(update, program=zero),
        dataclasses.replace(update, program=one),
    )
    zeros = {
        v: value
        for value, version in enumerate((zero, one))
        for v in dropped.intersection(version.producers)
        if version.equations[version.producers[v]].primitive.name != "mul"
        and program.equations[program.producers[v]].primitive.name == "mul"
    }
    return Branches(predicate, before, outputs, tuple(sorted(beside)), versions, zeros)


def as_zero(update: Update) -> Mapping[jex.Var, tuple[jex.Var, int]]:
    """The updates that are dropped for a value of a predicate, with both.

    If one program is for both cases, as in a scan, it has to select zero.
    """
    found = find_branches(update)
    if found is None:
        return {}
    return {v: (found.predicate, value) for v, value in found.dropped.items()}


def _predicate(
    program: Program,
    loaded: Collection[jex.Var],
    dependent: Collection[jex.Var],
    stores: Collection[int],
) -> jex.Var | None:
    """The predicate, of a cond or a select, on which most of the state depends."""
    stored = set(variables(program.outvars[k] for k in stores))
    found: Counter[jex.Var] = Counter()
    for e in program.equations:
        if not e.invars:
            continue
        by, *operands = e.invars
        if not isinstance(by, jex.Var) or by in dependent or shape(by):
            continue
        kept = set(variables(operands)).intersection(loaded)
        if of_platforms(e) is not None:
            continue  # Of its branches only one can be lowered.
        if e.primitive.name == "cond" and len(e.params["branches"]) == 2:
            found[by] += len(kept)
        elif e.primitive.name == "select_n" and len(operands) == 2:
            found[by] += bool(kept) and e.outvars[0] in stored
    most = found.most_common(1)
    return most[0][0] if most and most[0][1] else None


def _zero(a: Atom) -> jex.Literal:
    """Returns a placeholder for an output that a version does not have."""
    aval: Any = a.aval
    # There is no literal of a random key.
    dtype = np.dtype(np.uint32) if memory.is_key(aval) else aval.dtype
    return jex.Literal(np.zeros((), dtype), aval.update(shape=(), dtype=dtype))


def _moved(
    program: Program, loaded: Collection[jex.Var], stores: Collection[int]
) -> set[jex.Var]:
    """The loads that are not only handed through."""
    used = {v for i in program.live for v in variables(program.equations[i].invars)}
    used.update(variables(a for k, a in enumerate(program.outvars) if k not in stores))
    return used.intersection(loaded)


def _version(
    program: Program,
    predicate: jex.Var,
    before: Collection[int],
    dropped: Collection[jex.Var],
    value: int,
) -> Program:
    """The update with a predicate known, and without the equations before it.

    Updates that are dropped are zero where they are a product with zero.
    """
    builder = Builder(program.constants)
    builder.close_over({predicate: np.asarray(value, dtype(predicate))})
    for position, e in enumerate(program.equations):
        if position in before:
            continue
        operands = builder.read_all(e.invars)
        if e.primitive.name == "cond" and operands[0] is predicate:
            branch = e.params["branches"][value]
            builder.rename(e.outvars, builder.inline(branch, operands[1:]))
        elif e.primitive.name == "select_n" and operands[0] is predicate:
            builder.rename(e.outvars, [operands[1 + value]])
        elif _is_zero(e, builder) and e.outvars[0] in dropped:
            builder.add(_zeros(e.outvars[0]))
        else:
            builder.add(e)
    return builder.program(program)


def _is_zero(e: jex.JaxprEqn, builder: Builder) -> bool:
    """Returns whether an equation is a product with a factor of zero."""
    if e.primitive.name != "mul":
        return False
    values = map(builder.value, builder.read_all(e.invars))
    return any(v is not None and np.ndim(v) == 0 and v == 0 for v in values)


def _zeros(v: jex.Var) -> jex.JaxprEqn:
    aval: Any = v.aval
    explicit = any(names is not None for names in aval.sharding.spec)
    sharding = aval.sharding if explicit else None
    closed = jax.make_jaxpr(
        lambda: lax.full(aval.shape, 0, aval.dtype, sharding=sharding)
    )()
    (e,) = closed.jaxpr.eqns
    return e.replace(outvars=[v])
