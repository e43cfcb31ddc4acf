"""What a step's own equations make of what rests becomes an update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close
from jax import lax
from small_jaxprs import closed_of, on_device, on_host

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat
from optax_offload._program import called, returning
from optax_offload._schedule import with_own_updates

H, D = on_host(4, 3), on_device(4, 3)
NUMBER = on_device(dtype=jnp.int32)


@pytest.fixture(autouse=True)
def with_turns(monkeypatch):
    """As with the newest version of JAX."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)


def rewritten(fn, *types):
    """A function with its own updates, traced as if all were on the device."""
    on_the_device = [on_device(*x.shape, dtype=x.dtype) for x in types]
    closed = closed_of(fn, *on_the_device)
    found, _ = with_own_updates(closed, returning(closed, types))
    return found


def update_in(fn, *types):
    """The update that is among the equations of a function, and what is left."""
    equations = rewritten(fn, *types).jaxpr.eqns
    (what,) = filter(None, map(called, equations))
    return what.update, [e.primitive.name for e in equations if not called(e)]


def gradient(w, x):
    """A gradient, which no arithmetic alone makes."""
    return x.T @ (x @ w)


X = on_device(4, 4)


def test_descent():
    """New parameters, in the place of the old; the gradient is what it takes."""
    update, others = update_in(lambda w, x: w - 0.1 * gradient(w, x), H, X)
    (new,) = update.outputs
    assert new.stored
    assert [new.alias] == update.loads
    assert "mul" not in others
    assert others.count("dot_general") == 2


@pytest.mark.parametrize("types", [(H, H, NUMBER, X), (H, D, NUMBER, X)])
def test_momentum(types):
    """Its state too, wherever that is; numbers that a count gives are made there."""

    def fn(w, m, n, x):
        m = 0.9 * m + gradient(w, x)
        return w - m / (1.0 + n), m, n + 1

    update, others = update_in(fn, *types)
    new, momentum = update.outputs
    assert new.stored
    assert momentum.stored == (types[1] is H)
    assert None not in (new.alias, momentum.alias)
    assert new.alias != momentum.alias
    assert "div" not in others
    assert others.count("add") == 1  # The count is a result too.


def test_state_on_the_device_has_its_own_place():
    """Of several like it that which it is made of; a gradient that is returned none."""

    def fn(w, v, m, x):
        g = 2.0 * gradient(w, x)
        m, v = 0.9 * m + g, 0.99 * v + 0.1 * g * g
        return w - m / jnp.sqrt(v), m, v, g

    jaxpr = rewritten(fn, H, D, D, X).jaxpr
    (e,) = filter(called, jaxpr.eqns)
    aliases = [o.alias for o in e.params["what"].update.outputs]
    places = [None if i is None else jaxpr.invars.index(e.invars[i]) for i in aliases]
    assert places == [0, 2, 1, None]


def test_gradients_of_microbatches_are_summed_where_they_are_made():
    """The update takes their sum alone, so that none waits for another."""

    def fn(w, x):
        return w - 0.1 * (gradient(w, x) + gradient(w, 2 * x))

    update, others = update_in(fn, H, X)
    assert sum(v.aval.shape == (4, 3) for v in update.program.invars) == 2
    assert "add" in others


def scaled_by_its_norm(w, x):
    """An update that is scaled by its own norm, which is known after it."""
    change = jnp.tanh(gradient(w, x))
    return w - change / jnp.sum(change**2)


def of_the_next(w, x):
    """New parameters with which the step goes on."""
    new = w - gradient(w, x)
    return new, jnp.tile(new, (2**14, 1))


def test_what_is_reduced_is_on_the_device_too():
    """A norm of new parameters, and one of their change, are made of these."""

    def fn(w, x):
        change = 0.1 * gradient(w, x)
        new = w - change
        return new, jnp.sum(new**2), jnp.max(jnp.abs(change))

    update, others = update_in(fn, H, X)
    assert [x.memory_kind for x in update.outputs] == ["pinned_host", *["device"] * 2]
    assert "sub" not in others
    assert {"square", "abs"}.isdisjoint(
        e.primitive.name for e in update.program.equations
    )


def of_rows(w, x):
    """Rows that a scan makes, which it may update."""
    _, made = lax.scan(lambda c, r: (c, jnp.sin(r)), 0.0, w)
    return w - made


def of_two(w, x):
    """Two products, of which neither would be free before the other is there."""
    return w - gradient(w, x) * gradient(w, x + 1)


@pytest.mark.parametrize(
    "fn", [scaled_by_its_norm, of_the_next, of_rows, of_two, lambda w, x: (w, x)]
)
def test_what_is_left_as_it_is(fn):
    """Where an update would save nothing, or what it takes is needed elsewhere."""
    assert not any(map(called, rewritten(fn, H, X).jaxpr.eqns))


def test_what_is_on_the_device_stays_as_it_is():
    """There is nothing to store."""
    closed = rewritten(lambda w, x: w - gradient(w, x), D, X)
    assert not any(map(called, closed.jaxpr.eqns))


def test_older_versions_cut_no_steps(monkeypatch):
    """There the equations of a step stay what they were."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", False)
    closed = rewritten(lambda w, x: w - gradient(w, x), H, X)
    assert not any(map(called, closed.jaxpr.eqns))


WIDTH = 128
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "lamb": optax.lamb(1e-2),
}


def step_of(tx):
    """A step of layers in a Python loop, all of whose values are one argument."""

    def loss(layers, x):
        for w in layers:
            x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    def step(both, x):
        layers, state = both
        value, grads = jax.value_and_grad(loss)(layers, x)
        updates, state = tx.update(grads, state, layers)
        return (optax.apply_updates(layers, updates), state), value

    return step


@pytest.mark.parametrize("where", [".*", "0/.*"], ids=["all", "parameters"])
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_that_are_not_offloaded(tx, where):
    """They compute what they did, and all of it is where it was."""
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))
    want = layers, tx.init(layers)
    got = oo.set_memory_kind(jax.tree.map(jnp.copy, want), where, "pinned_host")
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(got)]
    plain, step = jax.jit(step_of(tx)), oo.jit(step_of(tx), donate_argnums=0)
    for _ in range(3):
        want, value = plain(want, x)
        got, ours = step(got, x)
        np.testing.assert_allclose(ours, value, rtol=1e-5)
    assert_close(got, want)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(got)] == kinds


@pytest.mark.aot
@pytest.mark.newest
@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gradients_are_freed_turn_by_turn(name):
    """Ten layers of 16 MiB: 136 and 200 MiB; with all gradients 342 and 658."""
    tx = OPTIMIZERS[name]
    matrix = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    both = oo.eval_shape(lambda w: (w, tx.init(w)), [matrix] * 10)
    both = oo.set_memory_kind(both, ".*", "pinned_host")
    x = jax.ShapeDtypeStruct((256, 2048), jnp.float32)
    jitted = oo.jit(step_of(tx), donate_argnums=0)
    compiled = aot.compile(jitted, both, x, target=aot.Target("h100"))
    assert aot.peak(compiled).peak_bytes < 220 * 2**20


@pytest.mark.aot
@pytest.mark.newest
@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize(
    ("wrap", "most"), [(oo.offload, 220), (lambda tx, _: tx, 340)], ids=["ours", "own"]
)
def test_what_norms_are_of_is_freed_turn_by_turn(wrap, most):
    """Norms of changes and of new parameters, which are reduced: 209 and 287 MiB."""
    tx = wrap(OPTIMIZERS["adamw"], ".*")
    train = step_of(tx)

    def step(both, x):
        (layers, state), value = train(both, x)
        change = jax.tree.map(jnp.subtract, layers, both[0])
        norms = [optax.tree.norm(tree) for tree in (change, layers)]
        return (layers, state), (value, norms)

    matrix = jax.ShapeDtypeStruct((2880, 2880), jnp.float32)
    both = oo.eval_shape(lambda w: (w, tx.init(w)), [matrix] * 10)
    both = oo.set_memory_kind(both, ".*", "pinned_host")
    x = jax.ShapeDtypeStruct((256, 2880), jnp.float32)
    compiled = aot.compile(
        oo.jit(step, donate_argnums=0), both, x, target=aot.Target("h100")
    )
    peak = aot.peak(compiled).peak_bytes
    assert peak < most * 2**20, peak
