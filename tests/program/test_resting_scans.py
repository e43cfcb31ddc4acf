"""Scans of rows at rest: types say what is loaded and stored, and no equation does."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from small_jaxprs import closed_of, load, names, on_device, on_host, only
from small_jaxprs import store as to_host

import optax_offload._emit  # noqa: F401
from optax_offload._places import memory
from optax_offload._program import entered, is_transfer, resting_scan, within
from optax_offload._program.resting_scans import with_resting_scans

STACK, ROW = (4, 3), (3,)


def layer(h, xs):
    """Loads a row of a parameter and one of what is kept, stores one and keeps one."""
    w, kept = map(load, xs)
    new = h * w + kept
    return new, (to_host(new), new * 2.0)


def scanned(body):
    """A function that scans over two stacks."""
    return lambda h, *xs: lax.scan(body, h, xs)


def resting(body, *types):
    """The scan of a body over stacks, with types that say what it moves."""
    closed = closed_of(scanned(body), on_device(*ROW), *types)
    return only(with_resting_scans(closed).jaxpr.eqns, "scan")


def test_a_body_that_moves_nothing():
    """What it loaded it takes on the device, and what it stored it leaves there."""
    e = resting(layer, on_host(*STACK), on_host(*STACK))
    (body,) = entered(e)
    assert e.primitive is resting_scan
    assert not any(map(is_transfer, body.jaxpr.eqns))
    assert [x.stack for x in body.loads] == list(body.xs)
    assert [x.stack for x in body.stores] == [body.stacked[0]]
    assert memory.on_host(body.stacked[0].aval)
    assert not memory.on_host(body.stacked[1].aval)


def test_leaves_that_are_moved_together():
    """As one by one."""

    def body(h, xs):
        w, b = jax.device_put(xs, jax.memory.Space.Device)
        return jnp.tanh(h * w + b), None

    (turn,) = entered(resting(body, on_host(*STACK), on_host(*STACK)))
    assert len(turn.loads) == 2
    assert names(turn.jaxpr.eqns) == ["mul", "add", "tanh"]


@pytest.mark.parametrize("where", ["untouched", "here", "used as it is"])
def test_rows_that_are_not_loaded(where):
    """Of what nothing loads, or is on the device, or something takes where it is."""

    def body(h, xs):
        w, x = xs
        other = lax.optimization_barrier(x) if where == "used as it is" else None
        again = load(x) if where != "untouched" else 1.0
        return h * load(w) * again, other

    rests = on_device if where == "here" else on_host
    (turn,) = entered(resting(body, on_host(*STACK), rests(*STACK)))
    assert [x.stack for x in turn.loads] == [turn.xs[0]]


def test_what_is_stored_and_used_too():
    """The row that something takes on the host stays an equation."""

    def body(h, xs):
        stored = to_host(h)
        return load(lax.optimization_barrier(stored)) * load(xs[0]), stored

    (turn,) = entered(resting(body, on_host(*STACK)))
    assert [x.stack for x in turn.stores] == list(turn.stacked)
    assert names(turn.jaxpr.eqns)[0] == "device_put"


def test_a_step_without_rows_at_rest_is_the_same():
    """Nothing is written anew, so that what JAX has of it counts."""
    closed = closed_of(
        scanned(lambda h, xs: (h * xs[0], None)), on_device(*ROW), on_device(*STACK)
    )
    assert with_resting_scans(closed) is closed


def test_scans_in_bodies():
    """In whatever equation that is entered."""

    def branch(h, w):
        return scanned(layer)(h, w, w)[0]

    def fn(h, w):
        either = lambda h, w: lax.cond(h[0] > 0, branch, branch, h, w)  # noqa: E731
        return jax.checkpoint(either)(h, w)

    closed = with_resting_scans(closed_of(fn, on_device(*ROW), on_host(*STACK)))
    (e,) = closed.jaxpr.eqns
    inner = [x for x in within(e) if x.primitive.name == "scan"]
    assert [x.primitive for x in inner] == [resting_scan] * 2


ARGS = [np.full(ROW, x, np.float32) for x in (0.25, 0.5, 0.75)]
TYPES = on_device(*ROW), on_host(*STACK), on_host(*STACK)


def moved(h, *rows):
    """The scan, of stacks made of a row each, where its types want these."""
    closed = with_resting_scans(closed_of(scanned(layer), *TYPES))
    whole = [jnp.stack([x] * STACK[0]) for x in rows]
    stacks = [memory.transfer(x, "pinned_host") for x in whole]
    results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, h, *stacks)
    assert list(map(memory.on_host, results)) == [False, True, False]
    return [memory.transfer(x, "device") for x in results]


def as_it_is(h, *rows):
    """The same of values on the device."""

    def body(h, xs):
        new = h * xs[0] + xs[1]
        return new, (new, new * 2.0)

    stacks = [jnp.stack([x] * STACK[0]) for x in rows]
    return jax.tree.leaves(lax.scan(body, h, stacks))


WAYS = {
    "jit": lambda fn: fn,
    "vmap": lambda fn: lambda *x: jax.vmap(fn)(*(jnp.stack([y, 2 * y]) for y in x)),
    "jvp": lambda fn: lambda *x: jax.jvp(fn, x, x),
    "grad": lambda fn: jax.grad(lambda *x: sum(map(jnp.sum, fn(*x))), argnums=(0, 1)),
    "checkify": lambda fn: checkify.checkify(fn, errors=checkify.nan_checks),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_jax_makes_of_it(way):
    """The same as of a scan that has all on the device."""
    got, want = (jax.jit(WAYS[way](fn))(*ARGS) for fn in (moved, as_it_is))
    if way == "checkify":
        assert got[0].get() is None
        got, want = got[1], want[1]
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_checks_are_made_inside():
    """A NaN of a turn is found."""
    args = ARGS[0], np.full(ROW, np.inf, np.float32), np.full(ROW, -np.inf, np.float32)
    error, _ = jax.jit(WAYS["checkify"](moved))(*args)
    assert "nan" in error.get()
