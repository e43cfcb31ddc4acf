"""Jaxprs taken apart: equations that can be picked, followed and evaluated."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from optax_offload import _compat

Atom: TypeAlias = jex.Var | jex.Literal


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without nested jits.

    Attributes:
      equations: The equations, in their order.
      constants: The values that they close over.
      invars: The arguments.
      outvars: The results.
      debug_info: What JAX keeps of the function for its messages.
    """

    equations: list[jex.JaxprEqn]
    constants: dict[jex.Var, Any]
    invars: list[jex.Var]
    outvars: list[Atom]
    debug_info: Any

    @functools.cached_property
    def producers(self) -> Mapping[jex.Var, int]:
        """The position of the equation that defines each variable."""
        return {v: i for i, e in enumerate(self.equations) for v in e.outvars}


def flatten(closed: jex.ClosedJaxpr) -> Flat:
    """Inlines nested jits, calls with own derivatives, and conds of a known branch.

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


# Calls with rules of their own for derivatives and batches, which are taken by now.
_BODIES = {"custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}


def _inlinable(
    e: jex.JaxprEqn, operands: list[Atom], value_of: Callable[[Atom], Any]
) -> tuple[jex.ClosedJaxpr | None, list[Atom]]:
    if e.primitive.name in ("jit", "pjit"):
        constrained = any(
            isinstance(s, jax.sharding.Sharding)
            for s in (*e.params["in_shardings"], *e.params["out_shardings"])
        )
        return (None if constrained else e.params["jaxpr"]), operands
    if e.primitive.name in _BODIES:
        return e.params[_BODIES[e.primitive.name]], operands
    if e.primitive.name == "cond":
        index = value_of(operands[0])
        if index is not None:
            branches = e.params["branches"]
            return branches[min(max(int(index), 0), len(branches) - 1)], operands[1:]
    return None, operands


def live(flat: Flat) -> list[int]:
    """The positions of the equations that an output or an effect needs, in order."""
    needed = set(variables(flat.outvars))
    found: list[int] = []
    for i in reversed(range(len(flat.equations))):
        e = flat.equations[i]
        if _compat.has_effects(e) or not needed.isdisjoint(e.outvars):
            found.append(i)
            needed.update(variables(e.invars))
    found.reverse()
    return found


def dependents(flat: Flat, start: Collection[jex.Var]) -> set[jex.Var]:
    """The variables that depend on any of these, which are among them."""
    found = set(start)
    for e in flat.equations:
        if not found.isdisjoint(variables(e.invars)):
            found.update(e.outvars)
    return found


def ancestors(flat: Flat, v: jex.Var) -> tuple[int, ...]:
    """The positions of the equations that a variable takes."""
    wanted, found = {v}, list[int]()
    for i in reversed(range(len(flat.equations))):
        e = flat.equations[i]
        if not wanted.isdisjoint(e.outvars):
            found.append(i)
            wanted.update(variables(e.invars))
    return tuple(reversed(found))


def variables(atoms: Iterable[Atom]) -> list[jex.Var]:
    """The atoms that are no literals."""
    return [a for a in atoms if isinstance(a, jex.Var)]


def shape(a: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    aval: Any = a.aval
    return aval.shape


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


def read(a: Atom, lookup: Callable[[jex.Var], Any]) -> Any:
    """The value of a variable or literal."""
    return a.val if isinstance(a, jex.Literal) else lookup(a)


def evaluate(
    flat: Flat, positions: Sequence[int], lookup: Callable[[jex.Var], Any]
) -> dict[jex.Var, Any]:
    """Evaluates equations, and returns the value of each variable they define."""
    equations = [flat.equations[i] for i in positions]
    results = [v for e in equations for v in e.outvars]
    defined = set(results)
    used = (v for e in equations for v in variables(e.invars))
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


_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+):\d+ \((?P<function>.*)\)")


def described(e: jex.JaxprEqn) -> str:
    """An equation as who wrote it knows it: the function that it is of, and where.

    What only adds the leaves of any tree up says less than what calls it.
    """
    added = e.primitive.name == "add" and not any(map(shape, e.outvars))
    name = "a sum over leaves" if added else repr(e.primitive.name)
    lines = source_info_util.summarize(e.source_info, num_frames=30).splitlines()
    frames = [found for line in lines if (found := _FRAME.fullmatch(line))]
    telling = [f for f in frames if "/optax/tree_utils/" not in f["file"]]
    if not telling:
        return name
    last = telling[-1]
    function = last["function"].partition(".<locals>")[0]
    return f"{name} in {function} ({last['file']}:{last['line']})"
