"""Scans of which rows rest on the host, as equations in which nothing is moved.

What a turn takes of a stack at rest it takes on the device, and what it leaves for one
it leaves there: the types of both say that the row is loaded, or stored, for the turn.
The transfers are written when the equation is lowered (`_emit/moves.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex
from jax.extend.core import primitives

from optax_offload._places import memory
from optax_offload._program.bodies import Body, entered, with_bodies
from optax_offload._program.build import Builder
from optax_offload._program.graph import bound, variables
from optax_offload._program.primitives import is_load, is_store, singly


def with_resting_scans(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Equations in which each scan that moves rows itself says so by types instead."""
    jaxpr = closed.jaxpr
    equations = [_resting(with_bodies(e, with_resting_scans)) for e in jaxpr.eqns]
    if all(x is y for x, y in zip(equations, jaxpr.eqns, strict=True)):
        return closed
    return jex.ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)


def with_rows(
    e: jex.JaxprEqn, closed: jex.ClosedJaxpr, stored: Sequence[int]
) -> jex.JaxprEqn:
    """A scan with another body, which takes and leaves rows at rest on the device.

    Args:
      e: The scan.
      closed: The body.
      stored: The results that rest on the host and whose rows it leaves on the device,
        as positions.
    """
    params = {**e.params, "jaxpr": closed, "stored": tuple(stored)}
    return e.replace(primitive=resting_scan, params=params)


def scan_at_rest(
    body: Callable[..., tuple[list[Any], list[Any]]],
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    loaded: Sequence[bool],
    stored: Sequence[bool],
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    """The results of `lax.scan`, which takes and leaves rows at rest.

    Args:
      body: The body, which has on the device what is loaded and stored for it.
      carry: The values that are carried.
      xs: The values that it takes rows of.
      loaded: For each of these, whether its rows are loaded.
      stored: For each result of stacked rows, whether these are stored. One that is a
        value of those above is this.
      **params: The other parameters of `lax.scan`.
    """
    rows = [
        (memory.device_type if load else jax.typeof)(x)
        for x, load in zip(xs, loaded, strict=True)
    ]
    types = list(map(jax.typeof, carry))
    found = jax.make_jaxpr(lambda *given: lax.scan(body, *given, **params))(types, rows)
    jaxpr = found.jaxpr
    (at,) = (n for n, e in enumerate(jaxpr.eqns) if e.primitive.name == "scan")
    e = jaxpr.eqns[at]
    some = [v for v, y in zip(jaxpr.outvars[len(types) :], stored, strict=True) if y]
    at_rest = [k for k, v in enumerate(e.outvars) if v in some]
    if at_rest or any(loaded):
        # The types of what rests, which only the scan takes and gives.
        given = bound(jaxpr.invars[len(types) :], xs)
        resting = {v: jex.Var(jax.typeof(x)) for v, x in given.items()}
        resting |= {v: jex.Var(memory.host_type(v.aval)) for v in some}

        def renamed(atoms: Sequence[Any]) -> list[Any]:
            return [
                a if isinstance(a, jex.Literal) else resting.get(a, a) for a in atoms
            ]

        e = with_rows(e, e.params["jaxpr"], at_rest)
        equations = [*jaxpr.eqns]
        equations[at] = e.replace(invars=renamed(e.invars), outvars=renamed(e.outvars))
        jaxpr = jaxpr.replace(
            invars=renamed(jaxpr.invars),
            outvars=renamed(jaxpr.outvars),
            eqns=equations,
        )
    results = jax.core.eval_jaxpr(jaxpr, found.consts, *carry, *xs)
    return results[: len(types)], results[len(types) :]


def _resting(e: jex.JaxprEqn) -> jex.JaxprEqn:
    if e.primitive.name != "scan":
        return e
    (body,) = entered(e)
    equations = [x for inner in body.jaxpr.eqns for x in singly(inner)]
    loaded = _loaded(body, equations)
    before = {x.outvars[0]: x.invars[0] for x in equations if is_store(x)}
    stored = [x for x in body.rows_given if variables([x.row]) and x.row in before]
    if not (loaded or stored):
        return e
    jaxpr, builder = body.jaxpr, Builder()
    here = {v: jex.Var(memory.device_type(v.aval)) for v in loaded}
    for x in equations:
        if is_load(x) and x.invars[0] in here:
            builder.rename(x.outvars, [here[x.invars[0]]])
        else:
            builder.add(x)
    results = list(jaxpr.outvars)
    for x in stored:
        results[x.position] = before[x.row]
    results = builder.read_all(results)
    used = {v for x in builder.equations for v in variables(x.invars)}
    used.update(variables(results))
    kept = [x for x in builder.equations if not is_store(x) or x.outvars[0] in used]
    taken = [here.get(v, v) for v in jaxpr.invars]
    changed = jaxpr.replace(invars=taken, eqns=kept, outvars=results)
    positions = (*e.params.get("stored", ()), *(x.position for x in stored))
    return with_rows(e, jex.ClosedJaxpr(changed, body.closed.consts), positions)


def _loaded(body: Body, equations: Sequence[jex.JaxprEqn]) -> list[jex.Var]:
    """The rows at rest that a turn loads, and does nothing else with."""
    loads, others = set[jex.Var](), set(variables(body.jaxpr.outvars))
    for x in equations:
        (loads if is_load(x) else others).update(variables(x.invars))
    return [x.row for x in body.rows_taken if x.row in loads and x.row not in others]


def _types(*given: Any, stored: Sequence[int], **params: Any) -> Any:
    types, effects = primitives.scan_p.abstract_eval(*given, **params)
    at_rest = enumerate(types)
    return [memory.host_type(x) if k in stored else x for k, x in at_rest], effects


# Named as JAX's own: to whoever asks what an equation does, it is a scan.
resting_scan = jex.Primitive("scan")
resting_scan.multiple_results = True
# Its body may have primitives that JAX lowers when it binds them (`streamed_step.py`).
resting_scan.is_high = lambda *_, **__: False
resting_scan.def_effectful_abstract_eval(_types)
