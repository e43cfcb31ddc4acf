"""Updates alone in a branch, whose gradients are made outside of it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import assert_close
from jax import lax

import optax_offload as oo
from optax_offload._places import memory

WIDTH, LAYERS = 32, 4
BYTES = LAYERS * WIDTH * WIDTH * 4
X = jnp.ones((8, WIDTH))
MOMENTS = oo.Rule(".*", min_bytes=1024)


def make_params():
    """The stacked layers of a scan."""
    shape = LAYERS, WIDTH, WIDTH
    return {"w": jax.random.normal(jax.random.key(0), shape) / 8}


def loss(params, x):
    """Layers under a scan."""
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    return jnp.mean(lax.scan(layer, x, params["w"])[0] ** 2)


def is_finite(value, grads, state):
    """Whether the loss is a number."""
    return jnp.isfinite(value)


def are_finite(value, grads, state):
    """Whether all gradients are."""
    return jnp.isfinite(optax.tree.norm(grads))


def is_even(value, grads, state):
    """Whether so many updates came before that this is one too."""
    return state[0].count % 2 == 0


def step_of(tx, decided, inside=False):
    """A step that keeps what it has unless a predicate is true, and counts that."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)

        def update(params, state):
            taken = jax.grad(loss)(params, x) if inside else grads
            updates, state = tx.update(taken, state, params)
            return optax.apply_updates(params, updates), state, jnp.int32(0)

        def keep(params, state):
            return params, state, state[0].count + 1

        ok = decided(value, grads, state)
        return jax.jit(lax.cond, static_argnums=(1, 2))(ok, update, keep, params, state)

    return step


def three_steps(jit, tx, decided):
    """Parameters, state and counts of three steps, the second without numbers."""
    step, params = jit(step_of(tx, decided), donate_argnums=(0, 1)), make_params()
    state, kept = tx.init(params), []
    for scale in (1.0, jnp.nan, 1.0):
        params, state, n = step(params, state, X * scale)
        kept.append(int(n))
    return params, state, kept


@pytest.mark.parametrize("decided", [is_finite, are_finite])
def test_it_is_made_in_any_case_and_chosen(decided):
    """Its gradients never exist, and where it is skipped all is as it was."""
    ours = oo.offload(optax.adamw(1e-2), MOMENTS)
    params, state, kept = three_steps(oo.jit, ours, decided)
    want = three_steps(jax.jit, optax.adamw(1e-2), decided)
    assert kept == want[2] == [0, 2, 0]
    assert {memory.memory_kind_of(x) for x in (state[0].mu["w"], state[0].nu["w"])} == {
        "pinned_host"
    }
    assert_close((params, state), want[:2], rtol=1e-5, atol=1e-7)
    step = oo.jit(step_of(ours, decided), donate_argnums=(0, 1))
    found = step.schedule(params, state, X)
    assert found.gradient_bytes == BYTES


def test_parameters_at_rest_are_replaced_as_they_are_loaded():
    """An update in a branch had all of them on the device, and their updates."""
    tx = oo.offload(optax.adamw(1e-2), MOMENTS)
    params = {f"w{i}": w for i, w in enumerate(make_params()["w"])}

    def few(params, x):
        for w in params.values():
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params, state, x):
        value, grads = jax.value_and_grad(few)(params, x)
        update = lambda p, s: descended(tx, p, s, grads)  # noqa: E731
        return lax.cond(jnp.isfinite(value), update, lambda *x: x, params, state)

    def descended(tx, params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    ours = oo.jit(step, donate_argnums=(0, 1))
    here = ours.schedule(params, state, X)
    assert "the update is in a cond" in str(here)
    rests = oo.set_memory_kind(params, ".*", "pinned_host")
    found = ours.schedule(rests, state, X)
    assert found.replaced_bytes == BYTES
    assert "in a cond" not in str(found)
    want = jax.jit(step)(params, state, X)
    for scale in (1.0, jnp.nan):
        rests, state = ours(rests, state, X * scale)
    assert {memory.memory_kind_of(x) for x in rests.values()} == {"pinned_host"}
    assert_close((rests, state), want, rtol=1e-5, atol=1e-7)


def test_what_a_count_skips_moves_nothing():
    """Most such steps update nothing: state would cross the link in each of them."""
    tx = oo.offload(optax.adamw(1e-2), MOMENTS)
    params = make_params()
    found = oo.jit(step_of(tx, is_even)).schedule(params, tx.init(params), X)
    assert str(found).endswith("left outside: the update is in a cond")


def test_a_branch_with_the_gradients_is_a_step_of_its_own():
    """It computes nothing where it is skipped."""
    tx = oo.offload(optax.adamw(1e-2), MOMENTS)
    params = make_params()
    step = oo.jit(step_of(tx, is_finite, inside=True))
    found = step.schedule(params, tx.init(params), X)
    assert found.inside
