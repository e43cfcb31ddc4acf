"""`set_memory_kind`, on everything that has a memory kind."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._places import memory


def leaf_makers():
    """Everything that has a memory kind, by name."""
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
    """A leaf's sharding, or the sharding itself."""
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


def test_a_pattern_matches_an_encoded_leaf():
    """By its own path, which moves all its parts, and by theirs, as rules do."""
    made = oo.place({"w": jnp.ones((256, 512))}, oo.Rule("w", "device", codec="nf4"))
    for pattern, kinds in [("w", 2 * ["pinned_host"]), ("w/s.*", ["device", "pinned"])]:
        moved = oo.set_memory_kind(made, pattern, "pinned_host")
        parts = jax.tree.leaves(moved)
        assert all(
            x.sharding.memory_kind.startswith(kind)
            for x, kind in zip(parts, kinds, strict=True)
        )


def test_unknown_kind():
    """The kinds there are."""
    with pytest.raises(ValueError, match="memory_kind is 'host'; it must be 'pinned"):
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


@pytest.mark.parametrize("right", [False, True])
def test_positions_that_no_compiler_follows(right, monkeypatch):
    """A GPU's compiler does not know them where it would take others (U10)."""
    monkeypatch.setattr(compat, "COPIES_AT_POSITIONS", right)
    traced = jax.jit(lambda i: memory.positions()(7 - i)).trace(jnp.int32(0))
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        unknown = "optimization_barrier" in text
        assert unknown == (platform == "cuda" and not right), platform


def test_partition_specs_have_no_kind():
    """They name no devices; the remedy is a sharding, not an array."""
    message = (
        r"also matches 'w' \(P(artitionSpec)?\)\. Narrow the pattern, or give jax\."
        r"NamedSharding\(mesh, spec\) for each PartitionSpec, which names no devices$"
    )
    with pytest.raises(TypeError, match=message):
        oo.set_memory_kind({"w": P("x")}, ".*", "pinned_host")
    message = r"for each PartitionSpec, .* devices, or make values arrays with jnp\.as"
    with pytest.raises(TypeError, match=message):
        oo.set_memory_kind({"w": P("x"), "step": 3}, ".*", "pinned_host")


@pytest.mark.parametrize("pattern", [".*", re.compile(".*b")])
def test_paths_with_a_newline(pattern):
    """A dot matches a newline, in the user's own compiled pattern too."""
    tree = oo.set_memory_kind({"a\nb": jnp.ones(3)}, pattern, "pinned_host")
    assert tree["a\nb"].sharding.memory_kind == "pinned_host"


def test_leaves_on_disk_are_not_moved():
    """What stands for a leaf on disk says so itself, and has no kind to change."""

    class Place(jax.ShapeDtypeStruct):
        memory_kind = "disk"

    tree = {"w": Place((3,), jnp.float32)}
    with pytest.raises(ValueError, match=r"'w': on disk\. Bring them back first, with"):
        oo.set_memory_kind(tree, "w", "pinned_host")


def type_of(shape, spec, axis_type, sizes=(2, 4)):
    """The type of a float32 array on a mesh of two axes."""
    types = (axis_type,) * 2
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model"), axis_types=types)
    sharding = NamedSharding(mesh, spec)
    return jax.typeof(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


@pytest.mark.parametrize(
    ("shape", "spec", "axis_type", "nbytes", "axis"),
    [
        # What Auto mode does not tell: sharded over all, by its last axes.
        ((16, 8), P("data"), AxisType.Auto, 64, None),
        ((16, 8), P(), AxisType.Auto, 64, None),
        ((4, 16, 8), P(), AxisType.Auto, 256, 0),
        ((3,), P(), AxisType.Auto, 2, None),
        ((), P(), AxisType.Auto, 1, None),
        ((16, 8), P(), AxisType.Explicit, 512, 0),
        ((16, 8), P("data"), AxisType.Explicit, 256, 1),
        ((16, 8), P(("data", "model")), AxisType.Explicit, 64, 1),
        ((16, 8), P("data", "model"), AxisType.Explicit, 64, None),
        ((4, 16, 8), P(None, "model"), AxisType.Explicit, 512, 0),
    ],
)
def test_what_a_type_says_of_its_parts(shape, spec, axis_type, nbytes, axis):
    """The bytes on each device, and the axis along which every part can be sliced."""
    found = type_of(shape, spec, axis_type)
    assert memory.nbytes_on_each_device(found) == nbytes
    assert memory.decoded_nbytes_on_each_device(found, True) == 4 * nbytes
    assert memory.slice_axis(found) == axis
    alone = type_of(shape, P(), axis_type, sizes=(1, 1))
    assert memory.nbytes_on_each_device(alone) == memory.nbytes(found)
    assert memory.slice_axis(alone) == (0 if shape else None)


def test_pinned_bytes_are_those_of_all_devices():
    """A replicated leaf has a copy for each of them, which is counted once."""
    before = memory.pinned_bytes_of_this_process()
    arrays = []
    for spec, nbytes in ((P("x"), 4096), (P(), 4 * 4096)):
        sharding = NamedSharding(mesh_of(4), spec, memory_kind="pinned_host")
        arrays.append(jax.device_put(np.ones(1024, np.float32), sharding))
        for _ in range(3):
            assert memory.pinned_bytes_of_this_process() == before + nbytes
        before += nbytes


def test_random_keys_cannot_move():
    """Whatever has them in it: JAX traces them as on the device."""
    assert memory.movable_nbytes(jax.random.key(0)) is None
    assert memory.movable_nbytes(jnp.ones((2, 3))) == 24


@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_of_a_type_of_auto_mode_in_explicit_mode(devices):
    """As of a looked-up embedding: JAX itself gives it the mode of the mesh set."""
    of_auto = NamedSharding(mesh_of(devices).abstract_mesh, P(None, None))
    of = jax.typeof(jnp.ones((4, 2))).update(sharding=of_auto)
    with jax.set_mesh(mesh_of(devices, AxisType.Explicit)):
        found = jax.make_jaxpr(lambda: memory.full(of, 0.0))()
    assert found.out_avals == [of]
