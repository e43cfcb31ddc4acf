"""A step given objects of Flax NNX trains them, returns them, or raises."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_offload as oo

LOST = "changes objects of Flax NNX in place"
X = jnp.ones((4, 8))


class Model(nnx.Module):
    """Two layers, of which one is in a list."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        return self.rest[0](self.first(x))


class NoPytree(nnx.Module, pytree=False):
    """A module that is a leaf to JAX."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Calls(nnx.Pytree):
    """Counts calls in Python, and scales."""

    def __init__(self):
        self.count = 0
        self.scale = nnx.Variable(jnp.ones(()))


def make(cls=Model):
    """A model and its offloaded optimizer."""
    model = cls(nnx.Rngs(0))
    tx = oo.offload(optax.adamw(1e-2), oo.Rule(".*", min_bytes=0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step(model, optimizer, x):
    """A train step in place."""

    def loss_fn(model):
        return jnp.mean((model(x) - 1) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def returning(model, optimizer, x):
    """A train step that returns what it changed."""
    loss = step(model, optimizer, x)
    return model, optimizer, loss


@pytest.fixture(scope="module")
def losses():
    """The losses of three steps, as `nnx.jit` computes them."""
    model, optimizer = make()
    jitted = nnx.jit(step)
    found = [float(jitted(model, optimizer, X)) for _ in range(3)]
    assert len(set(found)) == 3
    return found


JITS = {
    "oo.jit": oo.jit,
    "oo.stream": oo.stream,
    "jax.jit(oo.stream)": lambda f: jax.jit(oo.stream(f)),
    "nnx.jit(oo.stream)": lambda f: nnx.jit(oo.stream(f)),
    "nnx.jit(oo.jit)": lambda f: nnx.jit(oo.jit(f)),
}


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_what_is_lost_raises(jit):
    """By position and by keyword, in containers of Python and of NNX."""
    model, optimizer = make()

    def of_pair(pair, x):
        return step(pair[0], pair[1], x)

    def of_dict(both, x):
        return step(both["model"], both["optimizer"], x)

    with pytest.raises(TypeError, match=f"{LOST}.*argument 0/first/bias"):
        jit(step)(model, optimizer, X)
    with pytest.raises(TypeError, match=f"{LOST}.*argument model/first/bias"):
        jit(step)(x=X, model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match=f"{LOST}.*argument 0/0/first/bias"):
        jit(of_pair)((model, optimizer), X)
    with pytest.raises(TypeError, match=LOST):
        jit(of_pair)(nnx.List([model, optimizer]), X)
    with pytest.raises(TypeError, match=LOST):
        jit(of_dict)({"model": model, "optimizer": optimizer}, X)


def test_the_error_has_the_lines_to_write(losses):
    """They are those of the recipes, and train."""
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"graph, state = nnx.split\(") as raised:
        oo.jit(step)(model, optimizer, X)
    given, *_ = str(raised.value).partition("nnx.split(")[2].partition("Or jit")
    lines = f"graph, state = nnx.split({given}"
    body = lines.replace("...", "loss = train(model, optimizer, x)")
    head, _, last = body.partition("    state, loss = step(state, x)")
    names = {"nnx": nnx, "oo": oo, "train": step, "x": X}
    names |= {"model": model, "optimizer": optimizer}
    exec(head.replace("\n    ", "\n"), names)
    for expected in losses:
        exec("state, loss = step(state, x)" + last.replace("\n    ", "\n"), names)
        np.testing.assert_allclose(names["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_what_is_returned_is_kept(jit, losses):
    """Objects that a step changes and returns are values to JAX."""
    model, optimizer = make()
    jitted = jit(returning)
    for expected in losses:
        model, optimizer, loss = jitted(model, optimizer, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def merged(pair, x):
    """Split, merged, and split again."""
    model, optimizer = nnx.merge(*pair)
    loss = step(model, optimizer, x)
    return nnx.split((model, optimizer)), loss


def of_pure_dicts(graph, state):
    """A step of arrays alone."""

    def pure(values, x):
        given = jax.tree.map(lambda v: v, state)
        nnx.replace_by_pure_dict(given, values)
        (_, after), loss = merged((graph, given), x)
        return nnx.to_pure_dict(after), loss

    return pure


@pytest.mark.parametrize("form", ["split", "pure dicts"])
@pytest.mark.parametrize("jit", ["oo.jit", "jax.jit(oo.stream)"])
def test_states_are_values(jit, form, losses):
    """`nnx.State`, `nnx.GraphDef` and pure dicts are what they were."""
    given = nnx.split(make())
    jitted = JITS[jit](merged if form == "split" else of_pure_dicts(*given))
    given = given if form == "split" else nnx.to_pure_dict(given[1])
    for expected in losses:
        given, loss = jitted(given, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_what_changes_nothing_takes_objects():
    """Evaluation, gradients, transformations, other libraries' modules."""
    model, _ = make()

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    expected = loss_fn(model, X)
    for jit in (oo.jit, oo.stream):
        np.testing.assert_allclose(jit(loss_fn)(model, X), expected, rtol=1e-6)
        found, grads = nnx.value_and_grad(jit(loss_fn))(model, X)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert len(jax.tree.leaves(grads)) == 4
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    assert oo.jit(jax.vmap(linear))(X).shape == (4, 8)
    assert oo.stream(NoPytree(nnx.Rngs(0)).__call__)(X).shape == (4, 8)


def test_a_model_in_training_mode_is_not_for_evaluation():
    """The error says how to change it, and then it works."""
    norm, dropout = (
        nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    )
    model = nnx.Sequential(norm, dropout)

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    message = f"{LOST}.*/mean.*only evaluates.* model.eval\\(\\) before"
    jitted = oo.jit(loss_fn)
    with pytest.raises(TypeError, match=f"(?s){message}"):
        jitted(model, X)
    model.eval()
    np.testing.assert_allclose(jitted(model, X), loss_fn(model, X), rtol=1e-6)


def test_other_changes():
    """Of variables, random streams, statistics, what is sown, Python's numbers."""

    def doubles(variable):
        variable[...] = variable[...] * 2
        return jnp.sum(variable[...])

    def draws(rngs):
        return jax.random.normal(rngs.params(), (2,))

    def calls(counter):
        counter.count += 1
        return counter.scale[...]

    def sows(model, x):
        model.sow(nnx.Intermediate, "hidden", x)
        return model(x)

    def pops(model, x):
        sows(model, x)
        return nnx.pop(model, nnx.Intermediate)

    model, _ = make()
    with pytest.raises(TypeError, match=f"{LOST}.*'argument 0'"):
        oo.jit(doubles)(nnx.Variable(jnp.ones(3)))
    with pytest.raises(TypeError, match=f"{LOST}.*count"):
        oo.jit(draws)(nnx.Rngs(0))
    with pytest.raises(TypeError, match=f"{LOST}.*argument 0/mean"):
        oo.jit(lambda norm, x: norm(x))(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), X)
    with pytest.raises(TypeError, match=f"{LOST}.*'argument 0'"):
        oo.jit(calls)(Calls())
    # Flax has newer words for the same.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(TypeError, match=f"{LOST}.*argument 0/hidden"):
            oo.jit(sows)(model, X)
        assert len(jax.tree.leaves(oo.jit(pops)(model, X))) == 1


def test_every_door_raises():
    """What traces a step raises as its call does."""
    given = (*make(), X)
    jitted = oo.jit(step)
    for door in (jitted.trace, jitted.lower, jitted.eval_shape, jitted.schedule):
        with pytest.raises(TypeError, match=LOST):
            door(*given)
    with pytest.raises(TypeError, match=LOST), jax.disable_jit():
        jitted(*given)


def test_objects_that_are_no_pytrees():
    """JAX takes none; our error has the lines too."""
    model, optimizer = make(NoPytree)
    for door in (oo.jit(step), oo.jit(step).lower):
        with pytest.raises(TypeError, match=r"no pytrees.*'argument 0'") as raised:
            door(model, optimizer, X)
        assert "nnx.split" in str(raised.value)
    with pytest.raises(TypeError, match="abstract array"):
        oo.jit(lambda x: x)(object())


def test_a_stream_that_moves_nothing_calls_the_step(losses):
    """Under `nnx.jit` such a step trains."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    jitted = nnx.jit(oo.stream(step))
    found = [float(jitted(model, optimizer, X)) for _ in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
