"""Steps that update and steps that do not: an update as one jaxpr for each case.

`optax.apply_if_finite` decides with a `lax.cond` whether to update, and
`optax.MultiSteps` updates in every step and selects whether to keep it. Taken apart,
a step that keeps its state need not move it, and one that updates is as without them.
Pure, as the schedule is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from optax_offload._jaxpr import (
    Atom,
    Flat,
    _ancestors,
    _dependent,
    _variables,
    flatten,
    live_equations,
)
from optax_offload._update.schedule import in_place

# Enough to know what a selection is multiplied with.
_FOLDED = frozenset(("add", "and", "convert_element_type", "mul", "not", "or", "sub"))


@dataclasses.dataclass(frozen=True)
class Choice:
    """An update that differs by a predicate.

    Attributes:
      predicate: a variable without axes: bool, or the index of one of two branches.
      ahead: the equations that it takes to know it, as positions.
      outputs: those that it may change, as positions: all but scalars that depend on
        no load, such as a step counter. Each with the input into whose buffer it can
        be written; None where a buffer has to be made.
      versions: the update if it is 0, and if it is 1. Neither has the equations ahead;
        what is not among the outputs is 0.
    """

    predicate: jex.Var
    ahead: tuple[int, ...]
    outputs: Mapping[int, int | None]
    versions: tuple[Flat, Flat]


def choice(
    flat: Flat,
    *,
    loads: Collection[int],
    stores: Collection[int],
    updates: Collection[int],
    homes: Sequence[int | None],
) -> Choice | None:
    """Finds the predicate by which an update moves at most half of its state, or all.

    In the version that keeps the state, an update that is multiplied by a known zero
    is zero: `optax.MultiSteps` computes and drops it, and its product would be -0.0 or
    NaN where the update is negative or is not finite.

    Args:
      flat: the update.
      loads: the inputs that are loaded from the host.
      stores: the outputs that are stored to the host.
      updates: the outputs that are updates, one for each parameter.
      homes: for each output the input that it replaces.
    """
    loaded = {flat.invars[i] for i in loads if _shape(flat.invars[i])}
    dependent = _dependent(flat, loaded)
    predicate = _predicate(flat, loaded, dependent, stores)
    if predicate is None:
        return None
    outputs = {
        k: in_place(flat, k, homes[k], loads, stores)
        for k, a in enumerate(flat.outvars)
        if _shape(a) or _in(a, dependent)
    }
    outvars = [a if k in outputs else _zero(a) for k, a in enumerate(flat.outvars)]
    flat = dataclasses.replace(flat, outvars=outvars)
    ahead = _ancestors(flat, predicate)
    dropped = _variables(flat.outvars[k] for k in updates)
    versions = [_version(flat, predicate, value, ahead, dropped) for value in (0, 1)]
    moved = [len(_moved(version, loaded, stores)) for version in versions]
    if min(moved) > len(_moved(flat, loaded, stores)) / 2:
        return None
    return Choice(predicate, ahead, outputs, (versions[0], versions[1]))


def _in(a: Atom, variables: Collection[jex.Var]) -> bool:
    return isinstance(a, jex.Var) and a in variables


def _predicate(
    flat: Flat,
    loaded: Collection[jex.Var],
    dependent: Collection[jex.Var],
    stores: Collection[int],
) -> jex.Var | None:
    """What most state depends on: the index of a cond, or what is selected by."""
    stored = _variables(flat.outvars[k] for k in stores)
    found: Counter[jex.Var] = Counter()
    for e in flat.equations:
        by, *operands = e.invars or [None]
        if not isinstance(by, jex.Var) or by in dependent or _shape(by):
            continue
        kept = _variables(operands).intersection(loaded)
        if e.primitive.name == "cond" and len(e.params["branches"]) == 2:
            found[by] += len(kept)
        elif e.primitive.name == "select_n" and len(operands) == 2:
            found[by] += bool(kept) and e.outvars[0] in stored
    most = found.most_common(1)
    return most[0][0] if most and most[0][1] else None


def _shape(a: Atom) -> tuple[int, ...]:
    return a.aval.shape


def _zero(a: Atom) -> jex.Literal:
    aval: Any = a.aval
    return jex.Literal(np.zeros((), aval.dtype), aval.update(shape=()))


def _moved(
    flat: Flat, loaded: Collection[jex.Var], stores: Collection[int]
) -> set[jex.Var]:
    """The loads that are not only handed through."""
    used = _variables(a for i in live_equations(flat) for a in flat.equations[i].invars)
    used |= _variables(a for k, a in enumerate(flat.outvars) if k not in stores)
    return used.intersection(loaded)


def _version(
    flat: Flat,
    predicate: jex.Var,
    value: int,
    ahead: Collection[int],
    updates: Collection[jex.Var],
) -> Flat:
    """The update with a predicate known, and without the equations ahead."""
    dtype: Any = predicate.aval
    known: dict[jex.Var, Any] = {predicate: np.asarray(value, dtype.dtype)}
    constants = dict(flat.constants) | known
    names: dict[jex.Var, Atom] = {}
    equations: list[jex.JaxprEqn] = []

    def read(a: Atom) -> Atom:
        return a if isinstance(a, jex.Literal) else names.get(a, a)

    skipped = set(ahead)
    for position, e in enumerate(flat.equations):
        if position in skipped:
            continue
        operands = [read(a) for a in e.invars]
        by = operands[0] if operands else None
        if e.primitive.name == "cond" and by is predicate:
            branch = flatten(e.params["branches"][value])
            constants |= branch.constants
            inner = dict(zip(branch.invars, operands[1:], strict=True))
            equations += [_renamed(x, inner) for x in branch.equations]
            results = [_read(a, inner) for a in branch.outvars]
            names |= dict(zip(e.outvars, results, strict=True))
        elif e.primitive.name == "select_n" and by is predicate:
            names[e.outvars[0]] = operands[1 + value]
        elif _is_zero(e, operands, known) and e.outvars[0] in updates:
            equations.append(_zeros(e.outvars[0]))
        else:
            equations.append(e.replace(invars=operands))
            known |= _folded(equations[-1], known)
    outvars = [read(a) for a in flat.outvars]
    return Flat(equations, constants, flat.invars, outvars, flat.debug_info)


def _read(a: Atom, names: Mapping[jex.Var, Atom]) -> Atom:
    return a if isinstance(a, jex.Literal) else names.get(a, a)


def _renamed(e: jex.JaxprEqn, names: Mapping[jex.Var, Atom]) -> jex.JaxprEqn:
    return e.replace(invars=[_read(a, names) for a in e.invars])


def _value(a: Atom, known: Mapping[jex.Var, Any]) -> Any:
    return a.val if isinstance(a, jex.Literal) else known.get(a)


def _is_zero(
    e: jex.JaxprEqn, operands: Sequence[Atom], known: Mapping[jex.Var, Any]
) -> bool:
    """Whether an equation is a product of which a factor is known to be zero."""
    if e.primitive.name != "mul":
        return False
    values = (_value(a, known) for a in operands)
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


def _folded(e: jex.JaxprEqn, known: Mapping[jex.Var, Any]) -> dict[jex.Var, Any]:
    """The result of arithmetic with known numbers."""
    if e.primitive.name not in _FOLDED:
        return {}
    values = [_value(a, known) for a in e.invars]
    if any(v is None for v in values):
        return {}
    with jax.ensure_compile_time_eval():
        return {e.outvars[0]: np.asarray(e.primitive.bind(*values, **e.params))}
