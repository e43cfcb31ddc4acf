"""Jaxprs taken apart: equations that can be picked, followed and evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import core as jex

Atom = Any  # jex.Var or jex.Literal


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without nested jits: equations, and the values that they close over."""

    equations: list[jex.JaxprEqn]
    constants: dict[jex.Var, Any]
    invars: list[jex.Var]
    outvars: list[Atom]
    debug_info: Any


def flatten(closed: jex.ClosedJaxpr) -> Flat:
    """Inlines nested jits, and conds whose branch is known.

    optax jits its bias correction: left whole, it ties every leaf to every other. So
    does the cond of `optax.MultiSteps`, whose predicate is the constant False unless
    steps are to be skipped. A jit that constrains shardings is left as it is.
    """
    equations: list[jex.JaxprEqn] = []
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    # Scalars known while tracing; enough to know a constant predicate.
    known = {v: c for v, c in constants.items() if _is_known_scalar(c)}

    def value_of(a: Atom) -> Any:
        return a.val if isinstance(a, jex.Literal) else known.get(a)

    def walk(jaxpr: jex.Jaxpr, names: dict[jex.Var, Atom]) -> list[Atom]:
        def read(a: Atom) -> Atom:
            return a if isinstance(a, jex.Literal) else names.get(a, a)

        for e in jaxpr.eqns:
            operands = [read(a) for a in e.invars]
            body, operands_of_body = _inlinable(e, operands, value_of)
            if body is not None:
                constants.update(zip(body.jaxpr.constvars, body.consts, strict=True))
                inner = dict(zip(body.jaxpr.invars, operands_of_body, strict=True))
                names.update(zip(e.outvars, walk(body.jaxpr, inner), strict=True))
                continue
            # A jaxpr may be inlined several times: every time has variables of its own.
            results = [jex.Var(v.aval) for v in e.outvars]
            names.update(zip(e.outvars, results, strict=True))
            equations.append(e.replace(invars=operands, outvars=results))
            if e.primitive.name in ("convert_element_type", "ne"):
                values = [value_of(a) for a in operands]
                if all(v is not None for v in values):
                    with jax.ensure_compile_time_eval():
                        known[results[0]] = e.primitive.bind(*values, **e.params)
        return [read(a) for a in jaxpr.outvars]

    outvars = walk(closed.jaxpr, {})
    # The names of arguments and results are those of a function that is taken apart.
    debug_info = closed.jaxpr.debug_info.with_unknown_names()
    invars = list(closed.jaxpr.invars)
    return Flat(equations, constants, invars, outvars, debug_info)


def _is_known_scalar(c: Any) -> bool:
    return not isinstance(c, jax.core.Tracer) and getattr(c, "shape", None) == ()


def _inlinable(
    e: jex.JaxprEqn, operands: list[Atom], value_of: Callable[[Atom], Any]
) -> tuple[jex.ClosedJaxpr | None, list[Atom]]:
    if e.primitive.name in ("jit", "pjit"):
        constrained = any(
            isinstance(s, jax.sharding.Sharding)
            for s in (*e.params["in_shardings"], *e.params["out_shardings"])
        )
        return (None if constrained else e.params["jaxpr"]), operands
    if e.primitive.name == "cond":
        index = value_of(operands[0])
        if index is not None:
            branches = e.params["branches"]
            return branches[min(max(int(index), 0), len(branches) - 1)], operands[1:]
    return None, operands


def live_equations(flat: Flat) -> list[int]:
    """The equations that an output or an effect needs, in their order."""
    needed = {a for a in flat.outvars if isinstance(a, jex.Var)}
    live = []
    for i in reversed(range(len(flat.equations))):
        e = flat.equations[i]
        if e.effects or not needed.isdisjoint(e.outvars):
            live.append(i)
            needed.update(_vars(e))
    live.reverse()
    return live


def _vars(e: jex.JaxprEqn) -> list[jex.Var]:
    return [a for a in e.invars if isinstance(a, jex.Var)]


def _shape(a: Atom) -> tuple[int, ...]:
    return a.aval.shape


def _is_scalar(a: Atom) -> bool:
    return not _shape(a)


def signature(
    equations: Sequence[jex.JaxprEqn],
    inputs: Sequence[jex.Var],
    outputs: Sequence[Atom],
) -> Hashable:
    """Equal for equations that only the names of their variables tell apart."""
    numbers = {v: i for i, v in enumerate(inputs)}

    def of(a: Atom) -> Hashable:
        if isinstance(a, jex.Literal):
            return a.aval, np.asarray(a.val).tobytes()
        return numbers[a]

    parts: list[Hashable] = [v.aval for v in inputs]
    for e in equations:
        operands = tuple(of(a) for a in e.invars)
        numbers |= {v: len(numbers) + i for i, v in enumerate(e.outvars)}
        parts.append((e.primitive, operands, tuple(e.params.items()), e.ctx))
    parts += [of(a) for a in outputs]
    return tuple(parts)


def _dependent(flat: Flat, loaded: Collection[jex.Var]) -> set[jex.Var]:
    """The variables that depend on loads."""
    dependent = set(loaded)
    for e in flat.equations:
        if not dependent.isdisjoint(_variables(e.invars)):
            dependent.update(e.outvars)
    return dependent


def _variables(atoms: Iterable[Atom]) -> set[jex.Var]:
    return {a for a in atoms if isinstance(a, jex.Var)}


def _ancestors(flat: Flat, v: jex.Var) -> tuple[int, ...]:
    """The equations that a variable takes."""
    wanted, found = {v}, []
    for i in reversed(range(len(flat.equations))):
        e = flat.equations[i]
        if not wanted.isdisjoint(e.outvars):
            found.append(i)
            wanted |= _variables(e.invars)
    return tuple(reversed(found))


def _read(a: Any, lookup: Callable[[jex.Var], Any]) -> Any:
    return a.val if isinstance(a, jex.Literal) else lookup(a)


def _evaluate(
    flat: Flat, positions: Sequence[int], lookup: Callable[[jex.Var], Any]
) -> dict[jex.Var, Any]:
    """Evaluates equations, and returns the value of each variable they define."""
    equations = [flat.equations[i] for i in positions]
    results = [v for e in equations for v in e.outvars]
    defined = set(results)
    used = [a for e in equations for a in e.invars if isinstance(a, jex.Var)]
    free = [v for v in dict.fromkeys(used) if v not in defined]
    # JAX's own interpreter knows how each version of it binds an equation, and keeps
    # the name stack and the context (mesh, matmul precision) it was traced in.
    jaxpr = jex.Jaxpr(
        constvars=(),
        invars=free,
        outvars=results,
        eqns=equations,
        debug_info=flat.debug_info,
    )
    values = jax.core.eval_jaxpr(jaxpr, (), *map(lookup, free))
    return dict(zip(results, values, strict=True))
