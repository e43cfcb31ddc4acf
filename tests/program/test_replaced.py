"""Which results replace arguments that rest on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from small_jaxprs import closed_of, on_device, on_host
from small_steps import at_rest, offloaded, traced

import optax_offload as oo
from optax_offload._program.replaced import returning

H, D = on_host(4, 3), on_device(4, 3)
# What a step may do with new values, which are nearly the same after it.
PASSED_ON = {
    "stop_gradient": lax.stop_gradient,
    "name": lambda x: checkpoint_name(x, "new"),
    "rounded": lambda x: lax.reduce_precision(x, 8, 7),
    "checkpoint": jax.checkpoint(lambda x: x + 1),
}
MESH = jax.sharding.Mesh(jax.devices()[:2], ("d",))


def replaced(fn, *types, places=None):
    """For each result that returns, the argument that it replaces.

    The function is traced as if all were on the device.
    """
    on_the_device = [on_device(*x.shape, dtype=x.dtype) for x in types]
    return returning(closed_of(fn, *on_the_device), types, places)


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda w, g: w - 0.1 * g, {0: 0}),
        (lambda w, g: w + g, {0: 0}),
        (lambda w, g: (g * 2.0, w - g), {1: 0}),
        (lambda w, g: 0.9 * w + 0.1 * g, {0: 0}),
        (lambda w, g: jnp.where(g > 0, w - g, w), {0: 0}),
        (lambda w, g: jnp.maximum(w - g, 0.0), {0: 0}),
        (lambda w, g: (w.astype(jnp.bfloat16) - 1).astype(jnp.float32), {0: 0}),
        (lambda w, g: jax.jit(lambda a, b: a - b)(w, g), {0: 0}),
        *((lambda w, g, fn=fn: fn(w - g), {0: 0}) for fn in PASSED_ON.values()),
    ],
    ids=["sub", "add", "which", "decay", "where", "max", "casts", "jit", *PASSED_ON],
)
def test_what_is_added_to_an_argument_replaces_it(fn, want):
    """Also a multiple of it, a choice between both, and through casts and calls."""
    assert replaced(fn, H, D) == want


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, g: jnp.sum(w) * g,
        lambda w, g: jnp.tanh(w),
        lambda w, g: (w - g)[:2],
        lambda w, g: (w - g).astype(jnp.bfloat16),
        lambda w, g: (w - g).T,
        lambda w, g: g + 1.0,
        lambda w, g: w,
    ],
    ids=["norm", "tanh", "rows", "dtype", "transposed", "other", "itself"],
)
def test_what_replaces_nothing(fn):
    """A function of an argument, of another type, or the argument itself."""
    assert replaced(fn, H, D) == {}


def test_an_argument_on_the_device_is_not_replaced():
    """There is nothing to return."""
    assert replaced(lambda w, g: w - g, D, D) == {}


def test_the_nearest_result_replaces():
    """The fewest equations lead to it; the other result is something else."""

    def fn(w, g):
        new = w - g
        return (new - 1.0) * 2.0, new

    assert replaced(fn, H, D) == {1: 0}


def test_each_argument_is_replaced_once():
    """Two arguments, two results, in another order."""

    def fn(a, b, g):
        return b - g, a + b - g, a - g

    assert replaced(fn, H, H, D) == {0: 1, 2: 0}


def test_a_barrier_keeps_values_apart():
    """Each result of it is the operand of its own position."""

    def fn(a, b, g):
        return lax.optimization_barrier((b - g, a - g))

    assert replaced(fn, H, H, D) == {0: 1, 1: 0}


@pytest.mark.parametrize(
    "fn", [jnp.tanh, lambda w: jnp.roll(w, 1, 0), lambda w: w / jnp.sum(w)]
)
def test_what_has_the_place_of_a_donated_argument(fn):
    """It replaces that, whatever it is, if nothing else does."""

    def step(w, g):
        return fn(w), g

    assert replaced(step, H, D) == {}
    assert replaced(step, H, D, places={0: 0}) == {0: 0}
    assert replaced(step, D, D, places={0: 0, 1: 1}) == {}
    assert replaced(lambda w, g: (w, g), H, D, places={0: 0}) == {}
    assert replaced(lambda w, g: (fn(w)[:2], g), H, D, places={0: 0}) == {}
    moved = {1: 0}
    assert replaced(lambda w, g: (fn(w), w - g), H, D, places={0: 0}) == moved


def test_what_a_step_moves_by_hand_stays_there():
    """As where it loads for good what rested."""
    device = jax.memory.Space.Device
    for fn in (
        lambda w, g: jnp.sin(jax.device_put(w, device)),
        lambda w, g: jax.device_put(jnp.sin(w), device),
    ):
        assert replaced(fn, H, D, places={0: 0}) == {}


@pytest.mark.parametrize(
    "fn", [lambda w: jnp.clip(w, -1, 1), lambda w: 0.9 * w, lambda w: w * (w > 0)]
)
def test_what_is_made_of_new_parameters_may_have_their_place(fn):
    """It is what the next step takes, and the other result is one more."""

    def step(w, g):
        new = w - g
        return fn(new), new

    assert replaced(step, H, D) == {1: 0}
    assert replaced(step, H, D, places={0: 0}) == {0: 0}
    assert replaced(step, H, D, places={1: 0}) == {1: 0}


def test_a_distance_from_an_argument_comes_after_it():
    """How far a parameter moved follows from the new one, and is no parameter."""

    def fn(w, g):
        new = w - (g + g) * 2.0
        return new - w, new

    assert replaced(fn, H, D) == {1: 0}
    assert replaced(fn, H, D, places={0: 0}) == {1: 0}


def test_a_gradient_with_weight_decay_is_no_parameter():
    """Only a multiple of the argument leads to it, although the new one follows it."""

    def fn(w, g):
        grad = jnp.tanh(g) + 0.1 * w
        return grad, w - 0.5 * grad - 0.1 * (g * g)

    assert replaced(fn, H, D) == {1: 0}


def test_a_state_on_the_device_keeps_its_own():
    """First parameters that a state has are chosen from those at rest, or kept."""

    def fn(w, first, g):
        return jnp.where(g[0, 0] > 0, w, first), w - 0.1 * g * 2.0

    assert replaced(fn, H, D, D) == {1: 0}


def test_state_is_its_updates_to_return():
    """An update leaves new state where it was: also where a step keeps the old."""
    tx = offloaded(optax.trace(0.9))
    state = at_rest(jax.eval_shape(optax.trace(0.9).init, D))

    def step(g, state):
        updates, new = tx.update(g, state)
        kept = jnp.where(g[0, 0] > 0, new.trace, state.trace)
        return updates, kept

    closed = traced(step, (D, state))
    assert returning(closed, jax.tree.leaves((D, state))) == {}


def carried(w, g):
    """A parameter that a loop carries."""
    return lax.fori_loop(0, 3, lambda _, w: w - g, w)


def carried_while(w, g):
    """A parameter that a loop of unknown length carries, beside a counter."""
    return lax.while_loop(
        lambda c: (c[0] < 3) & (jnp.sum(g) > 0),
        lambda c: (c[0] + 1, c[1] - g),
        (0, w),
    )[1]


def stacked(w, g):
    """A parameter whose rows a scan hands through, and then what is added."""
    _, rows = lax.scan(lambda c, r: (c + 1.0, r), 0.0, w)
    return rows - g


def in_rows(w, g):
    """A parameter to whose rows a scan adds something, as layers do to averages."""
    _, rows = lax.scan(lambda c, r: (c + r, 0.9 * r + 0.1 * jnp.sin(c)), g[0], w)
    return rows


def chosen(w, g):
    """A parameter that is updated in one of two branches."""
    return lax.cond(g[0, 0] > 0, lambda w, g: w - jnp.sin(g), lambda w, g: w, w, g)


def sharded(w, g):
    """A parameter that is updated on each device's part."""
    part = P("d")
    return jax.shard_map(
        lambda w, g: w - g, mesh=MESH, in_specs=(part, part), out_specs=part
    )(w, g)


@pytest.mark.parametrize(
    "fn",
    [carried, carried_while, stacked, in_rows, chosen, sharded],
    ids=["scan", "while", "rows", "in rows", "cond", "shard_map"],
)
def test_through_bodies(fn):
    """What a body carries, hands on, chooses or updates is still the argument."""
    assert replaced(fn, H, D) == {0: 0}


def test_rows_that_a_scan_makes_anew_are_no_argument():
    """A stack of functions of rows is not the stack, nor what every row takes."""

    def fn(w, g):
        _, rows = lax.scan(lambda c, r: (c + jnp.sum(w), jnp.sin(r)), 0.0, g)
        return rows - g

    assert replaced(fn, H, D) == {}
    assert replaced(fn, H, H) == {0: 1}


def test_another_sharding_is_no_argument():
    """Parts of one device that became those of another replace nothing."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "e"))

    def updated(after):
        def fn(w, g):
            return jax.shard_map(
                lambda w, g: w - g,
                mesh=mesh,
                in_specs=(P("d"), P("d")),
                out_specs=P(after),
                check_vma=False,
            )(w, g)

        return replaced(fn, H, D)

    assert updated("d") == {0: 0}
    assert updated("e") == {}


def test_state_that_is_made_anew_returns():
    """What has its place, unless it follows from an update."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=0))
    w = jnp.ones((8, 4))

    def fn(make):
        def step(state, g):
            (adam, *rest) = tx.update(g, state, w)[1]
            return (adam._replace(mu=make(adam.mu, g)), *rest)

        return step

    def found(make):
        state = tx.init(w)
        closed = jax.make_jaxpr(fn(make))(state, w)
        types = [jax.typeof(x) for x in jax.tree.leaves((state, w))]
        return returning(closed, types, {1: 1})

    assert found(lambda mu, g: jnp.zeros_like(mu)) == {1: 1}
    assert found(lambda mu, g: g) == {1: 1}
    assert found(lambda mu, g: mu) == {}
