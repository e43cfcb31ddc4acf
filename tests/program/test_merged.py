"""Equations that are equal to one before: evaluated once, if that saves products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from small_jaxprs import closed_of, load, names, on_device, on_host, program_of, run
from small_steps import at_rest, taken_apart, train_step, unrolled
from small_steps import on_device as types_on_device

import optax_offload as oo
from optax_offload._program import flatten
from optax_offload._program.merged import merged

X = on_device(4, 4)


def products(program):
    """How many there are."""
    return names(program.equations).count("dot_general")


def net(w, x):
    """Two layers."""
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def test_what_is_evaluated_twice_is_once():
    """With what follows from it; numbers are the same."""

    def fn(w, x):
        return net(w, x) + 1, jnp.sum(net(w, x) + 1) * 2

    program = program_of(fn, X, X)
    found = merged(program)
    assert (products(program), products(found)) == (4, 2)
    assert names(found.equations).count("add") == 1
    args = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 4, 4)
    for ours, theirs in zip(run(found, *args), run(program, *args), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_without_equal_products_nothing_changes():
    """Cheap equations are a compiler's to join."""
    program = program_of(lambda w, x: (jnp.tanh(x) @ w, jnp.tanh(x) @ w.T), X, X)
    assert merged(program) is program


def test_other_operands_parameters_or_literals():
    """Each makes another value."""

    def fn(w, x):
        made = [
            *(x @ w, w @ x),
            lax.dot(x, w, precision="highest"),
            lax.dot(x, w, preferred_element_type=jnp.bfloat16),
            *((x * 2) @ w, (x * 3) @ w),
        ]
        return [jnp.sum(y) for y in made]  # Results would stay in any case.

    program = program_of(fn, X, X)
    assert merged(program) is program


def test_constants_are_equal_if_they_are_one_array():
    """Each call of a function closes over it anew."""
    one, other = jnp.ones((4, 4)), jnp.ones((4, 4))

    def calls(a, b):
        closed = closed_of(lambda x: (jax.jit(lambda x: x @ a)(x) + 1, x @ b * 2), X)
        return flatten(closed)

    assert products(merged(calls(one, one))) == 1
    assert products(merged(calls(one, other))) == 2


def test_results_stay():
    """Each result has a variable of its own, as each has a place."""
    program = program_of(lambda w, x: (x @ w, x @ w, jnp.sum(x @ w)), X, X)
    found = merged(program)
    assert products(found) == 2
    assert len({*found.outvars}) == 3


def test_loads_stay_where_they_are_taken():
    """And what is made of them alone; products of equal ones are one."""

    def fn(w, x):
        first = jnp.tanh(x @ (load(w) * 2))
        return jnp.sum(first), jnp.tanh(x @ (load(w) * 2)) * 3, load(w) - 1

    found = merged(program_of(fn, on_host(4, 4), X))
    assert products(found) == 1
    kinds = names(found.equations)
    assert kinds.count("device_put") == 3
    assert kinds.count("tanh") == 1


def test_barriers_loops_and_effects_stay():
    """A barrier is there to keep apart what is equal."""

    def fn(w, x):
        def one(x):
            jax.debug.callback(lambda x: None, x[0, 0])
            return lax.fori_loop(0, 2, lambda _, h: h @ w, x)

        return jnp.sum(one(x @ w)), one(x @ w) * 2, lax.optimization_barrier(x) @ w

    found = merged(program_of(fn, X, X))
    kinds = names(found.equations)
    assert [kinds.count(x) for x in ("debug_callback", "scan", "dot_general")] == [
        2
    ] * 3


def test_what_makes_other_numbers_each_time_stays():
    """A generator without a key."""

    def fn(w, x):
        made = [lax.rng_uniform(0.0, 1.0, (4, 4)) @ w for _ in range(2)]
        return [jnp.sum(y) for y in (*made, jnp.sin(x @ w), jnp.cos(x @ w))]

    found = merged(program_of(fn, X, X))
    assert names(found.equations).count("rng_uniform") == 2
    assert products(found) == 3
    again = jax.checkpoint(lambda w: jnp.sum(lax.rng_uniform(0.0, 1.0, (4, 4)) @ w))
    found = merged(program_of(lambda w: (again(w) + 1, again(w) + 2), X))
    assert names(found.equations).count("remat2") == 2


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_what_a_checkpoint_computes_again_stays(prevent_cse):
    """The forward passes of two evaluations are one, their backward passes are not."""
    again = jax.checkpoint(net, prevent_cse=prevent_cse)

    def loss(w, x):
        return jnp.sum(again(w, x) ** 2) + jnp.sum(jnp.sin(again(w, x)))

    program = program_of(jax.grad(loss), X, X)
    found = merged(program)
    counts = [names(p.equations).count("remat2") for p in (program, found)]
    forward = [names(p.equations).count("tanh") for p in (program, found)]
    assert counts[1] == 2
    assert forward == [4, 2]
    args = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 4, 4)
    (ours,), (theirs,) = (run(p, *args) for p in (found, program))
    np.testing.assert_array_equal(ours, theirs)


def test_bodies_traced_apart_are_equal():
    """Those of two calls of a function, unless they close over other arrays."""

    def both(x):
        one, other = (jax.checkpoint(lambda x: x * jnp.sin(x @ x)) for _ in range(2))
        return jnp.sum(one(x)) + jnp.sum(other(x) * 2)

    program = program_of(both, X)
    assert names(merged(program).equations).count("remat2") == 1
    a, b = jnp.ones((4, 4)), jnp.ones((4, 4))
    closed = [closed_of(lambda x, y=y: x @ y, X) for y in (a, a, b)]

    def count(bodies):
        bodies = iter(bodies)
        equations = [
            e.replace(params={**e.params, "jaxpr": next(bodies)})
            if e.primitive.name == "remat2"
            else e
            for e in program.equations
        ]
        found = merged(dataclasses.replace(program, equations=equations))
        return names(found.equations).count("remat2")

    assert (count(closed[:2]), count(closed[1:])) == (1, 2)


def test_a_step_whose_model_is_evaluated_twice():
    """A metric of the parameters before the update: no products but the loss's."""
    layers = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    tx = oo.offload(optax.sgd(0.1, 0.9), [oo.Rule(".*", min_bytes=0)])
    state = at_rest(jax.eval_shape(tx.init, layers))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    inner = train_step(tx, unrolled)

    def with_metric(params, state, x):
        return *inner(params, state, x), unrolled(params, x)

    types = at_rest(layers), state, types_on_device(x)
    counts = [products(taken_apart(f, *types).program) for f in (inner, with_metric)]
    assert counts[0] == counts[1]
