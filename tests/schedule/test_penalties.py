"""What is computed of parameters alone is beside the layers that take them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from limited import limited
from small_steps import matrices, taken_apart
from small_steps import unrolled as loss

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._schedule.rest import rest
from optax_offload._schedule.turns.liveness import spans
from optax_offload._schedule.turns.penalties import beside_layers

LAYERS, WIDTH = 6, 16
WEIGHT = (WIDTH, WIDTH)
ALL = [oo.Rule(".*", min_bytes=0)]


@pytest.fixture(autouse=True)
def one_layer_to_a_segment(monkeypatch):
    """However small a layer is; what is as large as one is not a number."""
    limited(
        monkeypatch,
        segment_bytes=WIDTH * WIDTH * 4,
        least_part=1,
        least_segments=3,
        small_bytes=WIDTH * WIDTH * 2,
        least_residual_bytes=WIDTH * WIDTH * 4,
    )
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)


def with_penalty(penalty):
    """The same, and a number of all parameters."""
    return lambda params, x: loss(params, x) + 0.01 * sum(map(penalty, params))


def after_penalty(penalty):
    """The same number, which is made first: its gradient is the last one."""
    return lambda params, x: 0.01 * sum(map(penalty, params)) + loss(params, x)


def train_step(tx, loss_fn, reduced=optax.tree.norm):
    """A step that returns its loss, and with it a number of its parameters."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        number = value + reduced(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, number

    return step


def loaded(loss_fn, reduced=len):
    """What each segment of a step loads for its equations, as numbers of parameters."""
    tx = oo.offload(optax.adam(1e-3), ALL)
    params = oo.place(matrices(LAYERS), ALL)
    plan = oo.jit(train_step(tx, loss_fn, reduced)).schedule(
        params, tx.init(params), jnp.ones((4, WIDTH))
    )
    assert plan.chain is not None
    own = plan.step.program.invars[: len(params)]
    return [
        [own.index(v) for v in segment.loads if v in own]
        for segment in plan.chain.segments
    ]


PENALTIES = {
    "squares": lambda w: jnp.sum(w * w),
    "powers": lambda w: jnp.sum(w**2),
    "absolute": lambda w: jnp.sum(jnp.abs(w)),
    "norms": lambda w: jnp.sqrt(jnp.sum(w * w)),
    "scaled": lambda w: jnp.sum((2 * w.T) ** 2) / w.size,
}


@pytest.mark.parametrize("written", [with_penalty, after_penalty])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_load_nothing(name, written):
    """Neither their numbers, after the forward pass, nor their gradients, before it.

    But for the first layer's gradient, which takes no parameters without.
    """
    expected = loaded(loss)
    assert expected[-2] == [1]
    expected[-2] = [1, 0]
    assert loaded(written(PENALTIES[name])) == expected


def test_norms_load_nothing():
    """What is logged of parameters is evaluated where the forward pass takes them."""
    assert loaded(loss, optax.tree.norm) == loaded(loss)


def test_what_products_are_in_stays():
    """A penalty that is no arithmetic is evaluated where it is written."""

    def orthogonal(w):
        return jnp.sum((w.T @ w - jnp.eye(WIDTH)) ** 2)

    found = loaded(with_penalty(orthogonal))
    assert len(found) > len(loaded(loss))


def hidden(params, x):
    """The mean square of what each layer makes, all of which the last line takes."""
    found = []
    for w in params:
        found.append(x := jnp.tanh(x @ w))
    return sum(jnp.mean(x**2) for x in found)


def ordered(fn, *args):
    """A function as a step, and its equations in the order in which they are."""
    step = taken_apart(fn, *args)
    nodes = beside_layers(step, rest(step, ()), lambda taken: ())
    return nodes, [name_of(step, node) for node in nodes]


def test_numbers_of_layers_are_beside_these():
    """Each is reduced where its layer ends, and not where the last one does."""
    _, names = ordered(hidden, matrices(LAYERS), jnp.ones((64, WIDTH)))
    some = [name for name in names if name in ("dot_general", "reduce_sum")]
    assert some == ["dot_general", "reduce_sum"] * 6


def test_numbers_wait_for_what_else_they_are_made_of():
    """As the one around which a spread is."""

    def spread(params, x):
        value = hidden(params, x)
        return jnp.mean((x - value) ** 2)

    _, names = ordered(spread, matrices(LAYERS), jnp.ones((64, WIDTH)))
    some = [name for name in names if name in ("dot_general", "reduce_sum")]
    assert some == [*["dot_general", "reduce_sum"] * 6, "reduce_sum"]


def test_gradients_of_numbers_of_layers():
    """They are made where layers take them, and not all of them first."""
    y = jnp.ones((64, WIDTH))
    nodes, names = ordered(jax.grad(hidden), matrices(LAYERS), y)
    products = [k for k, name in enumerate(names) if name == "dot_general"]
    forward, backward = products[5:7]
    new = [x for x in spans(nodes) if forward < x.made < backward <= x.last]
    assert len([x for x in new if x.var.aval.shape == y.shape]) <= 2


@pytest.mark.parametrize(
    ("made", "name", "kept", "waits"),
    [
        (jnp.sin, "sin", False, True),
        (jnp.transpose, "transpose", False, False),
        (jnp.transpose, "transpose", True, True),
    ],
)
def test_arithmetic_of_what_was_made_long_before(made, name, kept, waits):
    """It is made where it is taken; but a product is laid out as it is made."""

    def fn(x, w):
        x = jnp.cos(x)
        a = square(x)
        between = jnp.tanh(x @ w)
        b = made(a)
        return b + square(jnp.tanh(between @ w)), a if kept else 0

    def square(x):
        return jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())))

    _, names = ordered(fn, jnp.ones((64, WIDTH)), jnp.ones(WEIGHT))
    dots = [k for k, name in enumerate(names) if name == "dot_general"]
    assert len(dots) == 4
    assert (names.index(name) > dots[-1]) == waits


def order(fn, rows, at_rest=False):
    """The primitives of a function as they are evaluated, of so many rows and a matrix.

    Args:
      fn: What makes the product in question first.
      rows: The rows of its arrays.
      at_rest: Whether the product takes what is loaded.
    """
    x, w = jnp.ones((rows, WIDTH)), jnp.ones(WEIGHT)
    step = taken_apart(fn, x, x, w)
    nodes = rest(step, ())
    first = next(x for x in nodes if name_of(step, x) == "dot_general")
    loaded = {*first.reads} if at_rest else set()
    nodes = beside_layers(step, nodes, loaded.intersection)
    return [name_of(step, node) for node in nodes]


def name_of(step, node):
    """The primitive that a node is an equation of."""
    return step.program.equations[node.position].primitive.name


def half_gradients(x, y, w):
    """The sum of two products of rows, and what is in between."""
    x, y = jnp.sin(x), jnp.sin(y)
    half = 2 * (x.T @ y)
    between = jnp.tanh(jnp.tanh(x @ w) @ w)
    return half + between.T @ between, x, y


def twice(x, y, w):
    """The same, and what else takes the first product."""
    product = jnp.sin(x).T @ y
    between = jnp.tanh(jnp.tanh(x @ w) @ w)
    return product + between.T @ between, product


def test_half_of_a_gradient_waits_for_the_other():
    """It is as large as the parameter, and what it is made of are some rows."""
    found = order(half_gradients, 4)
    dots = [k for k, name in enumerate(found) if name == "dot_general"]
    assert found.index("tanh") == dots[0] + 1
    assert found[-3:] == ["dot_general", "mul", "add"]


@pytest.mark.parametrize(
    ("fn", "rows", "at_rest"),
    [(half_gradients, 64, False), (twice, 4, False), (half_gradients, 4, True)],
)
def test_products_that_stay(fn, rows, at_rest):
    """Those that take more than they are, or what is loaded, or are taken twice."""
    found = order(fn, rows, at_rest)
    assert found.count("dot_general") == 4
    dots = [k for k, name in enumerate(found) if name == "dot_general"]
    assert found.index("tanh") == dots[1] + 1


def test_a_backward_pass_begins_after_the_loss():
    """Also where that is a mean of squares, whose gradient takes no number of it.

    So what layers compute again there is not taken for a second forward pass, and what
    they compute inside is not stored.
    """

    def remat(params, x):
        layer = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w["up"]) @ w["down"])
        for w in params:
            x = layer(x, w)
        return jnp.mean(x**2)

    up, down = jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))
    params = oo.place([{"up": up, "down": down} for _ in range(6)], ALL)
    tx, x = oo.offload(optax.adam(1e-3), ALL), jnp.ones((8 * WIDTH, WIDTH))
    step = oo.jit(train_step(tx, remat, len), residuals="host")
    plan = step.schedule(params, tx.init(params), x)
    assert plan.chain is not None
    stored = [v for segment in plan.chain.segments for v in segment.stores]
    assert [v.aval.shape for v in stored] == [x.shape] * len(stored)
    assert 0 < len(stored) < len(params)


@pytest.mark.parametrize("written", [with_penalty, after_penalty])
@pytest.mark.parametrize("name", PENALTIES)
def test_exact(name, written):
    """Three steps give what they give with plain JAX."""
    loss_fn, x = written(PENALTIES[name]), jnp.linspace(-1, 1, WIDTH)[None]
    plain, ours = optax.adam(1e-2), oo.offload(optax.adam(1e-2), ALL)
    plain_params, params = matrices(LAYERS), oo.place(matrices(LAYERS), ALL)
    plain_state, state = plain.init(plain_params), ours.init(params)
    plain_step = jax.jit(train_step(plain, loss_fn))
    step = oo.jit(train_step(ours, loss_fn), donate_argnums=(0, 1))
    for _ in range(3):
        plain_params, plain_state, expected = plain_step(plain_params, plain_state, x)
        params, state, number = step(params, state, x)
        np.testing.assert_allclose(number, expected, rtol=1e-6)
    for a, b in zip(params, plain_params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
