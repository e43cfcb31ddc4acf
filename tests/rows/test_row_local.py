"""Equations that can be evaluated for some of the rows, as a value."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from small_jaxprs import names, on_device, program_of, values

from optax_offload._program import dependents, variables
from optax_offload._rows import analyze, summed

STACK, ROW = (6, 4), (4,)
X = np.arange(24, dtype=np.float32).reshape(STACK)
G = np.cos(X)


def local(fn, *types, loads=2):
    """A function of stacks, whose first arguments are loaded, as rows."""
    program = program_of(fn, *types)
    axes = dict.fromkeys(program.invars[:loads], 0)
    depends = dependents(program, [*axes])
    equations = [
        i
        for i, e in enumerate(program.equations)
        if not depends.isdisjoint(variables(e.invars))
    ]
    return program, analyze(program, equations, axes, program.outvars, {})


def momentum(m, g, p):
    """New state of a gradient, and then what is updated with it."""
    new = 0.9 * m + g
    return new, jnp.tanh(new) * p


STACKS = (on_device(*STACK),) * 3


def evaluated(row_local, program, rows, given):
    """The results for so many rows, given those of its inputs."""
    jaxpr = row_local.jaxpr(rows, program.debug_info)
    taken = [given[v] for v in row_local.inputs]
    return values(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, taken)


def in_rows(row_local, program, first, rows, args):
    """The results for some rows, of whole arguments."""
    some = (x[first : first + rows] for x in args)
    given = dict(zip(program.invars, some, strict=True))
    return evaluated(row_local, program, rows, given)


def test_the_equations_for_so_many_rows():
    """They are of the number of rows, whatever that was, and compute the same."""
    program, found = local(momentum, *STACKS)
    assert found.rows == 6
    assert set(found.outputs) == set(program.outvars)
    whole = in_rows(found, program, 0, 6, (X, G, X))
    for first, rows in ((0, 2), (2, 3), (5, 1)):
        part = in_rows(found, program, first, rows, (X, G, X))
        for a, b in zip(part, whole, strict=True):
            assert a.shape == (rows, 4)
            np.testing.assert_allclose(a, b[first : first + rows], rtol=1e-6)


def test_what_has_no_rows_is_taken_whole():
    """A number and a row for all are inputs of every slice, as they are."""
    program, found = local(
        lambda x, n, r: x * n + r[None],
        on_device(*STACK),
        on_device(),
        on_device(*ROW),
        loads=1,
    )
    x, n, r = program.invars
    assert {v: found.axes.get(v) for v in (x, n)} == {x: 0, n: None}
    row = np.arange(4, dtype=np.float32)
    given = {x: X[2:4], n: np.float32(3), r: row}
    given |= {v: np.broadcast_to(row, (6, 4))[2:4] for v in found.inputs[2:]}
    (got,) = evaluated(found, program, 2, given)
    np.testing.assert_allclose(got, 3 * X[2:4] + row)


def test_split_into_what_is_early_and_what_is_not():
    """The first hands on what it has computed of early loads, for the other to take."""
    program, found = local(momentum, *STACKS)
    m, _, p = program.invars
    new, last = program.outvars
    first, second = found.split([m], [new], [last])
    assert set(first.outputs) == {new}
    assert second.outputs == (last,)
    assert "tanh" not in names(first.equations)
    assert p not in first.inputs
    assert set(second.inputs) == {new, p}
    assert names(second.equations) == ["tanh", "mul"]
    handed, *_ = in_rows(first, program, 1, 2, (X, G, X))
    (end,) = evaluated(second, program, 2, {new: handed, p: X[1:3]})
    want = np.tanh(0.9 * X + G)[1:3] * X[1:3]
    np.testing.assert_allclose(end, want, rtol=1e-5)


def test_split_hands_on_values_that_are_no_output():
    """What lies on the way to both is a further output of the first."""

    def fn(m, g, p):
        both = jnp.sin(m) * g
        return both + 1.0, both * p

    program, found = local(fn, *STACKS)
    m, _, p = program.invars
    one, other = program.outvars
    first, second = found.split([m], [one], [other])
    (product,) = (v for v in second.inputs if v is not p)
    assert first.outputs == (one, product)
    assert names(second.equations) == ["mul"]


def test_split_computes_anew_what_is_not_early():
    """Both compute what does not depend on an early load, rather than keep it."""

    def fn(m, g, p):
        scaled = jnp.exp(g)
        return m + scaled, p * scaled

    program, found = local(fn, *STACKS)
    m, g, p = program.invars
    one, other = program.outvars
    first, second = found.split([m], [one], [other])
    assert names(first.equations) == ["exp", "add"]
    assert names(second.equations) == ["exp", "mul"]
    assert first.outputs == (one,)
    assert set(second.inputs) == {g, p}


def test_restricted_to_some_outputs():
    """Only the equations and operands of these."""
    program, found = local(momentum, *STACKS)
    new, _ = program.outvars
    small = found.restricted([new])
    assert small.outputs == (new,)
    assert "tanh" not in names(small.equations)
    assert set(small.inputs) == set(program.invars[:2])
    (got,) = in_rows(small, program, 0, 3, (X, G, X))
    np.testing.assert_allclose(got, 0.9 * X[:3] + G[:3], rtol=1e-6)


def test_needed_stops_at_what_is_known():
    """A known variable is taken, even where an equation defines it."""
    program, found = local(momentum, *STACKS)
    new, last = program.outvars
    equations, taken = found.needed([last], [new])
    assert names(equations) == ["tanh", "mul"]
    assert set(taken) == {new, program.invars[2]}


def test_what_is_known_is_taken_from_an_equation_that_is_needed():
    """Of an equation with two results one may be known, and the other needed."""

    def fn(x, y):
        return sum(lax.sort((x, y), dimension=1, num_keys=1))

    program, found = local(fn, *STACKS[:2])
    first, second = program.equations[0].outvars
    equations, taken = found.needed(program.outvars, [second])
    assert names(equations)[0] == "sort"
    assert second in taken
    assert first not in taken


def test_signature():
    """Equal for other names; not for another axis, number or operand."""

    def of(fn, axis=0):
        program = program_of(fn, *(on_device(4, 4),) * 2)
        axes = dict.fromkeys(program.invars, axis)
        positions = range(len(program.equations))
        return analyze(program, positions, axes, program.outvars, {}).signature()

    one = of(lambda x, y: x * 2.0 + y)
    assert one == of(lambda a, b: a * 2.0 + b)
    assert one != of(lambda a, b: a * 3.0 + b)
    assert one != of(lambda a, b: a * 2.0 + a * b)
    assert one != of(lambda a, b: a * 2.0 + b, axis=1)


def sums_of(fn, *types, axes):
    """The operands whose rows the last equation of a function sums up, as positions."""
    program = program_of(fn, *types)
    known = dict(zip(program.invars, axes, strict=True))
    known = {v: axis for v, axis in known.items() if axis is not None}
    found = summed(program.equations[-1], known)
    assert set(found) <= set(variables(program.invars))
    return [program.invars.index(v) for v in found]


def test_a_reduction_over_rows_is_summed_up():
    """If the axis of the rows is among its own."""
    x = on_device(*STACK)
    for fn in (jnp.sum, jnp.max, jnp.min, jnp.prod):
        assert sums_of(fn, x, axes=[0]) == [0]
        assert sums_of(lambda x, fn=fn: fn(x, axis=0), x, axes=[0]) == [0]
        assert sums_of(lambda x, fn=fn: fn(x, axis=1), x, axes=[0]) == []
        assert sums_of(fn, x, axes=[None]) == []
    assert sums_of(lambda x: jnp.argmax(x, axis=0), x, axes=[0]) == []


def test_a_product_over_rows_is_summed_up():
    """If rows of both are contracted with each other, and not with anything else."""
    x = on_device(4, 4)
    assert sums_of(lambda x, y: x.T @ y, x, x, axes=[0, 0]) == []  # A transpose is in.
    assert sums_of(lambda x, y: jnp.vdot(x, y), *(on_device(4),) * 2, axes=[0, 0]) == [
        0,
        1,
    ]
    assert sums_of(lambda x, y: x @ y, x, x, axes=[1, 0]) == [0, 1]
    assert sums_of(lambda x, y: x @ y, x, x, axes=[0, 0]) == []
    assert sums_of(lambda x, y: x @ y, x, x, axes=[1, 1]) == []
    assert sums_of(lambda x, y: x @ y, x, x, axes=[1, None]) == []
