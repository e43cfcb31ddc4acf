"""What can be asked of a program: what needs what, and what belongs together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_jaxprs import closed_of, names, on_device, only, program_of

from optax_offload._program import (
    Components,
    dependents,
    described,
    evaluate,
    needed,
    ordered,
    signature,
    within,
)
from optax_offload._program.graph import handed_through, nested

VECTOR = on_device(3)


def diamond(x, y):
    """Two ways from `x` to a sum, a sine of `y`, and a cosine that nobody wants."""
    left, right = jnp.exp(x), jnp.tanh(x)
    jnp.cos(y)
    return left + right, jnp.sin(y)


def test_a_part_takes_the_time_of_a_part():
    """Nothing is asked of the rest: updates of layers are cut out of one."""
    program = program_of(lambda xs: [jnp.sin(jnp.exp(x)) for x in xs], [VECTOR] * 50)
    asked = []
    made = program.made_of(program.outvars[49:], lambda *x: not asked.append(x))
    assert names([program.equations[i] for i in made.positions]) == ["exp", "sin"]
    assert made.takes == program.invars[49:]
    assert len(asked) == 2


def test_what_is_not_followed_is_taken():
    """What lies behind it is neither evaluated nor taken; nor is what nobody wants."""
    program = program_of(diamond, VECTOR, VECTOR)
    (stop,) = program.equations[at(program, "tanh")].outvars
    made = program.made_of(program.outvars[:1], lambda _, v: v is not stop)
    assert names([program.equations[i] for i in made.positions]) == ["exp", "add"]
    assert {*made.takes} == {stop, program.invars[0]}
    assert program.made_of([stop], lambda *_: False) == ([], [stop])


def at(program, name):
    """The position of the only equation of a primitive."""
    (i,) = (i for i, n in enumerate(names(program.equations)) if n == name)
    return i


def named(program, positions):
    """The primitives at positions, in their order."""
    return names(program.equations[i] for i in positions)


def test_needed_is_what_leads_to_a_variable():
    """Each equation on the way, in order, and none beside it."""
    program = program_of(diamond, VECTOR, VECTOR)
    total, sine = program.outvars
    assert named(program, needed(program.equations, [total])) == ["exp", "tanh", "add"]
    assert named(program, needed(program.equations, [sine])) == ["sin"]
    assert needed(program.equations, program.invars) == []


def test_needed_stops_at_what_is_known():
    """A known variable needs nothing, also as what is wanted."""
    program = program_of(lambda x: jnp.sin(jnp.exp(jnp.tanh(x))), VECTOR)
    (result,) = program.outvars
    (known,) = program.equations[at(program, "exp")].outvars
    assert named(program, needed(program.equations, [result], [known])) == ["sin"]
    assert needed(program.equations, [known], [known]) == []


def printing(x):
    """Prints a tangent; its result is a sine."""
    jax.debug.print("{}", jnp.tan(x))
    return jnp.sin(x)


def test_live_has_effects_and_what_they_need():
    """An effect is needed though no result follows from it, what is unused is not."""
    program = program_of(printing, VECTOR)
    found = named(program, program.live)
    assert found[0] == "tan"
    assert found[-1] == "sin"
    assert len(found) == 3
    wanted = needed(program.equations, program.outvars)
    assert named(program, wanted) == ["sin"]


def test_live_without_effects():
    """What no result follows from is not live."""
    program = program_of(diamond, VECTOR, VECTOR)
    assert named(program, program.live) == ["exp", "tanh", "add", "sin"]


def test_dependents_are_what_follows():
    """All that follows from a variable, with itself, and nothing else."""
    program = program_of(diamond, VECTOR, VECTOR)
    x, y = program.invars
    cosine = program.equations[at(program, "cos")].outvars[0]
    assert dependents(program, [y]) == {y, cosine, program.outvars[1]}
    exponential = program.equations[at(program, "exp")].outvars[0]
    assert dependents(program, [exponential]) == {exponential, program.outvars[0]}
    assert program.outvars[1] not in dependents(program, [x])


def test_ordered_puts_each_after_what_it_needs():
    """Equations come in any order; those that nothing needs are left out."""
    program = program_of(diamond, VECTOR, VECTOR)
    backwards = program.equations[::-1]
    found = names(ordered(program, backwards))
    assert sorted(found) == ["add", "exp", "sin", "tanh"]
    assert found.index("add") > max(found.index("exp"), found.index("tanh"))


def test_ordered_keeps_an_order_that_will_do():
    """What is in order stays as it is, with what has effects."""
    program = program_of(printing, VECTOR)
    assert ordered(program, program.equations) == program.equations


def test_used_are_operands_and_results():
    """A variable is used if an equation takes it, or if it is a result."""
    program = program_of(diamond, VECTOR, VECTOR)
    cosine = program.equations[at(program, "cos")].outvars[0]
    assert set(program.outvars) <= program.used
    assert cosine not in program.used
    assert set(program.invars) <= program.used


def test_components_are_joined_through_others():
    """Two that were joined with a third belong together, under the first of them."""
    found = Components[str]()
    found.join(["a", "b"])
    found.join(["c", "d"])
    assert found.of("b") == "a"
    assert found.of("d") == "c"
    assert found.of("e") == "e"
    found.join(["d", "b"])
    assert {found.of(x) for x in "abcd"} == {"c"}
    found.join(["a", "a"])
    assert found.of("a") == "c"


def test_components_that_nothing_joins():
    """One thing joined with itself stays itself."""
    found = Components[int]()
    found.join([3])
    assert found.of(3) == 3


def layers(x):
    """A cond within a scan."""

    def body(c, _):
        return lax.cond(c[0] > 0, jnp.sin, jnp.cos, c), None

    return lax.scan(body, x, None, length=2)[0]


def test_nested_are_the_own_bodies():
    """A scan has one, a cond one for each branch, an addition none."""
    scan = only(closed_of(layers, VECTOR).jaxpr.eqns, "scan")
    (body,) = nested(scan)
    cond = only(body.eqns, "cond")
    assert [names(b.eqns) for b in nested(cond)] == [["cos"], ["sin"]]
    (plus,) = closed_of(lambda x: x + 1, VECTOR).jaxpr.eqns
    assert list(nested(plus)) == []


def test_within_goes_all_the_way():
    """Equations of bodies, and those of bodies of these."""
    scan = only(closed_of(layers, VECTOR).jaxpr.eqns, "scan")
    found = names(within(scan))
    assert found.count("cond") == 1
    assert {"sin", "cos", "gt"} <= set(found)


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda x, y: (y, x + y, x), {0: 1, 2: 0}),
        (lambda x, y: jax.jit(lambda a, b: (b, a * b))(x, y), {0: 1}),
        (lambda x, y: jax.checkpoint(lambda a: (a, jnp.sin(a)))(y), {0: 1}),
        (lambda x, y: jax.jit(jax.checkpoint(lambda a: a))(y), {0: 1}),
        (lambda x, y: (jnp.sin(x), 2.0), {}),
    ],
    ids=["as it is", "jit", "checkpoint", "checkpoint in jit", "none"],
)
def test_handed_through(fn, want):
    """Which arguments come back as they are, also through bodies that run once."""
    assert handed_through(closed_of(fn, VECTOR, VECTOR).jaxpr) == want


def test_handed_through_no_loop():
    """What a scan carries is not handed through, whatever its body does."""

    def swapped(x, y):
        return lax.scan(lambda c, _: (c[::-1], None), (x, y), None, length=2)[0]

    assert handed_through(closed_of(swapped, VECTOR, VECTOR).jaxpr) == {}


def signed(fn, *types):
    """The signature of a function's equations."""
    program = program_of(fn, *types)
    return signature(program.equations, program.invars, program.outvars)


def test_signature_of_equal_functions():
    """Only the names of variables may differ."""
    one = signed(lambda x, y: (x * y + 2.0, y), VECTOR, VECTOR)
    other = signed(lambda a, b: (a * b + 2.0, b), VECTOR, VECTOR)
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (lambda x, y: (x * y + 3.0, y), (VECTOR, VECTOR)),
        (lambda x, y: (x * y + 2.0, x), (VECTOR, VECTOR)),
        (lambda x, y: (x * x + 2.0, y), (VECTOR, VECTOR)),
        (lambda x, y: (x - y + 2.0, y), (VECTOR, VECTOR)),
        (lambda x, y: (2.0 + x * y, y), (VECTOR, VECTOR)),
        (lambda x, y: (x * y + 2.0, y), (on_device(4), on_device(4))),
        (lambda x, y: (x * y + 2.0, y), (on_device(3, dtype=jnp.bfloat16),) * 2),
    ],
    ids=["number", "result", "operand", "primitive", "order", "shape", "dtype"],
)
def test_signature_of_others(fn, types):
    """A number, an operand, a result, a primitive, its parameters and types count."""
    assert signed(fn, *types) != signed(lambda x, y: (x * y + 2.0, y), VECTOR, VECTOR)


def test_signature_has_parameters():
    """A sum along another axis is another."""
    square = on_device(3, 3)
    assert signed(lambda x: jnp.sum(x, 0), square) != signed(
        lambda x: jnp.sum(x, 1), square
    )


def test_evaluate_some_equations():
    """Each variable that they define, from those that they take."""
    program = program_of(lambda x: jnp.sin(jnp.exp(x) * 2.0), VECTOR)
    x = np.arange(3, dtype=np.float32)
    given = {program.invars[0]: x}
    first, second, third = range(3)
    found = evaluate(program, [first, second], given.__getitem__)
    assert set(found) == {
        v for i in (first, second) for v in program.equations[i].outvars
    }
    np.testing.assert_allclose(
        found[program.equations[second].outvars[0]], 2 * np.exp(x), rtol=1e-6
    )
    last = evaluate(program, [third], found.__getitem__)
    np.testing.assert_allclose(
        last[program.outvars[0]], np.sin(2 * np.exp(x)), rtol=1e-5
    )


def add_up(x):
    """A sum of numbers, and a product of arrays."""
    return jnp.sum(x * x) + jnp.max(x)


def calls(x):
    """A function of its author, which calls another."""
    return add_up(x)


def test_described_names_function_and_line():
    """An author finds the equation by it; a sum of numbers is one over leaves."""
    program = program_of(calls, VECTOR)
    line = add_up.__code__.co_firstlineno + 2
    product = described(only(program.equations, "mul"))
    assert product.startswith("'mul' in add_up (")
    assert product.endswith(f"test_graph.py:{line})")
    total = described(only(program.equations, "add"))
    assert total.startswith("a sum over leaves in add_up (")


def test_producers_are_positions():
    """Where each variable is defined; an argument is nowhere."""
    program = program_of(diamond, VECTOR, VECTOR)
    total, _ = program.outvars
    assert program.producers[total] == at(program, "add")
    assert not program.producers.keys() & set(program.invars)
    reversed_program = dataclasses.replace(program, equations=program.equations[::-1])
    last = len(program.equations) - 1
    assert reversed_program.producers[total] == last - at(program, "add")
