"""Stacked results of scans that are computed again from rows at rest."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_jaxprs import closed_of, load, names, on_device, on_host, only, store

from optax_offload._program.bodies import entered
from optax_offload._program.graph import bound
from optax_offload._program.primitives import facts
from optax_offload._program.row_values import (
    RowValue,
    computed,
    made_of_rows,
    of_stack,
    rests,
)

STACK, ROW = (4, 3), (3,)
# What makes a row of a block, and a block of a row.
AXES = ("squeeze", "reshape", "broadcast_in_dim")
W = np.arange(12, dtype=np.float32).reshape(STACK)


def made(body, *types, kept=None, then=lambda c, xs: c + 1.0):
    """What of a scan's stacked results follows from rows of such stacks.

    Args:
      body: The body, of what is carried and of rows.
      *types: The types of the stacks.
      kept: For each, whether the body takes it where it rests.
      then: What is carried then; what no iteration changes, JAX does not carry.

    Returns:
      For each stacked result that is found, its position among these; and for it the
      positions of the stacks, and the primitives that lead from them to it, or None
      where it is such a stack itself.
    """
    kept = [False] * len(types) if kept is None else kept
    found = {}

    def fn(c, *xs):
        plain = [on_device(*x.shape, dtype=x.dtype) for x in types]
        closed = closed_of(
            lambda c, *xs: lax.scan(lambda c, xs: (then(c, xs), body(c, xs)), c, xs),
            on_device(*ROW),
            *plain,
        )
        scan = only(closed.jaxpr.eqns, "scan")
        (body_of_scan,) = entered(scan)
        stacked = list(body_of_scan.stacked)
        constants = bound(closed.jaxpr.constvars, closed.consts)
        consts = list(map(constants.get, body_of_scan.consts))
        every = made_of_rows(body_of_scan, xs, kept, consts)
        assert set(every) <= set(stacked)
        for v, x in every.items():
            at = {id(x): i for i, x in enumerate(xs)}
            if isinstance(x, RowValue):
                sources = tuple(at[id(one)] for one in x.sources)
                own = [n for n in names(x.jaxpr.eqns) if n not in AXES]
                found[stacked.index(v)] = sources, tuple(own)
            else:
                found[stacked.index(v)] = (at[id(x)],), None
        return c

    closed_of(fn, on_device(*ROW), *types)
    return found


H, D = on_host(*STACK), on_device(*STACK)


def test_a_row_itself():
    """A stack of rows as they are is the stack at rest, also through a checkpoint."""
    assert made(lambda c, xs: jax.checkpoint(lambda x: x)(xs[0]), H) == {
        0: ((0,), None)
    }


def test_a_cast_of_a_row():
    """Computed again by the same equations."""
    found = made(lambda c, xs: xs[0].astype(jnp.bfloat16).T, H)
    assert found == {0: ((0,), ("convert_element_type",))}


def test_of_two_rows():
    """From both, and what is only a function of one from one."""
    found = made(lambda c, xs: (xs[0] * xs[1], -xs[1]), H, H)
    assert found[0] == ((0, 1), ("mul",)) or found[0] == ((1, 0), ("mul",))
    assert found[1] == ((1,), ("neg",))


@pytest.mark.parametrize(
    "body",
    [
        lambda c, xs: c * xs[0],
        lambda c, xs: jnp.tanh(xs[0]),
        lambda c, xs: xs[0] @ xs[0],
        lambda c, xs: c,
        lambda c, xs: jnp.zeros(3) * 2.0,
    ],
    ids=["carry", "expensive", "product", "carried", "constant"],
)
def test_what_is_kept(body):
    """A function of what is carried, or one that takes longer than to load it."""
    assert made(body, H) == {}


def test_a_row_that_is_carried_is_no_stack():
    """What the last iteration carries is one row, not all of them."""
    same = jax.checkpoint(lambda x: x)
    assert made(lambda c, xs: c, H, then=lambda c, xs: same(xs[0])) == {}


def test_of_what_is_on_the_device():
    """Nothing is loaded again that need not be."""
    assert made(lambda c, xs: xs[0] * 2.0, D) == {}
    assert made(lambda c, xs: xs[0] * xs[1], H, D) == {}


def test_of_what_a_body_takes_where_it_rests():
    """State that an update in the body takes is not the value after it."""
    assert made(lambda c, xs: store(xs[0]), H, kept=[True]) == {}
    assert made(lambda c, xs: xs[0] * 2.0, H, kept=[True]) == {}


def test_rests():
    """A value of host memory does while it is traced, and so does one made of rows."""
    found = []
    closed_of(lambda x, y: found.append((rests(x), rests(y))), H, D)
    assert found == [(True, False)]
    assert not rests(W)
    assert rests(RowValue(4, (), (), closed_of(lambda: ()).jaxpr))


def test_rows_and_all_of_it():
    """A row is computed from rows on the device, all from all rows."""
    row = on_device(1, 3)
    jaxpr = closed_of(lambda a, b, c: a * b + c, row, row, row).jaxpr

    def fn(a, b):
        value = RowValue(4, (a, b), (jnp.arange(3.0)[None],), jaxpr)
        return value.row([load(a[1]), load(b[1])]), value.whole()

    row, whole = jax.jit(lambda a, b: fn(store(a), store(b)))(W, W + 1)
    np.testing.assert_array_equal(row, W[1] * (W[1] + 1) + np.arange(3.0))
    np.testing.assert_array_equal(whole, W * (W + 1) + np.arange(3.0)[None])
    assert whole.sharding.memory_kind == "device"


def test_of_what_each_turn_takes():
    """A table that rows look up is given to each row, and does not rest itself."""
    table = jnp.arange(2.0)

    def body(c, xs):
        return table.at[xs[0]].get(mode="clip")

    codes = on_host(4, 3, dtype=jnp.int32)
    (sources, own) = made(body, codes)[0]
    assert sources == (0,)
    assert own[-1] == "gather"


def test_of_rows_that_are_computed():
    """What a scan makes of computed rows follows from the same rows at rest."""
    found = []

    def fn(x, c):
        plain = closed_of(
            lambda c, w: lax.scan(lambda c, w: (c + w, -w), c, w),
            on_device(*ROW),
            D,
        )
        (turn,) = entered(only(plain.jaxpr.eqns, "scan"))
        (times,) = closed_of(lambda w: w * 2.0, D).jaxpr.eqns
        rule = facts(times).rows
        assert rule is not None
        (doubled,) = computed(times, rule(times, 4), [of_stack(x), 2.0], 4)
        (negated,) = made_of_rows(turn, [doubled], [False]).values()
        assert negated.sources == (x,)
        found.append(names(negated.jaxpr.eqns))
        return negated.whole()

    (got,) = jax.jit(lambda x, c: [fn(store(x), c)])(W, np.ones(3, np.float32))
    np.testing.assert_array_equal(got, -2 * W)
    assert [n for n in found[0] if n not in AXES] == ["mul", "neg"]
