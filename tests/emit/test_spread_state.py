"""State that is spread over devices which each have all of the parameters."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from limited import limited
from optax import contrib

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat

# Sums over several devices are in another order.
NEAR = {"rtol": 2e-5, "atol": 1e-6}
RULE = oo.Rule(".*", min_bytes=1024)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "clip_lamb": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "muon": lambda: contrib.muon(1e-2),
    "trace": lambda: optax.trace(0.9),  # Without parameters.
}
BOTH = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def replicated_on(axis_type, shape=(4,), axes=("x",)):
    """The sharding of what all devices have whole."""
    types = (axis_type,) * len(axes)
    return NamedSharding(jax.make_mesh(shape, axes, axis_types=types), P())


def make_params(to):
    """A stack of layers, a matrix and a vector that four devices do not divide."""
    shapes = {"layers": (3, 16, 64), "head": (32, 64), "bias": (258,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        k: jax.random.normal(r, s)
        for (k, s), r in zip(shapes.items(), keys, strict=True)
    }
    return jax.device_put(params, to)


def places(tree):
    """Shape, mesh axes by dimension and memory of each leaf."""
    found = []
    for x in jax.tree.leaves(tree):
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        found.append((x.shape, str(P(*spec)), x.sharding.memory_kind))
    return found


def out_shardings(axis_type, *results):
    """What a step in Auto mode has to be told; in Explicit mode types say it."""
    if axis_type == AxisType.Explicit:
        return None
    return tuple(jax.tree.map(lambda x: x.sharding, x) for x in results)


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("adamw", "muon")))
        for name in OPTIMIZERS
    ],
)
def test_updates_are_those_of_replicated_state(name, axis_type):
    """State stays spread and where rules have it, updates are whole, donated or not."""
    to = replicated_on(axis_type)
    params = make_params(to)
    grads = jax.tree.map(jnp.cos, params)
    tx = oo.offload(OPTIMIZERS[name](), RULE)
    with jax.set_mesh(to.mesh):
        want = tx.init(params)
        state = tx.init(oo.spread(params, "x"))
        before = places(state)
        given = None if name == "trace" else params
        assert any("'x'" in spec for _, spec, kind in before if kind == "pinned_host")
        plain = jax.jit(tx.update)
        step = jax.jit(
            tx.update,
            donate_argnums=1,
            out_shardings=out_shardings(axis_type, params, state),
        )
        for _ in range(2):
            expected, want = plain(grads, want, given)
            updates, state = step(grads, state, given)
            assert places(state) == before
            assert places(updates) == places(params)
            assert_close((updates, state), (expected, want), **NEAR)
    (report, replicated) = (oo.memory_report(x, RULE).check() for x in (state, want))
    big = [r for r in report.rows if r.actual == "pinned_host" and r.shape != (258,)]
    assert {r.copies_per_host for r in big} == {1}
    assert {r.copies_per_host for r in replicated.rows} == {4}


@pytest.mark.parametrize(
    ("axis_type", "late"),
    [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)],
)
def test_in_the_backward_pass(axis_type, late):
    """With `oo.jit`, each row in its scan; all donated."""
    to = replicated_on(axis_type)
    params = {
        "layers": jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8,
        "head": jnp.ones((64, 8)),
    }
    params = jax.device_put(params, to)
    x = jax.random.normal(jax.random.key(1), (8, 64))
    x = jax.device_put(x, to.update(spec=P("x")))
    inner = optax.adam(1e-3)
    if late:
        inner = optax.chain(optax.clip_by_global_norm(0.1), inner)
    tx = oo.offload(inner, RULE)

    def step(params, state, x):
        def loss(params):
            h, _ = jax.lax.scan(
                lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"]
            )
            return jnp.mean((h @ params["head"] - 1) ** 2)

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(to.mesh):
        want = params, tx.init(params)
        got = (
            jax.tree.map(jnp.copy, params),
            tx.init(oo.spread(params, "x")),
        )
        before = places(got)
        plain = jax.jit(step)
        ours = oo.jit(
            step,
            donate_argnums=(0, 1),
            out_shardings=out_shardings(axis_type, *got),
        )
        assert "1 gradient of" in str(ours.schedule(*got, x)).partition("whole")[0]
        for _ in range(2):
            want, got = plain(*want, x), ours(*got, x)
            assert places(got) == before
    assert_close(got, want, **NEAR)


def test_with_codes():
    """Codes and scales are parts of leaves that are spread as these are."""
    to = replicated_on(AxisType.Explicit)
    params = jax.device_put({"w": jnp.ones((256, 1024))}, to)
    grads = {"w": jax.device_put(jax.random.normal(jax.random.key(0), (256, 1024)), to)}
    rule = oo.Rule(".*/mu/.*", min_bytes=1024, codec="int8")
    tx = oo.offload(optax.adam(1e-2), rule)
    with jax.set_mesh(to.mesh):
        want, state = tx.init(params), tx.init(oo.spread(params, "x"))
        before = places(state)
        expected, _ = jax.jit(tx.update)(grads, want, params)
        updates, state = jax.jit(tx.update)(grads, state, params)
    assert places(state) == before
    assert_close(updates, expected, **NEAR)
    oo.memory_report(state, rule).check()


def test_beside_parameters_that_are_sharded():
    """State is not gathered over axes over which its parameter is sharded."""
    to = replicated_on(AxisType.Explicit, (2, 2), ("x", "y"))
    params = {
        "both": jax.device_put(jnp.ones((8, 64, 64)), to.update(spec=P(None, "y"))),
        "none": jax.device_put(jnp.ones((64, 64)), to),
    }
    tx = oo.offload(optax.adafactor(1e-2, min_dim_size_to_factor=8), RULE)
    with jax.set_mesh(to.mesh):
        want, state = tx.init(params), tx.init(oo.spread(params, "x"))
        before = places(state)
        expected, _ = jax.jit(tx.update)(params, want, params)
        updates, state = jax.jit(tx.update)(params, state, params)
    assert places(state) == before
    assert places(updates) == places(params)
    assert_close(updates, expected, **NEAR)


def test_a_template_and_a_restored_state():
    """`eval_shape` of the spread parameters is the template."""
    to = replicated_on(AxisType.Auto)
    params = make_params(to)
    tx = oo.offload(optax.adam(1e-2), RULE)
    state = tx.init(oo.spread(params, "x"))
    template = oo.eval_shape(tx.init, oo.spread(params, "x"))
    assert places(template) == places(state)
    assert places(oo.place(jax.device_get(state), template)) == places(state)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "axis_type"),
    [
        pytest.param("h100:4", AxisType.Auto, marks=pytest.mark.newest),
        pytest.param("h100:4", AxisType.Explicit, marks=pytest.mark.newest),
        ("v5e:2x2", AxisType.Explicit),
    ],
)
def test_on_chips(chip, axis_type):
    """A quarter of the state crosses each link, by copy engines, with no host copies.

    Making it takes no more than its parts.
    """
    target = aot.Target(chip)
    mesh = target.mesh(("x",), axis_types=axis_type)
    to = NamedSharding(mesh, P())
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=to)
        for name, shape in {"layers": (8, 2048, 2048), "head": (4096, 2048)}.items()
    }
    nbytes = 4 * 2048 * (8 * 2048 + 4096)
    tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
    spread = oo.spread(params, "x")
    state = oo.eval_shape(tx.init, spread)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    compile = functools.partial(aot.compile, target=target)
    made = aot.peak(compile(tx.init, spread, out_shardings=shardings[1]))
    assert made.host_peak_bytes == 2 * nbytes // 4
    assert made.peak_bytes < 1.5 * nbytes / 4 + 2**25
    program = compile(
        tx.update, params, state, params, donate_argnums=1, out_shardings=shardings
    )
    assert aot.peak(program).host_peak_bytes == 2 * nbytes // 4
    transfers = aot.transfers(program)
    assert {t.by for t in transfers} == {"copy engine"}
    for direction in ("load", "store"):
        moved = [t.nbytes * t.times for t in transfers if t.direction == direction]
        assert sum(moved) == 2 * nbytes // 4


def counted():
    """An optimizer whose count is set to zero by each update."""
    return optax.GradientTransformation(
        lambda params: jnp.ones(()), lambda u, s, params=None: (u, jnp.zeros(()))
    )


def scanned(layers, x):
    """Layers under a scan."""
    return jax.lax.scan(lambda x, w: (x @ w, None), x, layers)[0]


def unrolled(layers, x):
    """Layers in a Python loop."""
    for w in layers:
        x = x @ w
    return x


@pytest.mark.parametrize("model", [scanned, unrolled])
def test_a_constant_in_the_place_of_state(model, monkeypatch):
    """It is stored as any other result, and is no gradient that waits."""
    limited(monkeypatch, segment_bytes=1, least_segments=3, least_freed_bytes=1)
    rule = oo.Rule(".*", min_bytes=0)
    tx = oo.offload(optax.chain(counted(), optax.sgd(0.1, 0.9)), rule)

    def step(layers, state, x):
        grads = jax.grad(lambda layers: jnp.mean(model(layers, x) ** 2))(layers)
        updates, state = tx.update(grads, state, layers)
        return optax.apply_updates(layers, updates), state

    layers = jnp.ones((4, 16, 16)) / 16
    layers = [*layers] if model is unrolled else layers
    layers = oo.set_memory_kind(layers, ".*", "pinned_host")
    args = layers, tx.init(layers), jnp.ones((4, 16))
    step = oo.jit(step, donate_argnums=(0, 1))
    plan = step.schedule(*args)
    if model is unrolled and compat.SEGMENTS_ARE_FREED:
        assert plan.chain is not None
        assert not plan.chain.waiting
    _, (count, _) = step(*args)
    assert (count, count.sharding.memory_kind) == (0, "pinned_host")
