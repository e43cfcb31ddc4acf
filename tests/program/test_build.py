"""Programs made of others: calls inlined, variables renamed, scalars known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P
from small_jaxprs import closed_of, names, on_device, program_of, run

from optax_offload._program import Builder, flatten

VECTOR = on_device(3)
X = np.arange(3, dtype=np.float32)


@jax.custom_jvp
def doubled(x):
    """A function with tangents of its own."""
    return 2.0 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0]))


@jax.custom_vjp
def halved(x):
    """A function with a derivative of its own."""
    return 0.5 * x


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "fn",
    [
        jax.jit(lambda x: x * 3.0),
        jax.jit(lambda x: jax.jit(lambda y: y * 3.0)(x)),
        lambda x: doubled(x),
        lambda x: halved(x),
    ],
    ids=["jit", "jit in jit", "custom_jvp", "custom_vjp"],
)
def test_flatten_inlines_calls(fn):
    """What a call stands for is in its place, and computes the same."""
    program = program_of(fn, VECTOR)
    assert names(program.equations) == ["mul"]
    np.testing.assert_allclose(run(program, X)[0], fn(X))


def test_flatten_gives_each_call_its_own_variables():
    """A function that is called twice defines no variable twice."""
    twice = jax.jit(jnp.sin)
    program = program_of(lambda x: twice(x) * twice(x + 1.0), VECTOR)
    defined = [v for e in program.equations for v in e.outvars]
    assert names(program.equations).count("sin") == 2
    assert len(defined) == len(set(defined))
    np.testing.assert_allclose(run(program, X)[0], np.sin(X) * np.sin(X + 1), rtol=1e-6)


def test_flatten_leaves_loops_and_checkpoints():
    """They are no calls: what they mean is more than their body."""

    def fn(x):
        x = jax.checkpoint(jnp.sin)(x)
        return lax.fori_loop(0, 3, lambda _, y: y * 2.0, x)

    program = program_of(fn, VECTOR)
    assert names(program.equations)[0] == "remat2"
    assert names(program.equations)[-1] in ("scan", "while")


def test_flatten_leaves_a_jit_with_shardings():
    """Inlined, its results would be sharded in any way."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("d",))
    sharding = jax.NamedSharding(mesh, P("d"))
    constrained = jax.jit(lambda x: x * 2.0, out_shardings=sharding)
    program = program_of(lambda x: constrained(x), on_device(4))
    (e,) = program.equations
    assert e.primitive.name in ("jit", "pjit")


def test_flatten_keeps_constants():
    """What a jit within closes over is a constant of the program."""
    table = np.full((3,), 5.0, np.float32)
    program = program_of(jax.jit(lambda x: x + jnp.asarray(table)), VECTOR)
    np.testing.assert_allclose(run(program, X)[0], X + 5)


BRANCHES = (lambda x: x * 2.0, lambda x: x * 3.0, lambda x: x * 5.0)


@pytest.mark.parametrize(("predicate", "factor"), [(False, 2), (True, 3)])
def test_flatten_takes_the_known_branch(predicate, factor):
    """As of `optax.MultiSteps`: one branch remains, and no cond."""
    decide = jax.jit(lambda p, x: lax.cond(~p, *BRANCHES[:2], x))
    program = program_of(lambda x: decide(jnp.bool_(predicate), x), VECTOR)
    assert "cond" not in names(program.equations)
    np.testing.assert_allclose(run(program, X)[0], factor * X)


@pytest.mark.parametrize(("index", "factor"), [(0, 2), (1, 3), (2, 5), (-7, 2), (9, 5)])
def test_flatten_takes_the_branch_of_an_index(index, factor):
    """Clamped, as at run time: too small is the first, too large the last."""
    number = on_device(dtype=jnp.int32)
    closed = closed_of(lambda i, x: lax.switch(i, BRANCHES, x), number, VECTOR)
    cond = closed.jaxpr.eqns[-1]
    literal = jex.Literal(np.asarray(index, np.int32), number)
    jaxpr = closed.jaxpr.replace(
        invars=[closed.jaxpr.invars[1]],
        eqns=[cond.replace(invars=[literal, *cond.invars[1:]])],
    )
    program = flatten(jex.ClosedJaxpr(jaxpr, closed.consts))
    assert names(program.equations) == ["mul"]
    np.testing.assert_allclose(run(program, X)[0], factor * X)


def test_flatten_leaves_an_unknown_branch():
    """A cond that an argument decides stays."""
    program = program_of(
        lambda i, x: lax.switch(i, BRANCHES, x), on_device(dtype=jnp.int32), VECTOR
    )
    assert names(program.equations)[-1] == "cond"


def inlined_value(fn, *args):
    """What a builder knows of the result of a function of numbers."""
    closed = closed_of(fn, *(jax.typeof(x) for x in args))
    builder = Builder()
    literals = [jex.Literal(x, jax.typeof(x)) for x in args]
    (result,) = builder.inline(closed, literals)
    return builder.value(result)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda a, b: a + b, (3, 4)),
        (lambda a, b: a - b, (3, 4)),
        (lambda a, b: a * b, (3, 4)),
        (lambda a, b: a != b, (3, 4)),
        (lambda a, b: a & b, (6, 3)),
        (lambda a, b: a | b, (6, 3)),
        (lambda a, b: ~(a != b), (3, 3)),
        (lambda a, b: (a - b).astype(jnp.float32), (3, 4)),
    ],
    ids=["add", "sub", "mul", "ne", "and", "or", "not", "convert"],
)
def test_scalars_are_known(fn, args):
    """As JAX would compute them, in their dtype."""
    args = [np.asarray(x, np.int32) for x in args]
    found, want = inlined_value(fn, *args), fn(*map(jnp.asarray, args))
    assert found == want
    assert found.dtype == want.dtype


def test_scalars_wrap_as_jax_does():
    """A sum of small integers is one of small integers."""
    args = [np.asarray(x, np.uint8) for x in (200, 100)]
    assert inlined_value(lambda a, b: a + b, *args) == 44


def test_what_is_not_known():
    """A number that follows from an argument, and any function that is not listed."""
    assert inlined_value(jnp.sin, np.asarray(1.0, np.float32)) is None
    closed = closed_of(lambda a: a + 1, on_device())
    builder = Builder()
    (result,) = builder.inline(closed, closed.jaxpr.invars)
    assert builder.value(result) is None


def test_constants_are_known_if_they_are_scalars():
    """A constant of an array is no number."""
    number, array = jex.Var(on_device()), jex.Var(VECTOR)
    builder = Builder({number: np.float32(7), array: X})
    assert builder.value(number) == 7
    assert builder.value(array) is None
    assert set(builder.constants) == {number, array}


def test_add_takes_operands_by_their_names_now():
    """A renamed operand is another one in equations that are added after it."""
    (e,) = closed_of(jnp.sin, VECTOR).jaxpr.eqns
    before, after, result = e.invars[0], jex.Var(VECTOR), jex.Var(VECTOR)
    builder = Builder()
    builder.add(e)
    builder.rename([before], [after])
    builder.add(e, [result])
    assert [x.invars[0] for x in builder.equations] == [before, after]
    assert builder.equations[1].outvars == [result]
    assert builder.read(e.outvars[0]) is result
    assert builder.read_all([before, after]) == [after, after]


def test_add_changes_parameters():
    """Those that are given, and no other."""
    (e,) = closed_of(lambda x: lax.cumsum(x, axis=0), VECTOR).jaxpr.eqns
    builder = Builder()
    builder.add(e, params={"reverse": True})
    assert builder.equations[0].params == {**e.params, "reverse": True}
    assert e.params["reverse"] is False


def test_trace_adds_a_function():
    """Of the leaves of its result there is one atom each."""
    x = jex.Var(VECTOR)
    builder = Builder()
    sine, tree = builder.trace(lambda x: (jnp.sin(x), {"a": x}), x)
    assert names(builder.equations) == ["sin"]
    assert builder.equations[0].invars == [x]
    assert sine is builder.equations[0].outvars[0]
    assert tree is x


def test_an_equation_that_stays_as_it_was_is_not_written_anew():
    """Of what is used once, equations without a call before them are the same."""
    closed = closed_of(lambda x: jnp.sin(x) * 2.0, VECTOR)
    assert flatten(closed, once=True).equations == closed.jaxpr.eqns
    anew = [v for e in flatten(closed).equations for v in e.outvars]
    assert set(anew).isdisjoint(v for e in closed.jaxpr.eqns for v in e.outvars)
