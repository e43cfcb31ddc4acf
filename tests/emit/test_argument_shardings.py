"""State whose sharding only the compiled program knows comes back as it went in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close, mistyped, on_host
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_steps import train_step

import optax_offload as oo
from optax_offload import aot

LAYERS, WIDTH = 6, 512
SHAPES = {
    "scale": (LAYERS, WIDTH),
    "v": (LAYERS, 4 * WIDTH, WIDTH),
    "w": (LAYERS, WIDTH, 4 * WIDTH),
}


def loss(params, tokens):
    """Layers under a scan, each with a norm's scale."""

    def layer(x, p):
        return x + jax.nn.gelu((x * p["scale"][None]) @ p["w"]) @ p["v"], None

    x = jnp.ones((64, WIDTH))[tokens]
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def step_and_arguments(mesh, tokens):
    """A step as with FSDP, in which the scale is replicated and its state offloaded."""

    def struct(shape):
        replicated = shape == SHAPES["scale"]
        spec = P() if replicated else P(*[None] * (len(shape) - 1), "x")
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {name: struct(shape) for name, shape in SHAPES.items()}
    tx = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=1024))
    state = oo.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((tokens,), jnp.int32, sharding=NamedSharding(mesh, P("x")))

    return train_step(tx, loss), (params, state, x)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("h100:4", "with out_shardings"),
        pytest.param("h100:4", "without", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", "with out_shardings", marks=pytest.mark.slow),
    ],
)
def test_a_replicated_leaf_stays_so(target, given):
    """On a v5e it did not compile, or took host temporaries and came out sharded."""
    chip = aot.Target(target)
    step, args = step_and_arguments(chip.mesh(), 2048)
    options = {"donate_argnums": (0, 1)}
    if given == "with out_shardings":
        options["out_shardings"] = jax.tree.map(lambda x: x.sharding, args[:2])
    compiled = aot.compile(step, *args, target=chip, **options)
    assert aot.peak(compiled).host_temporary_bytes == 0
    assert aot.host_computations(compiled) == ()
    _, state = compiled.output_shardings
    specs = {name: s.spec for name, s in state[0].mu.items()}
    assert specs == {name: x.sharding.spec for name, x in args[1][0].mu.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:state in host memory is replicated")
def test_values_and_shardings_when_it_runs():
    """On CPU devices, in a plain `jax.jit` without shardings, three times."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step, (params, state, x) = step_and_arguments(mesh, 64)
    keys = iter(jax.random.split(jax.random.key(0), 3))
    params = jax.tree.map(
        lambda s: jax.device_put(
            jax.random.normal(next(keys), s.shape) / 16, s.sharding
        ),
        params,
    )
    x = jax.device_put(jnp.arange(64), x.sharding)
    tx = optax.adam(1e-3)
    want = params, tx.init(params)
    got = params, oo.place(want[1], state)
    ours, plain = jax.jit(step), jax.jit(train_step(tx, loss))
    for _ in range(3):
        got, want = ours(*got, x), plain(*want, x)
    scale = got[1][0].mu["scale"].sharding
    assert (scale.spec, scale.memory_kind) == (P(), "pinned_host")
    assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jitted", ["eager", "jax.jit", "oo.jit", "oo.jit, fused"])
def test_host_state_that_jax_types_as_a_device_value(jitted):
    """As from a checkpoint restored onto one device (F28): it is where it has to be."""
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=64))

    def step(state, params, x):
        def loss(p):
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0])

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return state, optax.apply_updates(params, updates)

    run = {
        "eager": step,
        "jax.jit": jax.jit(step),
        "oo.jit": oo.jit(step, donate_argnums=(0, 1), fuse=False),
        "oo.jit, fused": oo.jit(step, donate_argnums=(0, 1)),
    }[jitted]
    params, x = jnp.full((3, 8, 8), 0.1), jnp.ones((4, 8))
    want = step(*step(tx.init(params), params, x), x)
    state = mistyped(tx.init(params))
    assert jax.typeof(state[0].mu).memory_space == jax.memory.Space.Device
    oo.memory_report(state, oo.Rule(".*", min_bytes=64)).check()
    got = run(state, params, x)
    assert got[0][0].mu.sharding.memory_kind == "pinned_host"
    assert_close(run(*got, x), want, rtol=1e-5, atol=0)


def test_such_state_in_a_loop_is_refused():
    """There nothing but its type says where it is; the message says what mends it."""
    tx = oo.offload(optax.trace(0.9), oo.Rule(".*", min_bytes=0))
    state = mistyped(on_host(optax.TraceState(jnp.ones((8, 8)))))

    @jax.jit
    def steps(state):
        def body(state, _):
            return tx.update(jnp.ones((8, 8)), state)[1], None

        return jax.lax.scan(body, state, length=2)[0]

    with pytest.raises(oo.MemoryKindError, match=r"place\(state, state\)"):
        steps(state)
    after = steps(oo.place(state, state))
    assert after.trace.sharding.memory_kind == "pinned_host"


def test_tangents_of_such_state():
    """They are beside it."""
    tx = oo.offload(optax.trace(0.9), oo.Rule(".*", min_bytes=0))
    params = jnp.ones((8, 8))
    state = mistyped(on_host(optax.TraceState(jnp.ones((8, 8)))))

    def new_trace(params, state):
        return tx.update(params, state)[1].trace

    primal, tangent = jax.jit(
        lambda p, s: jax.jvp(lambda p: new_trace(p, s), (p,), (p,))
    )(params, state)
    np.testing.assert_allclose(primal, 1.9)
    np.testing.assert_allclose(tangent, 1.0)
    members = jax.tree.map(lambda x: jnp.stack([x, x]), (params,))
    both = jax.jit(jax.vmap(new_trace, in_axes=(0, None)))(*members, state)
    np.testing.assert_allclose(both, np.full((2, 8, 8), 1.9))


@pytest.mark.parametrize("jitted", [jax.jit, oo.jit], ids=["jax.jit", "oo.jit"])
def test_state_that_is_replicated_beside_sharded_parameters(jitted):
    """One jit made both, with shardings of the parameters alone; told once."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=64))
    specs = {"w": P(None, None, "x"), "whole": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def init():
        params = {name: jnp.ones((4, 8, 8)) for name in specs}
        return params, tx.init(params)

    def step(params, state, x):
        def loss(p):
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]
            return jnp.sum(h) + jnp.sum(p["whole"])

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.jit(init, out_shardings=(shardings, None))()
    assert state[0].mu["w"].sharding.is_fully_replicated
    run, x = jitted(step), jnp.ones((2, 8))
    with pytest.warns(
        oo.OffloadWarning, match=r": '0/mu/w', '0/nu/w'\. .*place"
    ) as told:
        run(params, state, x)
    told = [w for w in told if "donates nothing" not in str(w.message)]
    assert len(told) == 1
    placed = oo.place(state, oo.eval_shape(tx.init, params))
    assert placed[0].mu["w"].sharding.spec == specs["w"]
    run(params, placed, x)


@pytest.mark.parametrize("codec", [None, "int8-companded"])
def test_state_made_in_a_jit_is_sharded_as_its_parameters(codec):
    """As without a jit; XLA would replicate it, and so would all later updates."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"w": P(None, None, "x"), "v": P("x"), "whole": P()}
    params = {
        name: jax.device_put(jnp.ones((4, 8, 512)), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    tx = oo.offload(optax.adam(0.1), oo.Rule(".*", min_bytes=64, codec=codec))
    got, want = jax.jit(tx.init)(params), tx.init(params)
    for (keys, x), y in zip(
        jax.tree_util.tree_flatten_with_path(got)[0],
        jax.tree.leaves(want),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.memory_kind == y.sharding.memory_kind, keys
        assert not x.ndim or x.sharding.is_equivalent_to(y.sharding, x.ndim), keys
