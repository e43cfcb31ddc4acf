"""Conditionals over many leaves, as one conditional for each, or one selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._ground import compat
from optax_offload._program.bodies import of_platforms
from optax_offload._program.build import flatten
from optax_offload._program.graph import (
    Atom,
    Components,
    Program,
    dtype,
    shape,
    variables,
)


def split(e: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """A conditional taken apart, so that leaves that only it joins can be followed.

    Results that share no array in a branch become results of conditionals of their own.
    Values that follow from scalars alone are computed by each of these.
    """
    if e.primitive.name != "cond" or compat.has_effects(e) or len(e.outvars) < 2:
        return [e]
    branches = [flatten(branch) for branch in e.params["branches"]]
    classes = _classes(branches, len(e.outvars))
    if len(classes) < 2:
        return [e]
    return [_restricted(e, branches, results) for results in classes]


def around(
    branches: Sequence[Callable[..., Any]], e: jex.JaxprEqn, values: Sequence[Any]
) -> list[Any]:
    """The results of a conditional with other branches.

    Args:
      branches: The branches, functions of its operands.
      e: The conditional.
      values: The values that it takes: which branch, and the operands.
    """
    index, *operands = values
    platforms = of_platforms(e)
    if platforms is None:
        return lax.switch(index, branches, *operands)
    by_name: dict[str, Any] = {}
    for names, branch in zip(platforms, branches, strict=True):
        by_name |= dict.fromkeys(["default"] if names is None else names, branch)
    return lax.platform_dependent(*operands, **by_name)


def _classes(branches: Sequence[Program], count: int) -> list[list[int]]:
    """The results, by what they have in common."""
    joined = Components[int]()
    for program in branches:
        owner: dict[jex.Var, int] = {}

        def own(v: jex.Var, k: int, owner: dict[jex.Var, int] = owner) -> None:
            if shape(v) and v in owner:
                joined.join([owner[v], k])
            owner.setdefault(v, k)

        for k, a in enumerate(program.outvars):
            for v in variables([a]):
                own(v, k)
        for equation in reversed(program.equations):
            # A scalar is computed by all who want it: it is one's as good as another's.
            mine = [owner[v] for v in equation.outvars if v in owner]
            for k in mine:
                for v in variables(equation.invars):
                    own(v, k)
    found: dict[int, list[int]] = {}
    for k in range(count):
        found.setdefault(joined.of(k), []).append(k)
    return list(found.values())


def _restricted(
    e: jex.JaxprEqn, branches: Sequence[Program], results: Sequence[int]
) -> jex.JaxprEqn:
    """A conditional for some of its results."""
    smaller: list[Program] = []
    for program in branches:
        program = dataclasses.replace(
            program, outvars=[program.outvars[k] for k in results]
        )
        equations = [program.equations[i] for i in program.live]
        smaller.append(dataclasses.replace(program, equations=equations))
    used = {
        i
        for program in smaller
        for i, v in enumerate(program.invars)
        if v in program.used
    }
    kept = sorted(used)
    return e.replace(
        invars=[e.invars[0], *(e.invars[1 + i] for i in kept)],
        outvars=[e.outvars[k] for k in results],
        params=e.params
        | {"branches": tuple(_closed(program, kept) for program in smaller)},
    )


def _closed(program: Program, kept: Sequence[int]) -> jex.ClosedJaxpr:
    constants = {v: c for v, c in program.constants.items() if v in program.used}
    jaxpr = jex.Jaxpr(
        constvars=tuple(constants),
        invars=[program.invars[i] for i in kept],
        outvars=program.outvars,
        eqns=program.equations,
        debug_info=program.debug_info,
    )
    return jex.ClosedJaxpr(jaxpr, list(constants.values()))


def selections(
    e: jex.JaxprEqn, producers: Mapping[jex.Var, jex.JaxprEqn]
) -> Iterator[jex.JaxprEqn]:
    """A conditional as one for each leaf, or a selection where it only chooses."""
    by, *_ = e.invars
    before = producers.get(by) if isinstance(by, jex.Var) else None
    if before is not None and before.primitive.name == "convert_element_type":
        (source,) = before.invars
        if dtype(source) == jnp.bool_ and not shape(source):
            by = source
    if by is e.invars[0]:
        last = len(e.params["branches"]) - 1
        (clamp,) = jax.make_jaxpr(lambda i: lax.clamp(0, i, last))(by.aval).eqns
        clamp = clamp.replace(invars=[clamp.invars[0], by, clamp.invars[2]])
        yield clamp
        (by,) = clamp.outvars
    for each in split(e):
        branches = each.params["branches"]
        found = [_chosen(branch, each.invars[1:]) for branch in branches]
        cases = [a for a in found if a is not None]
        sizes = {shape(a) for a in (*cases, *each.outvars)}
        if len(cases) < len(branches) or len(each.outvars) > 1 or len(sizes) > 1:
            yield each
            continue
        avals = [a.aval for a in (by, *cases)]
        (select,) = jax.make_jaxpr(lax.select_n)(*avals).eqns
        yield select.replace(
            invars=[by, *cases], outvars=each.outvars, source_info=e.source_info
        )


def _chosen(branch: jex.ClosedJaxpr, operands: Sequence[Atom]) -> Atom | None:
    """The operand that a branch returns, if that is all that it does."""
    program = flatten(branch)
    (a,) = program.outvars[:1]
    if len(program.outvars) > 1 or a not in program.invars:
        return None
    return operands[program.invars.index(a)]
