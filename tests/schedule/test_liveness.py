"""What is alive at each equation of a step."""

import jax
import jax.numpy as jnp
from small_steps import taken_apart

from optax_offload._schedule import liveness
from optax_offload._schedule.rest import rest


def test_a_body_is_looked_through_once(monkeypatch):
    """Not once for each value that it takes: layers of a Python loop have many."""
    layers = jax.checkpoint(lambda xs: [jnp.sin(x @ x) for x in xs])
    step = taken_apart(
        lambda *xs: layers([jnp.cos(x) for x in xs]),
        *[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 50,
    )
    seen = []
    flops_of = liveness.flops_of
    monkeypatch.setattr(
        liveness, "flops_of", lambda e: seen.append(e.primitive.name) or flops_of(e)
    )
    nodes = rest(step, ())
    assert sum(1 for _ in liveness.in_memory(step, nodes)) >= 50
    assert len(seen) - seen.count("cos") <= 1, seen
