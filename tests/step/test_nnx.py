"""Steps that are given objects of Flax NNX, as `nnx.jit` takes them."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot

LOST = "changes objects of Flax NNX in place"
X = jax.random.normal(jax.random.key(9), (4, 8))
ALL = oo.Rule(".*", min_bytes=0)
# Flax has newer words for what is sown.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module:DeprecationWarning")


class Block(nnx.Module):
    """A layer with statistics, a random stream, and something sown."""

    def __init__(self, linear, rngs):
        self.linear = linear
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(jnp.tanh(self.linear(x)))) + x
        self.sow(nnx.Intermediate, "hidden", x)
        return x


class Model(nnx.Module):
    """Blocks in a list, of which two share a layer."""

    def __init__(self, rngs):
        shared = nnx.Linear(8, 8, rngs=rngs)
        self.blocks = nnx.List([Block(shared, rngs), Block(shared, rngs)])
        self.head = nnx.Linear(8, 8, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        self.steps[...] += 1
        for block in self.blocks:
            x = block(x)
        nnx.pop(self, nnx.Intermediate)
        return self.head(x)


class NoPytree(nnx.Module, pytree=False):
    """A module that is a leaf to JAX."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def linear():
    """The smallest model."""
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def offloaded():
    """Momentum in host memory."""
    return oo.offload(optax.sgd(1e-2, momentum=0.9), ALL)


def optimizer_of(model, wrt=nnx.Param):
    """Its optimizer."""
    return nnx.Optimizer(model, offloaded(), wrt=wrt)


def step(model, optimizer, x):
    """A train step in place."""

    def loss_fn(model):
        return jnp.mean((model(x) - 1) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def values(*objects):
    """What objects hold, as NumPy arrays."""
    leaves = jax.tree.leaves(nnx.state(objects))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if key else x)
        for x, key in zip(leaves, keys, strict=True)
    ]


def same(found, expected):
    """Asserts that two runs have the same values, to the last digit."""
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(leaves) == len(others)
    for a, b in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(a, b)


def everything(jit):
    """Steps with all that NNX has, and what became of it."""
    model, other = Model(nnx.Rngs(0)), linear()
    optimizer = optimizer_of(model)
    both = nnx.ModelAndOptimizer(other, offloaded())
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(0, noise=1)

    def train(scale, trees, x, *, both, other, rngs, square):
        model, optimizer = trees["model"], trees["rest"][0]
        assert both.model is other  # Shared by two arguments.
        model.train()
        x = x + jax.random.normal(rngs.noise(), x.shape)
        loss = step(model, optimizer, x) * scale
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** square))(other)
        both.update(grads)
        trees["rest"][1].update(loss=loss)
        other.extra = nnx.Intermediate(x[0])
        return loss, other, {"new": nnx.Linear(8, 8, rngs=rngs)}

    jitted = jit(train, static_argnums=0, static_argnames="square")
    trees = {"model": model, "rest": [optimizer, metrics]}
    named = {"both": both, "other": other, "rngs": rngs}
    made = []
    for _ in range(3):
        loss, returned, new = jitted(2.0, trees, X, square=2, **named)
        assert returned is other
        assert model.blocks[0].linear is model.blocks[1].linear
        made += [loss, new["new"](X)]
    assert model.calls == 3
    return made, metrics.compute(), values(model, optimizer, both, rngs, other)


def test_it_is_nnx_jit():
    """The same values, references and structure."""
    donated = {"donate_argnums": 1, "donate_argnames": ("both", "rngs")}
    same(everything(functools.partial(oo.jit, **donated)), everything(nnx.jit))


def losses_of(jitted, cls=None):
    """The losses of three steps."""
    model = cls(nnx.Rngs(0)) if cls else linear()
    optimizer = optimizer_of(model)
    return [float(jitted(model, optimizer, X)) for _ in range(3)]


@pytest.fixture(scope="module")
def losses():
    """Those of `nnx.jit`."""
    found = losses_of(nnx.jit(step, donate_argnums=(0, 1)))
    assert len(set(found)) == 3
    return found


DOORS = {
    "oo.jit": lambda f: oo.jit(f, donate_argnums=(0, 1)),
    "nnx.jit(oo.stream)": lambda f: nnx.jit(oo.stream(f), donate_argnums=(0, 1)),
    "nnx.jit(oo.jit)": lambda f: nnx.jit(oo.jit(f)),
    "pickled": lambda f: pickle.loads(pickle.dumps(oo.jit(f))),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_door_trains(door, losses):
    """In place, as `nnx.jit`."""
    np.testing.assert_allclose(losses_of(door(step)), losses, rtol=1e-6)


def test_classes_that_are_no_pytrees(losses):
    """JAX takes none; a graph has them."""
    np.testing.assert_allclose(losses_of(oo.jit(step), NoPytree), losses, rtol=1e-6)


def test_eagerly(losses):
    """`jax.disable_jit` and `oo.stream` alone change objects too."""
    np.testing.assert_allclose(losses_of(oo.stream(step)), losses, rtol=1e-5)
    with jax.disable_jit():
        np.testing.assert_allclose(losses_of(oo.jit(step)), losses, rtol=1e-5)


def test_a_step_is_compiled_once_and_donates():
    """Though `nnx.Optimizer.step` and parameters are on no device for good."""
    model = linear()
    optimizer = optimizer_of(model)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    kernel = model.kernel.get_raw_value()
    moment = optimizer.opt_state[0].trace["kernel"].get_raw_value()
    assert not kernel.committed
    for _ in range(3):
        jitted(model, optimizer, X)
    assert jitted._cache_size() == 1
    assert kernel.is_deleted()
    assert moment.is_deleted()
    new = optimizer.opt_state[0].trace["kernel"].get_raw_value()
    assert new.sharding.memory_kind == "pinned_host"
    jitted.clear_cache()
    assert jitted._cache_size() == 0


def test_what_stays_is_no_result():
    """Evaluation returns no parameters, so that there is no second copy of them."""
    model = oo.set_memory_kind(linear(), "kernel", "pinned_host")
    kernel = model.kernel.get_raw_value()
    jitted = oo.jit(lambda model, x: jnp.mean(model(x) ** 2))
    found = jitted(model, X)
    np.testing.assert_allclose(found, jnp.mean(linear()(X) ** 2), rtol=1e-6)
    assert model.kernel.get_raw_value() is kernel
    assert len(jitted.trace(model, X).jaxpr.jaxpr.outvars) == 1
    assert jitted.eval_shape(model, X).shape == ()
    # It may be of another trace, where nothing could change it.
    np.testing.assert_allclose(jax.jit(lambda x: jitted(model, x))(X), found, rtol=1e-6)


def test_ahead_of_time(losses):
    """`schedule`, `lower` and `compile` take objects, real ones and abstract ones."""
    model = linear()
    optimizer = optimizer_of(model)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    lowered = jitted.lower(model, optimizer, X)
    compiled = lowered.compile()
    found = [float(compiled(model, optimizer, X)) for _ in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-6)

    def create():
        model = linear()
        return model, nnx.ModelAndOptimizer(model, offloaded())

    model, optimizer = oo.eval_shape(create)
    assert optimizer.model is model
    moment = optimizer.opt_state[0].trace["kernel"].get_raw_value()
    assert moment.sharding.memory_kind == "pinned_host"
    assert "2 groups" in str(oo.jit(step_of_both).schedule(optimizer, X))


def step_of_both(both, x):
    """A step of `nnx.ModelAndOptimizer`."""
    grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(both.model)
    both.update(grads)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit], ids=["jax.jit", "tree mode"])
def test_what_is_lost_raises(jit):
    """JAX gives copies: by position and by keyword, in containers of Python and NNX."""
    options = {} if jit is jax.jit else {"graph": False}
    model = linear()
    optimizer = optimizer_of(model)
    with pytest.raises(TypeError, match=f"{LOST}.*argument 0/bias") as raised:
        jit(oo.stream(step), **options)(model, optimizer, X)
    assert "@oo.jit(donate_argnums=(0, 1))\n" in str(raised.value)
    with pytest.raises(TypeError, match=f"{LOST}.*argument model/bias"):
        jit(oo.jit(step), **options)(x=X, model=model, optimizer=optimizer)
    pair = nnx.List([model, optimizer])
    with pytest.raises(TypeError, match=f"{LOST}.*argument 0/0/bias"):
        jit(oo.jit(lambda pair, x: step(pair[0], pair[1], x)), **options)(pair, X)


def test_what_is_returned_is_kept(losses):
    """Objects that a step changes and returns are values to `jax.jit`."""
    model = linear()
    optimizer = optimizer_of(model)

    def returning(model, optimizer, x):
        loss = step(model, optimizer, x)
        return model, optimizer, loss

    jitted = jax.jit(oo.stream(returning))
    for expected in losses:
        model, optimizer, loss = jitted(model, optimizer, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_errors_are_flax_s_and_change_nothing():
    """Of what no argument reaches, of the step itself, of what cannot be sharded so."""
    model = linear()
    optimizer = optimizer_of(model)
    before = values(model, optimizer)
    with pytest.raises(Exception, match="different trace level"):
        oo.jit(lambda optimizer, x: step(model, optimizer, x))(optimizer, X)

    def failing(model, optimizer, x):
        step(model, optimizer, x)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        oo.jit(failing, donate_argnums=(0, 1))(model, optimizer, X)
    same(values(model, optimizer), before)
    by_filter = nnx.StateSharding({...: P()})
    with pytest.raises(TypeError, match=r"StateSharding.*nnx\.update"):
        oo.jit(step, in_shardings=(by_filter, None, None))


def test_shardings_of_arguments():
    """Those given hold for objects, before and after."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, rows = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))

    def step(scale, model, x):
        model.kernel[...] *= scale
        return model(x)

    jitted = oo.jit(
        step, static_argnums=0, in_shardings=(whole, rows), out_shardings=rows
    )
    model = linear()
    assert jitted(2, model, X).sharding == rows
    assert model.kernel.sharding == whole
    same(model.kernel[...], linear().kernel[...] * 2)


def test_numbers_are_on_the_whole_mesh():
    """Beside parameters on a mesh, so that a step is compiled once."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = linear()
    nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, P())))
    optimizer = optimizer_of(model)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        jitted(model, optimizer, X)
    assert jitted._cache_size() == 1


def test_values_are_what_they_were():
    """Other libraries' modules, states, static objects."""
    module = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    assert oo.jit(jax.vmap(module))(X).shape == (4, 8)
    graph, state = nnx.split(linear())
    jitted = oo.jit(lambda state, x: nnx.merge(graph, state)(x))
    assert jitted(state, X).shape == (4, 8)
    assert not jitted._objects.expected
    static = oo.jit(lambda model, x: model(x), static_argnums=0)
    assert static(linear(), X).shape == (4, 8)


class Adapted(nnx.Module):
    """A LoRA layer."""

    def __init__(self, rngs):
        self.layer = nnx.LoRALinear(128, 512, lora_rank=2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("donated", [(0, 1), (1,)])
def test_an_encoded_base(donated):
    """Adapters train over it; a step that changes it raises."""
    model = Adapted(nnx.Rngs(0))
    rule = oo.Rule(".*/kernel", codec="nf4", min_bytes=0)
    assert oo.place(model, rule) is model
    optimizer = optimizer_of(model, nnx.LoRAParam)
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    x = jnp.ones((2, 128))

    def loss_fn(model):
        return jnp.mean((model(x) - 1) ** 2)

    def train(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=adapters)(model)
        optimizer.update(model, grads)
        return loss

    jitted = oo.jit(train, donate_argnums=donated)
    codes = jax.device_get(model.layer.kernel.get_raw_value())
    first, second = (float(jitted(model, optimizer)) for _ in range(2))
    assert second < first
    kept = model.layer.kernel.get_raw_value()
    assert {a.sharding.memory_kind for a in jax.tree.leaves(kept)} == {"pinned_host"}
    same(kept, codes)

    def changing(model, optimizer):
        train(model, optimizer)
        model.layer.kernel[...] *= 2

    with pytest.raises(ValueError, match="replaces parameters that are encoded"):
        oo.jit(changing, donate_argnums=donated)(model, optimizer)


def test_place_and_set_memory_kind_change_objects():
    """In place, in trees, by rules and by another object, with what they share."""
    model = linear()
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    tree = {"both": both, "array": jnp.ones(3)}
    moved = oo.set_memory_kind(tree, ".*(kernel|array)", "pinned_host")
    assert moved["both"] is both
    assert both.model is model
    assert model.kernel.get_raw_value().sharding.memory_kind == "pinned_host"
    assert moved["array"].sharding.memory_kind == "pinned_host"
    assert tree["array"].sharding.memory_kind == "device"
    placed = linear()
    assert oo.place(placed, model) is placed
    assert placed.kernel.get_raw_value().sharding.memory_kind == "pinned_host"
    variable = nnx.Param(jnp.ones(3))
    assert oo.place(variable, oo.Rule("", min_bytes=0)) is variable
    assert variable.get_raw_value().sharding.memory_kind == "pinned_host"
    with pytest.raises(ValueError, match="Nearest paths: 'both/model/kernel'"):
        oo.set_memory_kind({"both": both}, "kernels", "device")


@pytest.mark.parametrize("donated", [(0, 1), (1,), ()])
def test_statistics_of_scanned_layers_stay(donated):
    """What a scan makes of rows that it took returns to where they rest."""

    class Scanned(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: nnx.BatchNorm(8, rngs=nnx.Rngs(key)))
            self.norms = make(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            layers = nnx.scan(
                lambda norm, x: jnp.tanh(norm(x)) + x,
                in_axes=(0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            return layers(self.norms, x)

    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    found = []
    for jit, tx in (
        (nnx.jit, optax.adam(0.1)),
        (oo.jit, oo.offload(optax.adam(0.1), ALL)),
    ):
        model = Scanned()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        options = {}
        if jit is oo.jit:
            oo.place(model, ALL)
            options = {"donate_argnums": donated}
        jitted = jit(step, **options)
        found.append([float(jitted(model, optimizer)) for _ in range(3)])
    np.testing.assert_allclose(*found, rtol=1e-5)
    kept = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert {x.sharding.memory_kind for x in kept} == {"pinned_host"}


def test_what_replaces_a_donated_variable_stays():
    """A cache that is written anew is made of nothing that it was."""

    class Caching(nnx.Module):
        def __init__(self):
            self.linear, self.cache = linear(), nnx.Cache(jnp.zeros((4, 8)))

        def __call__(self, x):
            self.cache[...] = jnp.tanh(x)
            return self.linear(x)

    model = oo.place(Caching(), ALL)
    optimizer = nnx.Optimizer(model, oo.offload(optax.adam(0.1), ALL), wrt=nnx.Param)
    step = oo.jit(
        lambda model, optimizer: optimizer.update(
            model, nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model)
        ),
        donate_argnums=(0, 1),
    )
    for _ in range(2):
        step(model, optimizer)
    cached = model.cache.get_raw_value()
    assert cached.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(cached, jnp.tanh(X), rtol=1e-6)


@pytest.mark.newest
def test_compiling_for_a_target():
    """Objects keep what they share."""
    pytest.importorskip("jax_plugins")
    model = linear()
    both = nnx.ModelAndOptimizer(model, offloaded())

    def step(model, both, x):
        assert both.model is model
        return step_of_both(both, x)

    for fn in (step, oo.jit(step, donate_argnums=1)):
        compiled = aot.compile(fn, model, both, X, target=aot.Target("h100"))
        assert aot.peak(compiled).peak_bytes > 0


def test_what_an_optimizer_is_made_of_is_wrapped():
    """And not the object, whose arrays are no part of the message."""
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"tx=offload\(optax") as error:
        oo.offload(optimizer)  # pyright: ignore[reportArgumentType]
    assert "nnx" in str(error.value)
    assert len(str(error.value)) < 300
