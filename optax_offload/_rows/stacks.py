"""Stacks that are made for the host row by row, where each row is made alone.

The results of a vmapped initialiser would be on the device whole before they are moved.
A scan makes them instead, and stores its rows one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import (
    Builder,
    Program,
    flatten,
    in_pairs,
    shape,
    variables,
)
from optax_offload._rows.analysis import Analysis, RowCount, RowLocal
from optax_offload._rows.rules.registry import NotRowLocalError


def made_by_rows(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A function that moves stacks to the host, with scans that make them.

    As it was, if it makes none, if it takes anything from the host, as a step does that
    trains, or if it has effects.
    """
    if closed.jaxpr.effects or any(map(memory.on_host, closed.in_avals)):
        return closed
    program = flatten(closed)
    found = {
        a: rows
        for e in program.equations
        if e.primitive.name == "device_put"
        for a, v in in_pairs(e)
        if isinstance(a, jex.Var) and memory.on_host(v.aval)
        if len(program.users[a]) == 1 and a not in program.results
        for rows in [_rows_of(program, a)]
        if rows is not None
    }
    return _with_scans(closed, program, found) if found else closed


def _rows_of(program: Program, a: jex.Var) -> RowLocal | None:
    """The equations that make a row of a stack; None if rows are not made alone."""
    sizes = shape(a)
    at = program.producers.get(a)
    if at is None or len(sizes) < 2 or sizes[0] < 2:
        return None
    large = (memory.movable_nbytes(a.aval) or 0) >= limits.now.least_stack_bytes
    if not large or program.equations[at].primitive.name == "scan":
        return None
    analysis = Analysis(RowCount(sizes[0]), program.equations, program.producers)
    analysis.follow = lambda e: len(e.outvars) == 1
    try:
        analysis.demand(a, 0)
    except NotRowLocalError:
        return None
    found = analysis.row_local((), [a])
    # What is made whole for it, such as a key for each row, is at most a row.
    whole = (v for v in found.inputs if v in program.producers)
    nbytes = sum(memory.movable_nbytes(v.aval) or 0 for v in whole)
    small = nbytes * sizes[0] <= memory.nbytes(a.aval)
    return found if small and not analysis.conflict() else None


def _with_scans(
    closed: jex.ClosedJaxpr, program: Program, found: Mapping[jex.Var, RowLocal]
) -> jex.ClosedJaxpr:
    """The function, with a scan for each stack just before it is moved."""
    builder = Builder(program.constants)
    for e in program.equations:
        for a in variables(e.invars):
            if e.primitive.name == "device_put" and a in found:
                rows = found[a]
                scan = _scan_of(rows, program.debug_info)
                builder.rename([a], builder.trace(scan, *builder.read_all(rows.inputs)))
        builder.add(e)
    made = builder.program(program)
    live = [made.equations[i] for i in made.live]
    return dataclasses.replace(made, equations=live).closed(closed)


def _scan_of(rows: RowLocal, debug_info: Any) -> Callable[..., Any]:
    """A function of what rows are made of, which makes one after the other."""
    axes = [rows.axes.get(v) for v in rows.inputs]
    one = rows.jaxpr(1, debug_info)

    def scan(*values: Any) -> Any:
        def body(_: None, given: Sequence[Any]) -> tuple[None, Any]:
            rest = iter(given)
            operands = [
                x if axis is None else jnp.expand_dims(next(rest), axis)
                for x, axis in zip(values, axes, strict=True)
            ]
            (made,) = jax.core.eval_jaxpr(one, (), *operands)
            return None, jnp.squeeze(made, 0)

        xs = [
            jnp.moveaxis(x, axis, 0)
            for x, axis in zip(values, axes, strict=True)
            if axis is not None
        ]
        return lax.scan(body, None, xs, length=rows.rows)[1]

    return scan
