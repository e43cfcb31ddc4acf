"""`set_memory_kind` and `eval_shape`, on everything that has a memory kind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo


def mesh_of(devices, axis_type=AxisType.Auto):
    return jax.make_mesh((devices,), ("x",), axis_types=(axis_type,))


def leaf_makers():
    sharded = NamedSharding(mesh_of(4), P("x"))
    single = SingleDeviceSharding(jax.devices()[0])
    return {
        "array": jax.device_put(jnp.ones(8), single),
        "sharded array": jax.device_put(jnp.ones(8), sharded),
        "struct": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=single),
        "sharded struct": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharded),
        "sharding": single,
        "named sharding": sharded,
    }


def sharding_of(x):
    return x if isinstance(x, jax.sharding.Sharding) else x.sharding


@pytest.mark.parametrize("name", sorted(leaf_makers()))
def test_kinds_can_be_set_again_and_again(name):
    """Other patterns, other kinds, and back; what does not match is not touched."""
    leaf = leaf_makers()[name]
    tree = {"mu": {"w": leaf}, "nu": {"w": leaf}}
    for kind in ("pinned_host", "unpinned_host", "device"):
        tree = oo.set_memory_kind(tree, "mu/.*", kind)
        assert sharding_of(tree["mu"]["w"]).memory_kind == kind
        assert tree["nu"]["w"] is leaf
        assert sharding_of(tree["mu"]["w"]).device_set == sharding_of(leaf).device_set
        if isinstance(leaf, jax.Array):
            np.testing.assert_array_equal(tree["mu"]["w"], leaf)


def test_array_in_place_is_not_touched():
    """No transfer and no copy."""
    x = oo.set_memory_kind(jnp.ones(3), "", "pinned_host")
    assert oo.set_memory_kind(x, ".*", "pinned_host") is x


def test_traced_values_move():
    """Under jit the type changes."""
    move = jax.jit(lambda x: oo.set_memory_kind(x, ".*", "pinned_host"))
    assert move(jnp.ones(3)).sharding.memory_kind == "pinned_host"
    with pytest.raises(ValueError, match="under jit its memory kind can be 'device'"):
        jax.jit(lambda x: oo.set_memory_kind(x, ".*", "unpinned_host"))(jnp.ones(3))


def test_struct_without_sharding_gets_one():
    """As `jax.eval_shape` makes them."""
    struct = jax.eval_shape(lambda: jnp.zeros(3))
    got = oo.set_memory_kind(struct, ".*", "pinned_host")
    assert got.sharding.memory_kind == "pinned_host"


def test_nothing_matches():
    """The error lists near paths."""
    with pytest.raises(ValueError, match="pattern 'nuu' matches no leaf"):
        oo.set_memory_kind({"nu": jnp.ones(1)}, "nuu", "pinned_host")


def test_unknown_kind():
    """The kinds there are."""
    with pytest.raises(ValueError, match="memory_kind is 'host'; it must be one of"):
        oo.set_memory_kind(jnp.ones(1), ".*", "host")


def test_leaves_without_a_kind():
    """All of them are named."""
    tree = {"step": 3, "w": np.ones(1), "x": jnp.ones(1)}
    message = r"also matches 'step' \(int\), 'w' \(ndarray\)\. Narrow the pattern"
    with pytest.raises(TypeError, match=message):
        oo.set_memory_kind(tree, ".*", "pinned_host")


def test_device_without_such_memory(monkeypatch):
    """The leaf is named beside what JAX says."""
    x = jnp.ones(1)
    monkeypatch.setattr(
        type(x.sharding),
        "with_memory_kind",
        lambda self, kind: (_ for _ in ()).throw(ValueError("no such memory")),
    )
    with pytest.raises(ValueError, match="'w' cannot be put into 'pinned_host' with"):
        oo.set_memory_kind({"w": x}, ".*", "pinned_host")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_template_has_shardings_and_kinds(axis_type):
    """Moments like their parameters, the counter replicated."""
    sharding = NamedSharding(mesh_of(4, axis_type), P("x"))
    params = {"w": jax.device_put(jnp.ones((256, 128)), sharding)}
    tx = oo.offload(optax.adam(1e-3))
    template = oo.eval_shape(tx.init, params)
    mu = template[0].mu["w"].sharding
    assert (mu.spec, mu.memory_kind) == (P("x"), "pinned_host")
    count = template[0].count.sharding
    assert count.is_fully_replicated
    assert count.memory_kind == "device"


@pytest.mark.parametrize("devices", [1, 4])
def test_template_is_traced_as_on_the_host(devices):
    """So that a step lowered from it is the step that will run."""
    sharding = NamedSharding(mesh_of(4), P("x"))
    if devices == 1:
        sharding = SingleDeviceSharding(jax.devices()[0])
    params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)}
    tx = oo.offload(optax.adam(1e-3))
    template = oo.eval_shape(tx.init, params)
    lowered = jax.jit(tx.update).lower(params, template, params)
    _, out_state = lowered.compile().output_shardings
    assert out_state[0].mu["w"].memory_kind == "pinned_host"
    # With the state taken for a device value this would have warned.
    jax.make_jaxpr(tx.update)(params, template, params)
