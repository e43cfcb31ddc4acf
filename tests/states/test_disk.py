"""States on disk: there and back, one state in a directory, found by templates."""

import copy
import functools
import gc
import json
import os
import pickle
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from state_trees import (
    files,
    kinds,
    make_tree,
    on_device,
    steps,
    template_of,
    there_and_back,
)

import optax_offload as oo
from optax_offload._ground import file_system
from optax_offload._states import files as state_files
from optax_offload._states import locks, manifest, zarr

pytest.importorskip("tensorstore", reason="needs the extra disk")

to_disk = functools.partial(oo.offload_states, memory_kind="disk")


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("donate", [True, False])
def test_there_and_back(tmp_path, donate, block):
    """Every sort of leaf, bit for bit, in its sharding; the files are removed."""
    tree = make_tree()
    tree["host"] = oo.set_memory_kind(jnp.ones(3), "", "pinned_host")
    there_and_back(tree, donate, block, memory_kind="disk", directory=tmp_path)
    assert bool(files(tmp_path)) != donate


def test_the_report_shows_disk(tmp_path):
    """As a place, with the bytes that are there."""
    there = to_disk({"w": jnp.ones((2, 3)), "x": jnp.ones(3)}, "w", directory=tmp_path)
    report = oo.memory_report(there)
    assert report.totals == {"disk": 24, "device": 12}
    totals = [line.split()[:3] for line in str(report).splitlines()]
    assert ["total", "disk", "24"] in totals
    assert report.rows[0].dtype == "float32"


def test_from_another_process(tmp_path):
    """By a template: on another mesh, in another memory, in parts."""
    tree = make_tree()
    arrays = {k: x for k, x in tree.items() if isinstance(x, jax.Array)}
    before = bits(arrays)
    template = template_of(arrays)
    template["host"] = 4
    there = to_disk(arrays, directory=tmp_path, block=True)
    del there  # As if its process had ended.
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    other = NamedSharding(mesh, P("b", "a"), memory_kind="pinned_host")
    template["sharded"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other)
    part = oo.reload_states(template, "sharded|weak", directory=tmp_path, donate=False)
    assert part["sharded"].sharding == other
    assert part["weak"].weak_type
    np.testing.assert_array_equal(part["sharded"], np.arange(32.0).reshape(8, 4))
    back = oo.reload_states(template, directory=tmp_path)
    assert back.pop("host") == 4
    assert bits(back) == before
    assert not files(tmp_path)


def test_the_same_array_for_several_places(tmp_path):
    """One again where templates say one place, and otherwise each where it says."""
    x = on_device(jnp.arange(4.0))
    there = to_disk({"a": x, "b": x, "c": x}, directory=tmp_path, block=True)
    del there
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    places = {"a": x.sharding, "b": NamedSharding(mesh, P("x")), "c": x.sharding}
    template = {
        name: jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place)
        for name, place in places.items()
    }
    back = oo.reload_states(template, directory=tmp_path)
    assert {name: leaf.sharding for name, leaf in back.items()} == places
    assert back["a"] is back["c"]
    np.testing.assert_array_equal(back["b"], np.arange(4.0))


@pytest.mark.accelerator
def test_cycles_between_steps_change_no_bit(tmp_path):
    """With the optimizer offloaded inside: it comes back to the host."""

    def cycle(state):
        there = to_disk(state, directory=tmp_path, block=False)
        assert set(kinds(there).values()) == {"disk"}
        return oo.reload_states(there)

    plain, _ = steps(lambda state: state)
    assert steps(cycle)[0] == plain
    assert not files(tmp_path)


def test_from_disk_to_host_and_back(tmp_path):
    """Where it was first is remembered."""
    there = to_disk({"w": jnp.ones(3)}, directory=tmp_path)
    there = oo.offload_states(there)
    assert kinds(there) == {"w": "pinned_host"}
    assert kinds(to_disk(there, directory=tmp_path)) == {"w": "disk"}
    there = to_disk(oo.offload_states({"w": jnp.ones(3)}), directory=tmp_path)
    assert kinds(oo.reload_states(there)) == {"w": "device"}


def test_leaves_in_place_are_not_touched(tmp_path):
    """On disk already; files are not written again."""
    there = to_disk({"w": jnp.ones(3), "n": 3}, directory=tmp_path, block=True)
    before = {file: file.stat().st_mtime_ns for file in files(tmp_path)}
    again = to_disk(there, directory=tmp_path)
    assert again["w"] is there["w"]
    assert before == {file: file.stat().st_mtime_ns for file in files(tmp_path)}
    with pytest.raises(ValueError, match="'w': on disk already, but not in"):
        to_disk(there, directory=tmp_path / "other")


def test_the_same_array_twice(tmp_path):
    """Written once."""
    x = jnp.ones(3)
    there = to_disk({"a": x, "b": x}, directory=tmp_path, block=True)
    assert there["a"] is there["b"]
    part = oo.reload_states(there, "b", donate=False)
    assert kinds(part) == {"a": "disk", "b": "device"}
    with pytest.warns(oo.OffloadWarning, match="'b': the same array is also a leaf"):
        part = oo.reload_states(there, "b")
    assert files(tmp_path)
    back = oo.reload_states(there)
    assert back["a"] is back["b"]
    assert not files(tmp_path)


def test_files_go_when_all_is_back(tmp_path):
    """Not before."""
    there = to_disk({"a": jnp.ones(3), "b": jnp.ones(4)}, directory=tmp_path)
    there = oo.reload_states(there, "a")
    assert files(tmp_path)
    there = oo.reload_states(there)
    assert not list(tmp_path.iterdir())


def test_large_leaves_are_many_files(tmp_path, monkeypatch):
    """Chunks divide shards; little is in flight at once."""
    monkeypatch.setattr(zarr, "MOST_CHUNK_BYTES", 64)
    monkeypatch.setattr(state_files, "MOST_BYTES_IN_FLIGHT", 128)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "x"))
    x = jnp.arange(7 * 12 * 5.0).reshape(7, 12, 5)
    tree = {"w": jax.device_put(x, sharding)}
    there = to_disk(tree, directory=tmp_path, block=True)
    assert len(files(tmp_path)) == 7 * 4 + 4
    np.testing.assert_array_equal(oo.reload_states(there)["w"], x)


@pytest.mark.parametrize(
    ("shard", "chunk"),
    [
        ((), []),
        ((0, 3), [1, 3]),
        ((4, 4), [4, 4]),
        ((64, 4), [4, 4]),
        ((7, 6), [1, 6]),
        ((2, 34), [1, 2]),
        ((37,), [1]),
        ((32,), [16]),
    ],
)
def test_chunks_divide_shards(monkeypatch, shard, chunk):
    """So that no chunk is in two shards."""
    monkeypatch.setattr(zarr, "MOST_CHUNK_BYTES", 64)
    assert zarr.chunk_shape(shard, 4) == tuple(chunk)


def test_directory_in_use(tmp_path):
    """Of two models, neither overwrites the other."""
    there = to_disk({"w": jnp.ones(3)}, directory=tmp_path)
    with pytest.raises(ValueError, match="give each state a directory of its own"):
        to_disk({"w": jnp.zeros(3)}, directory=tmp_path)
    np.testing.assert_array_equal(oo.reload_states(there)["w"], np.ones(3))


def test_directory_is_held_where_states_appear_and_go(tmp_path, monkeypatch):
    """So that another process neither sees half a state nor removes one twice."""
    held = []

    def noting(step, fn):
        def noted(*args, **kw):
            descriptor = locks.acquire(tmp_path / "lock")
            held.append((step, descriptor is None))
            if descriptor is not None:
                os.close(descriptor)
                (tmp_path / "lock").unlink()
            return fn(*args, **kw)

        return noted

    for step, module, name in [
        ("look", manifest, "states_in"),
        ("create", zarr, "open_array"),
        ("commit", manifest, "write"),
        ("remove", shutil, "rmtree"),
    ]:
        monkeypatch.setattr(module, name, noting(step, getattr(module, name)))
    (tmp_path / "state-0123456789abcdef").mkdir()  # Left half way.
    there = to_disk({"w": jnp.ones(3)}, directory=tmp_path, block=True)
    writing, held[:] = held[:], []
    oo.reload_states(there)
    assert writing == [
        ("look", True),
        ("remove", True),
        ("create", True),
        ("commit", True),
        ("look", True),
    ]
    assert held == [("create", False), ("remove", True)]  # The first one opens it.
    assert not files(tmp_path)


def test_directory_that_another_holds(tmp_path, monkeypatch):
    """It is waited for; and not for ever."""
    monkeypatch.setattr(locks, "MOST_SECONDS", 0.0)
    descriptor = locks.acquire(tmp_path / "lock")
    tree = {"w": jnp.ones(3)}
    with pytest.raises(OSError, match=r"another process has held .*lock for 0 sec"):
        to_disk(tree, directory=tmp_path)
    # Who waits has a file that is not the directory's lock any more.
    monkeypatch.setattr(locks, "MOST_SECONDS", 60.0)
    acquire, tried = locks.acquire, []

    def acquired_late(file, **kw):
        if not tried:
            tried.append(file.unlink())
            return os.dup(descriptor)
        return acquire(file, **kw)

    monkeypatch.setattr(locks, "acquire", acquired_late)
    there = to_disk(tree, directory=tmp_path, block=True)
    os.close(descriptor)
    assert kinds(oo.reload_states(there)) == {"w": "device"}


def test_old_state_is_replaced(tmp_path):
    """When nobody refers to it any more, by what is complete."""
    there = to_disk({"w": jnp.ones(3)}, directory=tmp_path, block=True)
    back = oo.reload_states(there, donate=False)
    del there
    gc.collect()
    old = set(files(tmp_path))
    there = to_disk(back, directory=tmp_path, block=True)
    assert len(files(tmp_path)) == len(old)
    assert old & set(files(tmp_path)) == {tmp_path / "manifest.json"}
    np.testing.assert_array_equal(oo.reload_states(there)["w"], np.ones(3))


def test_too_little_space(tmp_path, monkeypatch):
    """Found before anything is moved."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for count in (1000, 251):
        tree, needed = {"w": jnp.ones(count)}, 4 * count
        message = rf"1000 bytes free; {needed} are needed\. Nothing"
        with pytest.raises(OSError, match=message):
            to_disk(tree, directory=tmp_path)
        assert not tree["w"].is_deleted()
        assert not files(tmp_path)
    to_disk({"w": jnp.ones(250)}, directory=tmp_path, block=True)


def test_directory_that_is_memory(tmp_path, monkeypatch):
    """It is said, at the caller's line; a drive and what is not known are not."""
    memory = file_system.Mount("/tmp", "tmpfs", "tmpfs", "0:40", False)
    drive = file_system.Mount("/", "ext4", "/dev/sda1", "8:1", False)
    message = r"is memory \(tmpfs at /tmp\): a state that is parked there stays in host"
    monkeypatch.setattr(file_system, "mount_here", lambda _: memory)
    with pytest.warns(oo.OffloadWarning, match=message) as warned:
        there = to_disk({"w": jnp.ones(3)}, directory=tmp_path, block=True)
    assert [w.filename for w in warned] == [__file__]
    to_disk(there, directory=tmp_path)  # Nothing goes there.
    assert kinds(oo.reload_states(there)) == {"w": "device"}
    for mount in (drive, None):
        monkeypatch.setattr(file_system, "mount_here", lambda _, m=mount: m)
        oo.reload_states(to_disk({"w": jnp.ones(3)}, directory=tmp_path))


def test_tensorstore_is_missing(tmp_path, monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r'pip install "optax-offload\[disk\]"'):
        to_disk({"w": jnp.ones(3)}, directory=tmp_path)


def test_no_directory_to_write_to(tmp_path):
    """What the system says."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        to_disk({"w": jnp.ones(3)}, directory=tmp_path / "file")


def test_templates_that_do_not_fit(tmp_path):
    """All that is wrong at once."""
    tree = {"a": on_device(jnp.ones(3)), "b": on_device(jnp.ones(3))}
    template = template_of(tree)
    there = to_disk(tree, directory=tmp_path, block=True)
    del there
    wrong = {
        "a": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=template["a"].sharding),
        "b": jax.ShapeDtypeStruct((3,), jnp.float32),
        "c": template["a"],
    }
    message = (
        r"'a' is float32\[3\] there, not .*4.*; 'b' has no sharding in the template; "
        "'c' is not there. Make the template"
    )
    with pytest.raises(ValueError, match=message):
        oo.reload_states(wrong, directory=tmp_path)
    with pytest.warns(oo.OffloadWarning, match="also holds 'b', which the template"):
        oo.reload_states({"a": template["a"]}, directory=tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no complete state"):
        oo.reload_states(template, directory=tmp_path / "none")


def test_template_of_eval_shape(tmp_path):
    """For an offloaded optimizer: it is read to where it belongs."""
    params = {"w": on_device(jnp.ones((256, 128)))}
    tx = oo.offload(optax.adam(1e-3), ".*/mu/.*")
    state = tx.init(params)
    at_home, before = kinds(state), bits(state)
    there = to_disk(state, directory=tmp_path, block=True)
    del there
    back = oo.reload_states(oo.eval_shape(tx.init, params), directory=tmp_path)
    assert (kinds(back), bits(back)) == (at_home, before)


def test_replicas_are_written_once(tmp_path, monkeypatch):
    """By who has the first."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tree = {"w": jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))}
    written = []
    monkeypatch.setattr(
        state_files.StateFiles, "_make_room", lambda self, n: written.append(n)
    )
    there = to_disk(tree, directory=tmp_path, block=True)
    assert written == [32]
    np.testing.assert_array_equal(oo.reload_states(there)["w"], np.ones(8))


def test_manifest_is_json(tmp_path):
    """Which leaves there are, for a person to read."""
    there = to_disk({"w": jnp.ones((2, 3))}, directory=tmp_path, block=True)
    table = json.loads((tmp_path / "manifest.json").read_text())
    (leaf,) = table["leaves"]
    assert (leaf["path"], leaf["dtype"], leaf["shape"]) == ("w", "float32", [2, 3])
    oo.reload_states(there)


def test_placeholders_are_no_arrays(tmp_path):
    """They say what they are, wherever a value is asked for."""
    leaf = to_disk({"w": jnp.ones((2, 3))}, directory=tmp_path)["w"]
    assert str(leaf) == f"OnDisk('w', float32[2, 3], {str(tmp_path)!r})"
    assert copy.deepcopy(leaf) is copy.copy(leaf) is leaf
    assert leaf != to_disk({"w": jnp.ones((2, 3))}, directory=tmp_path / "other")["w"]
    with pytest.raises(TypeError, match="no value in memory: bring it back with"):
        np.asarray(leaf)
    with pytest.raises(TypeError, match=r"belongs to its process\. In another, make"):
        pickle.dumps(leaf)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.jit(lambda x: x)(leaf)
    with pytest.raises(ValueError, match=r"'w': on disk\. Bring them back first"):
        oo.set_memory_kind({"w": leaf}, "w", "pinned_host")
