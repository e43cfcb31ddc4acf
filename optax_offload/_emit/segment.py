"""A segment of a step, as a loop that runs once: it decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from optax_offload import _memory
from optax_offload._emit.moves import load_whole, store
from optax_offload._program import Places, Program, bound, evaluate, key_data, variables
from optax_offload._schedule import Segment

Values = Mapping[jex.Var, Any]


def run_segment(  # noqa: PLR0913
    program: Program,
    segment: Segment,
    env: Values,
    resting: Values,
    loaded: Values,
    made: Sequence[Any] = (),
) -> tuple[dict[jex.Var, Any], dict[jex.Var, Any], dict[jex.Var, Any], list[Any]]:
    """Evaluates a segment.

    Args:
      program: The step.
      segment: The segment.
      env: The values of variables, on the device.
      resting: The values that rest on the host.
      loaded: Those that the segment before has loaded for this one.
      made: What was made before it. Nothing but being carried through it makes a
        compiler finish that first: of gradients, it would keep all.

    Returns:
      The values of its results; those that rest on the host from here on; those that
      it has loaded for the next one; and what was made before it.
    """
    equations = [program.equations[i] for i in segment.positions]
    defined = {v for e in equations for v in e.outvars}
    taken = dict.fromkeys(v for e in equations for v in variables(e.invars))
    taken |= dict.fromkeys(segment.stores)
    reads = [v for v in taken if v not in defined and v not in segment.names]
    names = [v for v in reads if v not in program.constants]
    here = [env[v] for v in names]
    sources = [*dict.fromkeys((*segment.own, *segment.ahead))]
    sources = [v for v in sources if v not in loaded]
    hosts = [resting[v] for v in sources]
    given = {v: loaded[v] for v in segment.loads if v in loaded}
    places, data = Places.of(here), key_data(here)
    # A compiler that knew would take the loop apart (F10).
    iterations = lax.optimization_barrier(jnp.int32(1))

    def once(carry: Any) -> Any:
        number, passed = carry[0], carry[-1]
        # What is computed from these alone would be computed before the loop (F11).
        (values, rest, ahead, passed), number = lax.optimization_barrier(
            ((data, hosts, [*given.values()], passed), number)
        )
        on_device = bound(given, ahead) | bound(sources, map(load_whole, rest))
        known = program.constants | bound(names, places.keys(values))
        known |= {v: on_device[x] for v, x in segment.names.items()}
        known |= evaluate(program, segment.positions, known.__getitem__)
        results = key_data([known[v] for v in segment.results])
        stores = [store(known[v], "pinned_host") for v in segment.stores]
        ahead = [on_device[v] for v in segment.ahead]
        return number + 1, results, stores, ahead, passed

    start = (
        jnp.int32(0),
        [*map(_empty, segment.results)],
        [_memory.full(v.aval, 0, "pinned_host") for v in segment.stores],
        [_memory.full(_memory.device_type(v.aval), 0) for v in segment.ahead],
        [*made],
    )
    _, results, stores, ahead, passed = lax.while_loop(
        lambda carry: carry[0] < iterations, once, start
    )
    return (
        bound(segment.results, Places.of_types(segment.results).keys(results)),
        bound(segment.stores, stores),
        bound(segment.ahead, ahead),
        passed,
    )


def _empty(v: jex.Var) -> Any:
    """A value of a variable's type; of a random key's the data."""
    aval: Any = v.aval
    if _memory.movable_nbytes(aval) is not None:
        return _memory.full(aval, 0, _memory.kind_of_type(aval))
    data = jax.eval_shape(jax.random.key_data, aval)
    return jnp.zeros(data.shape, data.dtype)
