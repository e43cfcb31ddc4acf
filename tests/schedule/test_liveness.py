"""What is alive at each equation of a step."""

import jax
import jax.numpy as jnp
from small_steps import taken_apart

from optax_offload._schedule.rest import rest
from optax_offload._schedule.turns import liveness


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


def spans(fn, *shapes):
    """What a function has in memory, by the name of what makes it."""
    step = taken_apart(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    nodes = rest(step, ())
    names = [step.program.equations[node.position].primitive.name for node in nodes]
    found = liveness.in_memory(step, nodes)
    return [(names[x.made], names[x.last], x.over) for x in found]


def test_what_is_made_of_a_product_that_is_there_is_not_in_memory():
    """A compiler computes it again where it is taken, past other products too."""

    def layer(x, w, v):
        y = x @ w
        kept = jnp.tanh(y) + 1
        return (v @ (y * 2)) * y * kept

    found = spans(layer, (4, 8), (8, 4), (4, 4))
    assert [made for made, *_ in found] == ["dot_general", "mul", "dot_general"]


def test_what_is_made_of_a_product_that_is_gone_is_in_memory():
    """That would be there for longer otherwise."""

    def layer(x, w, v):
        kept = jnp.tanh(x @ w) + 1
        return (v @ v) * kept

    found = [made for made, *_ in spans(layer, (4, 8), (8, 4), (4, 4))]
    assert found == ["dot_general", "add", "dot_general"]


def test_arithmetic_is_written_over_what_it_is_the_last_to_take():
    """Not so a product."""
    found = spans(lambda x, w: jnp.tanh(x @ w) @ w, (4, 4), (4, 4))
    assert found[:2] == [("dot_general", "tanh", True), ("tanh", "dot_general", False)]


def test_what_is_summed_is_gone_after_that():
    """However late the sum is taken."""
    found = spans(lambda x, w, v: jnp.exp(v) * jnp.sum(x @ w), (4, 8), (8, 4), (4, 4))
    assert ("dot_general", "reduce_sum", False) in found
