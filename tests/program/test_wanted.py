"""What bodies take where it rests."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from limited import limited
from small_jaxprs import closed_of, load, on_device, on_host, only, store
from small_steps import at_rest, offloaded

from optax_offload._ground import compat
from optax_offload._program import entered, has_update, is_microbatch
from optax_offload._program.wanted import (
    inside,
    loads_itself,
    update_refused,
    wanted_at_rest,
)

STACK, ROW = on_device(4, 3), on_device(3)
TX = optax.trace(0.9)
STATE = at_rest(jax.eval_shape(TX.init, STACK))


def scanned(w, x):
    """A scan over rows of a stack, of which the other argument is carried."""
    return lax.scan(lambda h, r: (h * r, None), x, w)[0]


def updated(g, state):
    """An offloaded update."""
    return offloaded(TX).update(g, state)


@pytest.mark.parametrize(
    "fn",
    [
        scanned,
        lambda w, x: jax.jit(scanned)(w, x),
        lambda w, x: jax.checkpoint(scanned)(w, x),
        lambda w, x: lax.cond(x[0] > 0, scanned, lambda w, x: x, w, x),
        lambda w, x: lax.fori_loop(0, 2, lambda _, x: scanned(w, x), x),
        lambda w, x: lax.while_loop(lambda x: x[0] < 1, lambda x: scanned(w, x), x),
        lambda w, x: scanned(lax.optimization_barrier((w, x))[0], x),
        lambda w, x: scanned(load(w), x),
    ],
    ids=["scan", "jit", "checkpoint", "cond", "for", "while", "barrier", "transfer"],
)
def test_rows_are_what_scans_take_rows_of(fn):
    """A stack, through bodies and what hands it on; not what is carried."""
    wanted = wanted_at_rest(closed_of(fn, STACK, ROW).jaxpr)
    assert wanted.rows == {0}
    assert wanted.updated == set()
    assert wanted.spread == {}


def test_what_leads_to_rows_is_wanted_where_it_rests():
    """A stack of which a row leads to a row that a scan takes, also in a call."""
    for fn in (lambda w: w * 2, jax.jit(lambda w: w * 2), lambda w: -w[:, ::-1]):
        wanted = wanted_at_rest(
            closed_of(lambda w, x, fn=fn: scanned(fn(w), x), STACK, ROW).jaxpr
        )
        assert wanted.rows == {0}
        assert wanted.counts == {0: 4}


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w[::-1],
        lambda w: jnp.sort(w, 0),
        lambda w: w @ jnp.ones((3, 3)),
        lambda w: w.reshape(3, 4).T,
    ],
    ids=["other rows", "all rows", "product", "mixed"],
)
def test_what_mixes_rows_is_wanted_on_the_device(fn):
    """A stack that is computed otherwise before a scan takes rows of it is loaded."""
    wanted = wanted_at_rest(closed_of(lambda w, x: scanned(fn(w), x), STACK, ROW).jaxpr)
    assert wanted.rows == set()
    assert wanted.counts == {}


def test_rows_that_are_asked_for():
    """A body of which a result is wanted row by row wants rows of what leads to it."""
    body = closed_of(lambda w, v: (w + 1, v + 1), STACK, STACK).jaxpr
    assert wanted_at_rest(body).rows == set()
    assert wanted_at_rest(body, [4, None]).counts == {0: 4}
    call = only(closed_of(jax.jit(lambda w: w + 1), STACK).jaxpr.eqns, body_name())
    assert inside(call, [4]).counts == {0: 4}
    assert inside(call).counts == {}


def body_name():
    """The name of a call of a jitted function."""
    return closed_of(jax.jit(lambda w: w + 1), STACK).jaxpr.eqns[0].primitive.name


def test_carried_stacks():
    """A stack that a loop carries, and of which a scan in it takes rows."""

    def fn(x, w):
        return lax.fori_loop(0, 2, lambda _, c: (scanned(c[1], c[0]), c[1]), (x, w))

    assert wanted_at_rest(closed_of(fn, ROW, STACK).jaxpr).rows == {1}


@pytest.mark.parametrize(
    "fn",
    [
        updated,
        lambda g, s: jax.jit(updated)(g, s),
        lambda g, s: lax.cond(g[0, 0] > 0, updated, lambda g, s: (g, s), g, s),
        lambda g, s: lax.fori_loop(0, 2, lambda _, s: updated(g, s)[1], s),
    ],
    ids=["update", "jit", "cond", "loop"],
)
def test_state_is_what_updates_take(fn):
    """The loads of an update, and not its gradients."""
    closed = closed_of(fn, STACK, STATE)
    wanted = wanted_at_rest(closed.jaxpr)
    assert wanted.updated == {1}
    assert any(map(has_update, closed.jaxpr.eqns))


def test_inside_counts_the_operands_of_an_equation():
    """Positions are those of its operands: a cond's first is the predicate."""

    def fn(w, x):
        return lax.cond(x[0] > 0, lambda w, x: x, scanned, w, x)

    cond = only(closed_of(fn, STACK, ROW).jaxpr.eqns, "cond")
    found = inside(cond)
    (i,) = found.rows
    assert cond.invars[i].aval.shape == STACK.shape
    assert i > 0
    (plus,) = closed_of(lambda w: w + 1.0, STACK).jaxpr.eqns
    assert inside(plus).rows == set()


def test_spread_of_a_shard_map():
    """Parts of a mesh take rows of parts: the stack has to be spread like this."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("d",))
    part = P(None, "d")

    def fn(w, x):
        return jax.shard_map(
            scanned, mesh=mesh, in_specs=(part, P("d")), out_specs=P("d")
        )(w, x)

    wanted = wanted_at_rest(closed_of(fn, on_device(4, 2), on_device(2)).jaxpr)
    assert wanted.rows == {0}
    assert set(wanted.spread) == {0}

    def both(w, x):
        other = jax.shard_map(
            scanned, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")
        )
        return fn(w, x), other(w, jnp.concatenate([x, x]))

    # Two that want it spread in two ways cannot both have it where it rests.
    wanted = wanted_at_rest(closed_of(both, on_device(4, 2), on_device(2)).jaxpr)
    assert wanted.rows == set()


def test_an_update_that_is_not_entered():
    """The error says where the update is, and what to do."""
    (jit,) = closed_of(lambda g, s: jax.jit(updated)(g, s), STACK, STATE).jaxpr.eqns
    error = update_refused(jit)
    assert "an offloaded update is in a 'jit'" in str(error).replace("pjit", "jit")
    assert "Call update(...) outside of it" in str(error)


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda w: load(store(w)) + 1, True),
        (lambda w: jax.jit(lambda w: load(store(w)))(w), True),
        (lambda w: store(w), False),
        (lambda w: w + 1, False),
    ],
    ids=["loads", "in a body", "stores", "neither"],
)
def test_loads_itself(fn, want):
    """Only a load counts, and also one within a body."""
    assert loads_itself(closed_of(fn, STACK).jaxpr) is want


def test_loads_of_arguments_at_rest_count():
    """An argument on the host that the step itself loads."""
    assert loads_itself(closed_of(load, on_host(4, 3)).jaxpr)


@pytest.mark.parametrize(
    ("rows", "much", "want"), [(64, 10**9, True), (2, 10**9, False), (2, 1, True)]
)
def test_microbatches_are_worth_what_they_load(rows, much, want, monkeypatch):
    """Unless they take so much that all of it should be on no device."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(
        monkeypatch,
        least_taken_bytes=1,
        least_flops_per_byte=16,
        much_taken_bytes=much,
        least_products=2,
    )

    def microbatches(w, xs):
        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ w) @ w)

        def add(total, x):
            return total + jax.grad(loss)(w, x), None

        return lax.scan(add, jnp.zeros_like(w), xs)[0]

    w, xs = on_device(8, 8), on_device(3, rows, 8)
    (e,) = (
        e for e in closed_of(microbatches, w, xs).eqns if e.primitive.name == "scan"
    )
    assert [is_microbatch(body) for body in entered(e)] == [want]
