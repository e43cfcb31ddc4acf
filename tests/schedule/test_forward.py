"""What forward passes leave for backward passes."""

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from limited import limited
from small_steps import taken_apart

from optax_offload._schedule.rest import Outer, rest
from optax_offload._schedule.turns.forward import Pass, near_layers, residuals
from optax_offload._schedule.turns.liveness import Span, in_memory


def test_what_a_forward_pass_takes_itself_is_no_residual(monkeypatch):
    """Also where most is alive in between, as of the products of a teacher."""
    limited(monkeypatch, least_residual_bytes=1)

    def products(x, w):
        first = x @ w
        second = first @ w
        return second @ w + first

    struct = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    step = taken_apart(products, struct, struct)
    nodes = rest(step, ())
    assert len(nodes) == 4
    (first,) = nodes[0].defines
    there = [*in_memory(step, nodes)]
    assert not [*residuals(there, [Pass(0, 4, 2)])]
    assert [*residuals(there, [Pass(0, 2, 1)])] == [first]


def test_what_rests_is_near_the_layers_that_take_it():
    """In the forward pass, and from the first that takes it in the backward pass."""
    x = jax.typeof(jnp.zeros(4))
    resting, other = jex.Var(x), jex.Var(x)
    takes = {2: [resting], 3: [other], 7: [resting], 8: [resting, other]}
    nodes = [Outer(k, tuple(takes.get(k, ())), ()) for k in range(10)]
    spans = [Span(resting, 1, 8, over=True), Span(other, 0, 8)]
    found = near_layers(spans, nodes, [Pass(0, 5, 5)], {resting})
    assert [*found] == [Span(resting, 1, 2), Span(resting, 7, 8, True), spans[1]]
