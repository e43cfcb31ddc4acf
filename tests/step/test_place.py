"""`place`: after a loader that forgets memory kinds, every leaf where it belongs."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from harness import mesh_of
from jax.experimental.array_serialization import serialization
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

RULES = ".*/(mu|nu)/.*"
# Of float32: the kernel is 128 KiB, and the bias, of 512 bytes, is under `min_bytes`.
SHAPES = {"dense": {"kernel": (256, 128), "bias": (128,)}}
TX = oo.offload(optax.adam(1e-3), RULES)


def make(key=0):
    """Parameters and their optimizer's state."""
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(key), len(shapes))
    params = jax.tree.unflatten(treedef, list(map(jax.random.normal, keys, shapes)))
    return {"params": params, "opt_state": TX.init(params)}


@functools.lru_cache
def shardings(devices):
    """Of the whole state, on one device or sharded over several."""
    if devices == 1:
        return jax.tree.map(lambda x: x.sharding, oo.eval_shape(make))
    specs = jax.tree.map(lambda x: P("x") if x.ndim == 2 else P(), jax.eval_shape(make))
    return oo.state_shardings(make, shardings=specs, mesh=mesh_of(devices))


@functools.lru_cache
def state_of(devices):
    """The state, where its shardings say."""
    return jax.jit(make, out_shardings=shardings(devices))()


def places(tree):
    """Shapes, dtypes, kinds and shards of all leaves."""
    return [
        (x.shape, x.dtype, x.sharding.memory_kind, x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(tree)
    ]


def by_numpy(state, tmp_path):
    """As Equinox's ``tree_deserialise_leaves`` and pickles give it."""
    (tmp_path / "state").write_bytes(pickle.dumps(jax.device_get(state)))
    return pickle.loads((tmp_path / "state").read_bytes())


def by_arrays(state, tmp_path):
    """As Equinox gives it for a template of arrays: on the first device."""
    return jax.tree.map(jnp.asarray, by_numpy(state, tmp_path))


def by_plain_shardings(state, tmp_path):
    """As loaders give it that know shardings and no kinds."""
    del tmp_path
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), state
    )


def by_array_serialization(state, tmp_path):
    """JAX's own, which raises for arrays in host memory, both ways."""
    leaves, structure = jax.tree.flatten(by_plain_shardings(state, tmp_path))
    paths = [str(tmp_path / str(i)) for i in range(len(leaves))]
    specs = [serialization.get_tensorstore_spec(path) for path in paths]
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize(leaves, specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    loaded = manager.deserialize([x.sharding for x in leaves], specs)
    return jax.tree.unflatten(structure, loaded)


LOADERS = [by_numpy, by_arrays, by_plain_shardings, by_array_serialization]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("like", ["template", "shardings", "state"])
def test_after_loaders(loader, devices, like, tmp_path):
    """Shapes, dtypes, kinds, shards and bits are those of the state saved."""
    state = state_of(devices)
    loaded = loader(state, tmp_path)
    belongs = {
        "template": oo.eval_shape(make, out_shardings=shardings(devices)),
        "shardings": shardings(devices),
        "state": state,
    }[like]
    got = oo.place(loaded, belongs)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert places(got) == places(state)
    jax.tree.map(np.testing.assert_array_equal, got, state)
    jax.make_jaxpr(TX.update)(got["params"], got["opt_state"])  # It warns of nothing.


@pytest.mark.parametrize("devices", [1, 4])
def test_by_rules(devices, tmp_path):
    """With `min_bytes` as `offload` applies them; arrays keep their sharding."""
    state = state_of(devices)
    loaded = by_plain_shardings(state, tmp_path)
    got = oo.place(loaded, RULES, under="opt_state")
    assert places(got) == places(state)
    oo.memory_report(got, RULES, under="opt_state").check()
    alone = oo.place(loaded["opt_state"], [oo.Rule(RULES)])
    assert places(alone) == places(state["opt_state"])
    assert got["params"]["dense"]["kernel"] is loaded["params"]["dense"]["kernel"]


def test_numpy_by_rules(tmp_path):
    """Moments that were loaded go like their parameters, which are arrays."""
    state = state_of(4)
    loaded = by_numpy(state["opt_state"], tmp_path)
    got = oo.place(state | {"opt_state": loaded}, RULES, under="opt_state")
    assert places(got) == places(state)
    alone = oo.place(loaded, oo.OffloadConfig([oo.Rule(RULES)]))
    assert alone[0].mu["dense"]["kernel"].sharding.memory_kind == "pinned_host"
    assert alone[0].count.sharding.memory_kind == "device"


def test_leaves_in_place_are_returned():
    """The same objects: nothing is copied."""
    for like in (shardings(4), state_of(4)):
        got = oo.place(state_of(4), like)
        assert all(map(lambda x, y: x is y, *map(jax.tree.leaves, (got, state_of(4)))))
    got = oo.place(state_of(4)["opt_state"], RULES)
    want = state_of(4)["opt_state"]
    assert all(map(lambda x, y: x is y, *map(jax.tree.leaves, (got, want))))


def test_back_to_the_device():
    """Where the template says so: from with offload to without."""
    plain = optax.adam(1e-3)
    params = state_of(4)["params"]
    got = oo.place(state_of(4)["opt_state"], oo.eval_shape(plain.init, params))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(got)} == {"device"}
    assert got[0].mu["dense"]["kernel"].sharding.spec == P("x")


def test_one_leaf_after_the_other(monkeypatch):
    """A leaf is there before the next is begun."""
    under_way, most = set(), [0]
    put, wait = jax.device_put, type(jnp.ones(1)).block_until_ready

    def counted_put(x, *args, **kwargs):
        moved = put(x, *args, **kwargs)
        under_way.add(id(moved))
        most[0] = max(most[0], len(under_way))
        return moved

    def counted_wait(x):
        under_way.discard(id(x))
        return wait(x)

    loaded = by_plain_shardings(state_of(4), None)
    monkeypatch.setattr(jax, "device_put", counted_put)
    monkeypatch.setattr(type(jnp.ones(1)), "block_until_ready", counted_wait)
    oo.place(loaded, shardings(4))
    assert most == [1]


def test_arrays_traced_as_on_the_device():
    """As Orbax makes them on one device: in host memory, and typed as if not."""
    at = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(np.ones((256, 128), np.float32), at)
    wrong = jax.make_array_from_single_device_arrays(x.shape, at, [x])
    assert jax.typeof(wrong).memory_space == jax.memory.Space.Device
    for like in (at, ".*"):
        got = oo.place(wrong, like)
        assert jax.typeof(got).memory_space == jax.memory.Space.Host


def test_numbers_and_what_is_no_array():
    """A Python counter becomes what the template has; functions stay."""
    state = {"step": 3, "fn": jnp.tanh, "w": np.ones(3, np.float32), "old": 1}
    step = jax.jit(lambda: 1)()  # Weakly typed, as a jitted step returns a counter.
    like = {"step": step, "fn": jnp.tanh, "w": jnp.ones(3), "old": 1}
    got = oo.place(state, like)
    assert (int(got["step"]), got["step"].weak_type) == (3, step.weak_type)
    assert isinstance(got["w"], jax.Array)
    assert (got["fn"], got["old"]) == (jnp.tanh, 1)
    state = {"step": 3, "fn": jnp.tanh, "w": np.ones(3, np.float32)}
    got = oo.place(state, oo.Rule("w", min_bytes=0))
    assert (got["step"], got["fn"]) == (3, jnp.tanh)
    assert got["w"].sharding.memory_kind == "pinned_host"


def test_random_keys():
    """They stay on the device, as the rules have it, or go where shardings say."""
    key = jax.random.key(0)
    assert oo.place({"key": key}, oo.Rule("key", min_bytes=0))["key"] is key
    there = key.sharding.with_memory_kind("pinned_host")
    got = oo.place(key, there)
    assert got.sharding.memory_kind == "pinned_host"
    assert oo.place(got, there) is got


def test_a_prefix_and_none():
    """A sharding for a part of the tree; None leaves a part as it is."""
    state = jax.device_get(state_of(1))
    host = NamedSharding(mesh_of(), P(), memory_kind="pinned_host")
    got = oo.place(state, {"params": None, "opt_state": host})
    assert isinstance(got["params"]["dense"]["kernel"], np.ndarray)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got["opt_state"])}
    assert kinds == {"pinned_host"}


def test_boxes():
    """A template with Flax's boxes fits a state with them and without."""
    boxed = {"w": nn.Partitioned(jnp.ones((256, 128)), ("x", None))}
    template = oo.eval_shape(TX.init, boxed)
    loaded = jax.device_get(TX.init(boxed))
    for state in (loaded, nn.unbox(loaded)):
        got = nn.unbox(oo.place(state, template))
        assert got[0].mu["w"].sharding.memory_kind == "pinned_host"


def test_differences_are_all_named():
    """Shapes and dtypes, of every leaf that has others."""
    state = jax.device_get(state_of(1))
    state["params"]["dense"]["kernel"] = np.ones((2, 3), np.float32)
    state["params"]["dense"]["bias"] = np.ones(128, np.float64)
    message = (
        "state and like differ in shape or dtype:\n"
        "  params/dense/bias: state has float64[128], like has float32[128]\n"
        "  params/dense/kernel: state has float32[2,3], like has float32[256,128]"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        oo.place(state, state_of(1))


def test_python_numbers_for_arrays():
    """A number is no vector."""
    with pytest.raises(ValueError, match=r": state has int\[\], like has float32\[3\]"):
        oo.place({"w": 3}, {"w": jnp.ones(3)})


def test_structures_that_differ():
    """The leaves that only one of them has."""
    message = r"(?s)only in like: b\n  only in state: c/d\n  only in state: e\nJAX says"
    with pytest.raises(ValueError, match=message):
        oo.place(
            {"a": np.ones(1), "c": {"d": np.ones(1)}, "e": np.ones(1)},
            {"a": jnp.ones(1), "b": jnp.ones(1)},
        )
    with pytest.raises(ValueError, match="array or struct stands where the state has"):
        oo.place({"a": {"b": np.ones(1), "c": np.ones(1)}}, {"a": jnp.ones(1)})


def test_containers_of_other_types():
    """As msgpack makes them of tuples."""
    like = (jnp.ones(1), jnp.ones(1))
    with pytest.raises(ValueError, match="containers are of other types"):
        oo.place([np.ones(1), np.ones(1)], like)


def test_templates_that_say_nothing():
    """`jax.eval_shape` forgets shardings, and specs name no devices."""
    struct = jax.eval_shape(lambda: jnp.ones(3))
    with pytest.raises(ValueError, match=r"'w'. Make it with optax_offload.eval_shape"):
        oo.place({"w": np.ones(3, np.float32)}, {"w": struct})
    with pytest.raises(TypeError, match=r"at 'w'. Make shardings with .*mesh=mesh"):
        oo.place({"w": np.ones(3, np.float32)}, {"w": P()})


def test_traced_values():
    """Within jit there is another call."""
    with pytest.raises(TypeError, match=r"'w': traced.*use optax_offload.set_memory"):
        jax.jit(lambda x: oo.place({"w": x}, ".*"))(jnp.ones(3))


def test_leaves_on_disk(tmp_path):
    """They come back first."""
    pytest.importorskip("tensorstore")
    state = oo.offload_states(
        {"w": jnp.ones(3)}, memory_kind="disk", directory=str(tmp_path / "disk")
    )
    with pytest.raises(ValueError, match=r"'w': on disk. Bring them back first"):
        oo.place(state, ".*")


def test_under():
    """It goes with rules, and has to name a part of the tree."""
    with pytest.raises(ValueError, match="says where the paths of rules begin"):
        oo.place(state_of(1), state_of(1), under="opt_state")
    with pytest.raises(ValueError, match=r"under='opt': no leaf is there\. Nearest"):
        oo.place(state_of(1), RULES, under="opt")
    with pytest.raises(ValueError, match="matches no leaf"):
        oo.place(state_of(1), ".*/trace/.*")
    chain = {"opt_state": (optax.EmptyState(), optax.adam(1.0).init(jnp.ones(3)))}
    with pytest.raises(ValueError, match="does below 'opt_state/1': give under='opt_s"):
        oo.place(chain, r"\d+/(mu|nu)", under="opt_state")


@pytest.mark.parametrize("like", [{"head": "pinned_host"}, [("head", "cpu")]])
def test_memory_kinds_by_leaf_are_no_rules(like):
    """Not left undone."""
    with pytest.raises(TypeError, match=r"which is no place\. Give rules"):
        oo.place({"head": jnp.ones(4)}, like)


def test_parameters_that_are_all_too_small_warn():
    """As state that is."""
    params = {"layers": {"w": jnp.ones((8, 8))}, "head": jnp.ones((256, 128))}
    told = r"nothing moves to host memory\. .*under 64.00 KiB \(rule 0 'layers.*'\)"
    with pytest.warns(oo.OffloadWarning, match=told):
        oo.place(params, "layers.*")
    with pytest.warns(oo.OffloadWarning, match="1 leaf: under"):
        oo.place(params, ".*", under="layers")
    placed = oo.place(params, ".*")
    assert placed["layers"]["w"].sharding.memory_kind == "device"
