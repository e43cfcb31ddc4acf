"""New state is made row by row, each leaf where its parameter is."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import quick_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload._program import trace
from optax_offload._schedule import schedule

SIX_BYTES = [
    oo.Rule(r".*/(mu|nu)/.*", codec="int8"),
    oo.Rule(r"(.*/)?master/.*", codec="bfloat16-remainder"),
]
INITS = {"eager": lambda f: f, "jax.jit": jax.jit, "oo.jit": oo.jit}


def _small(dtype=jnp.bfloat16):
    """Large enough that leaves are cut, also into rows that no slice divides."""
    shapes = {"layers": (6, 64, 2048), "embed": (2113, 2048), "bias": (64,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@pytest.mark.parametrize(
    ("at_rest", "how"),
    quick_of(
        itertools.product(["nothing", "layers", ".*"], INITS),
        {("layers", "jax.jit"), (".*", "oo.jit")},
    ),
)
def test_state_made_by_rows_is_the_state(how, at_rest):
    """Codes, scales, remainders and copies, of parameters wherever they rest."""
    inner = oo.master_weights(optax.contrib.schedule_free_adamw(1e-3))
    in_codes = [oo.Rule(r".*/nu/.*", codec="int8"), SIX_BYTES[1]]
    rules = [*in_codes, oo.Rule(r".*/z/.*")]
    params = _small()
    plain = jax.jit(oo.low_bit(inner, in_codes, None).init)(params)
    if at_rest != "nothing":
        params = oo.set_memory_kind(params, at_rest, "pinned_host")
    state = INITS[how](oo.offload(inner, rules).init)(params)
    oo.memory_report(state, rules).check()
    assert jax.tree.structure(state) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, state, plain)


@pytest.mark.parametrize("how", INITS)
@pytest.mark.parametrize("params", [None, {}])
def test_state_of_no_parameters(how, params):
    """Traced or not, nothing says on which devices it is."""
    inner = optax.scale_by_schedule(lambda count: 0.1 * count)
    state = INITS[how](oo.offload(inner).init)(params)
    jax.tree.map(np.testing.assert_array_equal, state, inner.init(params))


@pytest.mark.parametrize("at_rest", [True, False])
def test_slices_of_new_state_wait_for_each_other(at_rest):
    """They read no buffer that the slice before was written into."""
    params = _small()
    inner = oo.low_bit(oo.master_weights(optax.adamw(1e-3)), SIX_BYTES, None)
    config = oo.OffloadConfig((oo.Rule(".*", min_bytes=0),))
    update, _ = trace(lambda p: ((), inner.init(p)), config, (params,), ())
    update = update.with_inputs_on_host({0, 1, 2} if at_rest else ())
    loops = schedule(update, 2 * MIB).loops
    assert any(loop.unroll > 1 for loop in loops)
    for loop in loops:
        (group,) = loop.groups
        assert group.makes
        after = [step.load_after for step in loop.steps]
        assert after == [(), *[group.outputs] * (loop.unroll - 1)]


def _peaks(shape, at_rest, chip="h100"):
    """The peaks of making three and nine such leaves in six bytes, less arguments."""
    inner = oo.master_weights(optax.adamw(1e-3))
    tx = oo.offload(inner, SIX_BYTES, window_bytes=32 * MIB)
    peaks = []
    for count in (3, 9):
        params = {
            f"w{i}": jax.ShapeDtypeStruct(shape, jnp.bfloat16) for i in range(count)
        }
        if at_rest:
            params = oo.set_memory_kind(params, ".*", "pinned_host")
        peak = aot.peak(aot.compile(oo.jit(tx.init), params, target=aot.Target(chip)))
        assert not peak.host_temporary_bytes
        peaks.append(peak.peak_bytes - peak.argument_bytes)
    return peaks


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize(
    ("shape", "at_rest"),
    quick_of(
        itertools.product([(4, 2048, 4096), (8192, 4096), (2048, 2048)], [True, False]),
        {((4, 2048, 4096), True)},
    ),
)
def test_making_state_takes_rows(shape, at_rest):
    """However many leaves there are, stacked, large, or small."""
    few, many = _peaks(shape, at_rest)
    assert many <= 128 * MIB
    assert many <= few + 64 * MIB


def _mixed(mesh, other):
    """A parameter on the mesh, and one that is elsewhere or nowhere."""
    value = np.ones((256, 256), np.float32)
    others = {
        "mesh": lambda: jax.device_put(value, NamedSharding(mesh, P(None, "x"))),
        "uncommitted": lambda: jnp.asarray(value),
        "numpy": lambda: value,
        "committed": lambda: jax.device_put(value, jax.devices()[0]),
    }
    on_mesh = jax.device_put(value, NamedSharding(mesh, P("x")))
    return {"a": on_mesh, "b": others[other]()}


def _step(tx):
    """A step that needs no model."""

    def step(params, state):
        grads = jax.tree.map(lambda p: 0.1 * p + 1, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _two_updates(step, init, params):
    """Where new state is, and what two steps make of it; or JAX's error."""
    state = init(params)
    mu = state[0].mu
    try:
        for _ in range(2):
            params, state = step(params, state)
    except ValueError as e:
        return mu, str(e)[:100]
    return mu, {k: (p.sharding, np.asarray(p)) for k, p in params.items()}


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        *((1, ".*"), (2, ".*"), (2, ".*/(mu|nu)/a")),
        pytest.param(4, ".*", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_set", [False, True], ids=["no mesh set", "mesh set"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_state_is_where_its_parameter_is(devices, axes, is_set, rule):
    """Whatever mixture parameters are, made and updated as with plain optax."""
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(axes,))
    plain, tx = optax.adam(1e-3), oo.offload(optax.adam(1e-3), rule)
    plain_step, step = jax.jit(_step(plain)), oo.jit(_step(tx))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for other in ("mesh", "uncommitted", "numpy", "committed"):
            params = _mixed(mesh, other)
            of_plain, expected = _two_updates(plain_step, plain.init, params)
            apart = other == "committed" and devices > 1  # No jit takes both.
            for how in ("eager",) if apart else INITS:
                mu, after = _two_updates(step, INITS[how](tx.init), params)
                assert mu["a"].sharding.memory_kind == "pinned_host"
                if how == "eager":
                    _check_sharded_alike(mu["a"], of_plain["a"])
                    if not isinstance(of_plain["b"].sharding, NamedSharding):
                        assert mu["b"].is_fully_replicated
                    else:
                        _check_sharded_alike(mu["b"], of_plain["b"])
                jax.tree.map(np.testing.assert_array_equal, after, expected)


def _check_sharded_alike(x, like):
    assert x.sharding.with_memory_kind("device").is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.parametrize(
    ("axes", "how"),
    quick_of(
        itertools.product([AxisType.Auto, AxisType.Explicit], INITS),
        {(AxisType.Auto, "eager"), (AxisType.Explicit, "oo.jit")},
    ),
)
def test_rows_are_sharded_as_their_parameter(axes, how):
    """Codes, scales and remainders, made of rows that rest on the host."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axes,))
    specs = {"layers": P(None, "x"), "embed": P(None, "x")}
    params = {name: x for name, x in _small().items() if name in specs}
    params = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in params.items()
    }
    inner = oo.master_weights(optax.adamw(1e-3))
    plain = oo.low_bit(inner, SIX_BYTES, None).init(params)
    params = oo.set_memory_kind(params, ".*", "pinned_host")
    state = INITS[how](oo.offload(inner, SIX_BYTES).init)(params)
    jax.tree.map(np.testing.assert_array_equal, state, plain)
    master, like = state.master["layers"], plain.master["layers"]
    _check_sharded_alike(master.codes, like.codes)
    nu, like = state.inner_state[0].nu, plain.inner_state[0].nu
    for name in specs:
        _check_sharded_alike(nu[name].codes, like[name].codes)
        _check_sharded_alike(nu[name].scales, like[name].scales)


def test_state_of_parameters_on_two_meshes():
    """As for the stages of a pipeline: each leaf is where plain optax has it."""
    first, second = (
        jax.sharding.Mesh(np.array(jax.devices()[i : i + 2]), ("x",)) for i in (0, 2)
    )
    value = np.arange(2.0**16, dtype=np.float32).reshape(256, 256)
    params = {
        "a": jax.device_put(value, NamedSharding(first, P("x"))),
        "b": jax.device_put(value, NamedSharding(second, P("x"))),
    }
    inner = optax.contrib.schedule_free_adamw(1e-3)
    state, plain = oo.offload(inner).init(params), inner.init(params)
    for name in params:
        _check_sharded_alike(state.z[name], plain.z[name])
        assert state.z[name].sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(state.z[name], plain.z[name])


def test_templates_of_mixed_parameters():
    """A template says of what is uncommitted that it is on the mesh, as a step does."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    tx = oo.offload(optax.adam(1e-3))
    params = _mixed(mesh, "uncommitted")
    template = oo.eval_shape(tx.init, params)
    assert template[0].mu["b"].sharding.spec == P()
    state = oo.place(jax.device_get(tx.init(params)), template)
    jax.jit(tx.update)(params, state, params)


def test_state_sharded_otherwise_than_its_parameter():
    """In Explicit mode the first update gives it the type of its gradient."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    tx = oo.offload(optax.adam(1e-3))
    params = _mixed(mesh, "mesh")
    state = tx.init(params)
    state = jax.device_put(
        state,
        jax.tree.map(
            lambda x: NamedSharding(mesh, P(), memory_kind=x.sharding.memory_kind),
            state,
        ),
    )
    with pytest.warns(oo.OffloadWarning, match="state in host memory is replicated"):
        _, new = oo.jit(tx.update)(params, state, params)
    _, plain = jax.jit(optax.adam(1e-3).update)(params, optax.adam(1e-3).init(params))
    np.testing.assert_array_equal(new[0].nu["a"], plain[0].nu["a"])
    assert new[0].nu["a"].sharding.spec == P("x", None)


def _unpinned(tree):
    return oo.set_memory_kind(tree, ".*", "unpinned_host")


@pytest.mark.parametrize("how", INITS)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_unpinned_host_is_refused(how, on_mesh):
    """What no compiled step can name is refused, as `check` does, in all ways."""
    tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
    params = {"w": jnp.ones((256, 256))}
    if on_mesh:
        params = jax.device_put(params, NamedSharding(jax.make_mesh((2,), "x"), P("x")))
    state = tx.init(params)
    update = INITS[how](tx.update)
    message = "in unpinned_host, and given to update or init: 'state/0/mu/w', 'state/0/"
    with pytest.raises(oo.MemoryKindError, match=message):
        update(params, oo.set_memory_kind(state, ".*/w", "unpinned_host"), params)
    report = oo.memory_report(_unpinned(state), ".*/(mu|nu)/.*")
    with pytest.raises(oo.MemoryKindError, match="planned pinned_host, is unpinned_h"):
        report.check()
    with pytest.raises(oo.MemoryKindError, match=r"'params/w'.*reload_states\(tree\)"):
        update(params, state, _unpinned(params))
    with pytest.raises(oo.MemoryKindError, match="init: 'params/w'"):
        INITS[how](tx.init)(_unpinned(params))


def test_unpinned_state_is_moved_if_asked():
    """For a first step, as state on the device is."""
    tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*", on_misplaced="move")
    params = {"w": jnp.ones((256, 256))}
    state = oo.set_memory_kind(tx.init(params), ".*/w", "unpinned_host")
    with pytest.warns(oo.OffloadWarning, match="in unpinned_host: '0/mu/w', '0/nu/w'"):
        _, new = jax.jit(tx.update)(params, state, params)
    oo.memory_report(new, ".*/(mu|nu)/.*").check()


@pytest.mark.newest
def test_unpinned_parameters_are_refused_by_a_streamed_step():
    """Which takes rows of them in a scan."""
    params = {"layers": jnp.ones((4, 64, 64))}
    mesh = jax.make_mesh((2,), "x")
    params = _unpinned(jax.device_put(params, NamedSharding(mesh, P(None, "x"))))

    @oo.jit(residuals="host")
    def step(params, x):
        def loss(params):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            return jnp.sum(jax.lax.scan(layer, x, params["layers"])[0])

        return jax.grad(loss)(params)

    with pytest.raises(oo.MemoryKindError, match=r"argument 0 of the step, .* is in u"):
        step(params, jnp.ones((512, 64)))
