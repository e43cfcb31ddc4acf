"""Scans whose stacks are moved whole, where a TPU moves no row of them (F24)."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend import core as jex

from optax_offload._places import memory, tpu_layout
from optax_offload._program import (
    Atom,
    Body,
    Builder,
    entered,
    variables,
    with_bodies,
    with_rows,
)


def whole_stacks(jaxpr: jex.Jaxpr) -> Iterator[jex.Var]:
    """Yields what scans load rows of or stack in host memory, and a TPU cannot."""
    for e in jaxpr.eqns:
        for body in entered(e):
            yield from whole_stacks(body.jaxpr)
            operands, results = _whole_to(body)
            yield from variables(e.invars[i] for i in operands)
            yield from (e.outvars[k] for k in results)


def with_whole_stacks(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """The equations, where such stacks are loaded before a scan, or stored after it."""
    builder = Builder()
    # Of stacks in host memory that which is on the device.
    here: dict[Atom, Atom] = {}
    for e in jaxpr.eqns:
        e = with_bodies(e, _closed)
        of_scan = [found for found in map(_whole_to, entered(e)) if any(found)]
        if not of_scan:
            builder.add(e)
            continue
        ((operands, results),) = of_scan
        invars, outvars = builder.read_all(e.invars), list(e.outvars)
        for i in operands:
            a = invars[i]
            if a not in here:
                here[a] = builder.trace(lambda x: memory.transfer(x, "device"), a)[0]
            invars[i] = here[a]
        for k in results:
            outvars[k] = jex.Var(memory.device_type(e.outvars[k].aval))
        (body,) = entered(e)
        stored = [x.position for x in body.stores if x.position not in results]
        changed = with_rows(e, body.closed, stored)
        builder.add(changed.replace(invars=invars, outvars=outvars))
        for k in results:
            y = outvars[k]
            (a,) = builder.trace(lambda x: memory.transfer(x, "pinned_host"), y)
            builder.rename([e.outvars[k]], [a])
            here[a] = y
    results = builder.read_all(jaxpr.outvars)
    return jaxpr.replace(eqns=builder.equations, outvars=results)


def _closed(body: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    if next(whole_stacks(body.jaxpr), None) is None:
        return body
    return jex.ClosedJaxpr(with_whole_stacks(body.jaxpr), body.consts)


def _whole_to(body: Body) -> tuple[list[int], list[int]]:
    """The operands and results of a scan that a TPU has to move whole, by position."""
    operands = [
        x.position for x in body.loads for v in variables([x.stack]) if _stays_whole(v)
    ]
    return operands, [x.position for x in body.stores if _stays_whole(x.stack)]


def _stays_whole(v: jex.Var) -> bool:
    """Returns whether a stack is in host memory, and a TPU moves no row of it.

    On several devices a layer may be sharded otherwise than what it takes.
    """
    shared = memory.devices_of(v.aval) > 1
    moves = tpu_layout.part_of_row_moves if shared else tpu_layout.row_moves
    return memory.on_host(v.aval) and not moves(v.aval, 0)
