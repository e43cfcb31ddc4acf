"""What parts of a step hand on to later ones, and what these compute again."""

import jax
import jax.numpy as jnp
from small_steps import taken_apart

from optax_offload._schedule.late import reduced
from optax_offload._schedule.rest import rest
from optax_offload._schedule.turns.crossing import Crossing
from optax_offload._schedule.turns.liveness import kept, passing, spans

SIZE = 64
X = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
BYTES = SIZE * SIZE * 4


def crossing(fn, split, *types, fixed=()):
    """What goes on where a function is cut after its first equations of a name.

    Returns:
      The primitives of what is handed on, and of what the second part computes again.
    """
    step = taken_apart(fn, *(types or (X, X)))
    equations = step.program.equations
    names = [e.primitive.name for e in equations]
    at = names.index(split) + 1
    parts = [range(at), range(at, len(equations))]
    held = {v for e in equations for v in e.outvars if e.primitive.name in fixed}
    found = Crossing(step, parts, held, step.program.invars.__contains__)
    taken = [v for i in parts[1] for v in step.reads(i)]
    again = sorted(found.again(taken, 1))
    producers = step.program.producers
    handed = sorted(producers[v] for v in found.handed)
    return [names[i] for i in handed], [names[i] for i in again]


def derivative(x, w):
    """Three arrays that are arithmetic of one product, which is no result itself."""
    h = x @ w
    a, b, c = jnp.tanh(h), jnp.sin(h), jnp.cos(h)
    y = jnp.sort(a * b * c)
    return y * a, y * b, y * c


def test_one_product_instead_of_what_is_made_of_it():
    """Three arrays would go on, and the one that they are made of does."""
    handed, again = crossing(derivative, "sort")
    assert handed == ["dot_general", "sort"]
    assert again == ["tanh", "sin", "cos"]


def test_what_costs_as_much_goes_on():
    """One array of one product is handed on as it is."""

    def fn(x, w):
        a = jnp.tanh(x @ w)
        return jnp.sort(a) * a

    assert crossing(fn, "sort") == (["tanh", "sort"], [])


def test_what_is_made_of_what_goes_on_anyway():
    """It is computed again, in a narrower dtype too."""

    def fn(x, w):
        h = x @ w
        a = h.astype(jnp.bfloat16)
        y = jnp.sort(a)
        return y * a, h + 1

    handed, again = crossing(fn, "sort")
    assert handed == ["dot_general", "sort"]
    assert again == ["convert_element_type"]


def test_a_narrower_dtype_alone_goes_on():
    """What it was made of takes twice as much."""

    def fn(x, w):
        a = (x @ w).astype(jnp.bfloat16)
        return jnp.sort(a) * a

    assert crossing(fn, "sort")[0] == ["convert_element_type", "sort"]


def test_what_is_made_in_two_parts_of_what_goes_on_anyway():
    """It is computed again of that, and what is made of it in between too."""

    def fn(x, w):
        h = x @ w
        a = jnp.tanh(h)
        b = jnp.sort(a) + jnp.sin(a)
        c = jnp.cos(a)
        return jnp.sort(b, axis=0) * c + h

    step = taken_apart(fn, X, X)
    names = [e.primitive.name for e in step.program.equations]
    first = names.index("tanh") + 1
    second = first + names[first:].index("sort") + 1
    cos = names.index("cos") + 1
    assert second < cos
    parts = [range(first), range(first, cos), range(cos, len(names))]
    found = Crossing(step, parts, (), step.program.invars.__contains__)
    producers = step.program.producers
    handed = {names[producers[v]] for v in found.handed}
    assert handed == {"dot_general", "add"}
    taken = [v for i in parts[2] for v in step.reads(i)]
    again = [names[i] for i in sorted(found.again(taken, 2))]
    assert again == ["tanh", "cos"]


def test_what_was_asked_for_goes_on():
    """As gradients that updates take."""
    handed, again = crossing(derivative, "sort", fixed=("tanh",))
    assert "tanh" in handed
    assert "tanh" not in again


def test_no_random_number_is_drawn_again():
    """Nor what is reduced, or sorted: only arithmetic is."""

    def fn(x, w):
        bits = jax.random.bits(jax.random.key(0), x.shape)
        mask = bits > 7
        y = jnp.sort(jnp.where(mask, x @ w, 0.0))
        return jnp.where(mask, y, 0.0)

    handed, again = crossing(fn, "sort")
    assert not {"random_bits", "threefry2x32"} & {*again}
    assert "sort" in handed


def test_sums_of_layers_are_not_taken_apart():
    """Of a residual stream one array goes on, and not all that were added to it."""

    def fn(x, w):
        for _ in range(4):
            x = x + jnp.sort(x @ w)
        y = jnp.argsort(x)
        return y * x

    step = taken_apart(fn, X, X)
    equations = step.program.equations
    names = [e.primitive.name for e in equations]
    at = len(names) - 1 - names[::-1].index("sort")
    parts = [range(at), range(at, len(equations))]
    found = Crossing(step, parts, (), step.program.invars.__contains__)
    handed = [names[step.program.producers[v]] for v in found.handed if v.aval.shape]
    assert handed.count("add") == 1
    assert handed.count("sort") == 0


def test_effects_are_no_values():
    """What keeps them in order goes on, and is of no equation's results."""

    def fn(x, w):
        jax.debug.print("before")
        y = jnp.sort(x @ w)
        jax.debug.print("after")
        return y + 1

    assert crossing(fn, "sort")[0] == ["sort"]


def nodes_of(fn, *types):
    """A function as a step, and its equations."""
    step = taken_apart(fn, *types)
    return step, rest(step, ())


def test_what_is_alive():
    """What products make and take is, and what arithmetic makes for them alone not."""

    def fn(x, w):
        h = jnp.tanh(x @ w) * 2 + 1
        return jnp.sum(jnp.cos(h @ w))

    step, nodes = nodes_of(fn, X, X)
    names = [step.program.equations[n.position].primitive.name for n in nodes]
    found = kept(step, nodes)
    of = {names[k] for k, n in enumerate(nodes) if found & {*step.defines(n.position)}}
    assert {"dot_general", "add"} <= of
    assert not {"tanh", "mul", "cos"} & of
    assert max(passing(spans(nodes, found), len(nodes))) == BYTES
    assert passing(spans(nodes), len(nodes))[0] == 0


def test_what_is_reduced_over_gradients():
    """Nothing is where no update takes any."""
    step, _ = nodes_of(lambda x, w: jnp.sum((x @ w) ** 2), X, X)
    found = reduced(step)
    assert not found.sums
    assert not found.scaled
