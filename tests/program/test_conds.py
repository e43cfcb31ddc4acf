"""Conditionals over many leaves, taken apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_jaxprs import closed_of, names, on_device, only, values

from optax_offload._program import selections
from optax_offload._program.conds import around, split

VECTOR = on_device(3)
NUMBER = on_device()
PREDICATE = on_device(dtype=jnp.bool_)
X = np.arange(3, dtype=np.float32)
Y = X + 10


def cond_of(yes, no, *types):
    """The equation of a cond with such branches, and all equations."""
    closed = closed_of(lambda p, *x: lax.cond(p, yes, no, *x), PREDICATE, *types)
    return only(closed.jaxpr.eqns, "cond"), closed


def apart(closed):
    """The equations, with the cond among them taken apart."""
    return [small for e in closed.jaxpr.eqns for small in split(e)]


def assert_same(closed, equations, *args):
    """They compute what they did, for both values of the predicate."""
    jaxpr = closed.jaxpr
    for p in (False, True):
        got = values(equations, jaxpr.invars, jaxpr.outvars, (p, *args))
        want = values(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, (p, *args))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_leaves_that_only_a_cond_joins_are_split():
    """Each result has a cond of its own, which takes nothing of the others."""
    e, closed = cond_of(
        lambda x, y: (x * 2.0, y), lambda x, y: (x, y + 1.0), VECTOR, VECTOR
    )
    first, second = split(e)
    assert first.outvars == e.outvars[:1]
    assert second.outvars == e.outvars[1:]
    index, x, y = e.invars
    assert first.invars == [index, x]
    assert second.invars == [index, y]
    assert_same(closed, apart(closed), X, Y)


def test_leaves_that_a_branch_joins_stay():
    """What shares an array in one branch is one cond, whatever the other does."""
    e, _ = cond_of(lambda x, y: (x + y, y), lambda x, y: (x, y), VECTOR, VECTOR)
    assert split(e) == [e]


def test_leaves_joined_by_a_value_in_between_stay():
    """Also where what they share is computed in the branch."""

    def shares(x, y):
        both = jnp.sin(x + y)
        return both * 2.0, both * 3.0

    e, _ = cond_of(shares, lambda x, y: (x, y), VECTOR, VECTOR)
    assert split(e) == [e]


def test_a_scalar_joins_nothing():
    """A number is taken by each, and what follows from numbers computed by each."""

    def scaled(n, x, y):
        factor = n * 2.0 + 1.0
        return x * factor, y * factor

    e, closed = cond_of(scaled, lambda n, x, y: (x, y), NUMBER, VECTOR, VECTOR)
    first, second = split(e)
    index, n, x, y = e.invars
    assert first.invars == [index, n, x]
    assert second.invars == [index, n, y]
    assert_same(closed, apart(closed), np.float32(3), X, Y)


def test_some_of_three_stay_together():
    """Two that are joined are one cond, the third another."""
    e, closed = cond_of(
        lambda x, y, z: (x + z, y, z), lambda x, y, z: (x, y * 2.0, -z), *[VECTOR] * 3
    )
    found = split(e)
    assert [x.outvars for x in found] == [
        [e.outvars[0], e.outvars[2]],
        [e.outvars[1]],
    ]
    assert_same(closed, apart(closed), X, Y, X)


def test_what_is_not_split():
    """A cond with effects or one result, and any other equation."""

    def prints(x, y):
        jax.debug.print("{}", x[0])
        return x * 2.0, y * 2.0

    e, _ = cond_of(prints, lambda x, y: (x, y), VECTOR, VECTOR)
    assert len(e.outvars) == 2
    assert split(e) == [e]
    e, _ = cond_of(lambda x: x * 2.0, lambda x: x, VECTOR)
    assert split(e) == [e]
    (e,) = closed_of(lambda x: lax.top_k(x, 2), VECTOR).jaxpr.eqns
    assert split(e) == [e]


def selected(closed):
    """The equations, with the cond as one for each leaf, or a selection."""
    producers = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    return [
        small
        for e in closed.jaxpr.eqns
        for small in (selections(e, producers) if e.primitive.name == "cond" else [e])
    ]


def test_a_cond_that_only_chooses_is_a_selection():
    """By its predicate itself, of two."""
    _, closed = cond_of(lambda x, y: x, lambda x, y: y, VECTOR, VECTOR)
    equations = selected(closed)
    select = only(equations, "select_n")
    predicate, x, y = closed.jaxpr.invars
    assert select.invars == [predicate, y, x]
    assert "clamp" not in names(equations)
    assert_same(closed, equations, X, Y)


def test_a_cond_that_computes_stays_beside_selections():
    """Leaf by leaf: one is computed in a branch, the other is chosen."""
    _, closed = cond_of(
        lambda x, y: (x * 2.0, y), lambda x, y: (x, y - 0.0 * y), VECTOR, VECTOR
    )
    assert names(selected(closed)).count("cond") == 2
    _, closed = cond_of(
        lambda x, y, z: (x * 2.0, y), lambda x, y, z: (x, z), *[VECTOR] * 3
    )
    equations = selected(closed)
    assert names(equations).count("cond") == 1
    assert names(equations).count("select_n") == 1
    assert_same(closed, equations, X, Y, X - 5)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 7])
def test_an_index_is_clamped(index):
    """A selection takes no index out of bounds, as a switch does."""
    closed = closed_of(
        lambda i, x, y, z: lax.switch(
            i, [lambda x, y, z: x, lambda x, y, z: y, lambda x, y, z: z], x, y, z
        ),
        on_device(dtype=jnp.int32),
        *[VECTOR] * 3,
    )
    jaxpr = closed.jaxpr
    cond = only(jaxpr.eqns, "cond")
    # The cond alone, without the clamp that `lax.switch` puts before it.
    bare = jaxpr.replace(invars=list(cond.invars), eqns=[cond])
    equations = list(selections(cond, {}))
    assert "cond" not in names(equations)
    low, _, high = only(equations, "clamp").invars
    assert (low.val, high.val) == (0, 2)
    (got,) = values(
        equations, bare.invars, bare.outvars, (np.int32(index), X, Y, X - 5)
    )
    want = (X, Y, X - 5)[min(max(index, 0), 2)]
    np.testing.assert_array_equal(got, want)


def test_around_has_other_branches():
    """The same decision, between other functions."""
    e, _ = cond_of(lambda x: x * 2.0, lambda x: x, VECTOR)
    others = [lambda x: [x - 1.0], lambda x: [x + 1.0]]
    for index, want in enumerate((X - 1, X + 1)):
        (got,) = around(others, e, [np.int32(index), X])
        np.testing.assert_array_equal(got, want)


def test_around_keeps_platforms():
    """A branch for a platform stays one for it, and the others' that for all others."""
    closed = closed_of(
        lambda x: lax.platform_dependent(
            x, tpu=lambda x: x * 2.0, default=lambda x: x * 3.0
        ),
        VECTOR,
    )
    e = only(closed.jaxpr.eqns, "cond")
    others = [lambda x: [x + 2.0], lambda x: [x + 3.0]]
    index = e.params["branches_platforms"].index(None)

    def fn(x):
        return around(others, e, [index, x])

    found = only(closed_of(fn, VECTOR).jaxpr.eqns, "cond")
    assert found.params["branches_platforms"] == e.params["branches_platforms"]
    np.testing.assert_array_equal(jax.jit(fn)(X)[0], X + 3)
