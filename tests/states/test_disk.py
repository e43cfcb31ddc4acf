"""States on disk: verified, whole or not there, and removed when they are back."""

import copy
import errno
import functools
import gc
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_states import kinds, make_tree, on_device, steps, what

import optax_offload as oo
from optax_offload._states import disk, moves

pytest.importorskip("tensorstore", reason="needs the extra disk")

ROOT = Path(__file__).parent.parent.parent
to_disk = functools.partial(oo.offload_states, memory_kind="disk")


def template_of(tree):
    """Structs as `eval_shape` makes them; what is no array as it is."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=x.sharding,
                weak_type=bool(getattr(x, "weak_type", False)),
            )
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def files(directory):
    return sorted(p for p in directory.rglob("*") if p.is_file())


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("donate", [True, False])
def test_there_and_back(tmp_path, donate, block):
    """Every sort of leaf, bit for bit, in its sharding; the files are removed."""
    tree = make_tree()
    tree["host"] = oo.set_memory_kind(jnp.ones(3), "", "pinned_host")
    before, at_home = what(tree), kinds(tree)
    there = to_disk(tree, directory=tmp_path, donate=donate, block=block)
    assert set(kinds(there).values()) == {"disk", None}
    moves.settle()
    for name, x in tree.items():
        if isinstance(x, jax.Array):
            assert x.is_deleted() == donate, name
    back = oo.reload_states(there, donate=donate, block=block)
    assert what(back) == before
    assert kinds(back) == at_home
    moves.settle()
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
    monkeypatch.setattr(disk, "MOST_CHUNK_BYTES", 64)
    monkeypatch.setattr(disk, "MOST_BYTES_IN_FLIGHT", 128)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "x"))
    x = jnp.arange(7 * 12 * 5.0).reshape(7, 12, 5)
    tree = {"w": jax.device_put(x, sharding)}
    there = to_disk(tree, directory=tmp_path, block=True)
    assert len(files(tmp_path)) == 7 * 4 + 3
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
    monkeypatch.setattr(disk, "MOST_CHUNK_BYTES", 64)
    assert disk._chunk_shape(shard, 4) == chunk


# --- Placeholders.


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


# --- One state in a directory.


def test_directory_in_use(tmp_path):
    """Of two models, neither overwrites the other."""
    there = to_disk({"w": jnp.ones(3)}, directory=tmp_path)
    with pytest.raises(ValueError, match="give each state a directory of its own"):
        to_disk({"w": jnp.zeros(3)}, directory=tmp_path)
    np.testing.assert_array_equal(oo.reload_states(there)["w"], np.ones(3))


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
    tree = {"w": jnp.ones(1000)}
    with pytest.raises(OSError, match=r"1000 bytes free; 4000 are needed\. Nothing"):
        to_disk(tree, directory=tmp_path)
    assert not tree["w"].is_deleted()
    assert not files(tmp_path)


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


# --- Templates.


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


# --- Faults.


def damaged_states(directory):
    """A way to damage each file: a byte flipped at three places, cut, gone."""
    for file in files(directory):
        content = file.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1} if content else ():
            flipped = bytearray(content)
            flipped[place] ^= 1 << random.Random(place).randrange(8)
            yield f"{file.name} flipped at {place}", file, bytes(flipped)
        for length in {0, len(content) // 2, len(content) - 1} if content else ():
            yield f"{file.name} cut to {length}", file, content[:length]
        yield f"{file.name} gone", file, None


def damaged_trees(directory):
    tree = make_tree()
    tree = {k: x for k, x in tree.items() if isinstance(x, jax.Array) and x.size}
    before, template = bits(tree), template_of(tree)
    there = to_disk(tree, directory=directory, block=True)
    return before, template, there


@pytest.mark.parametrize("by", ["placeholder", "template"])
def test_damaged_files(tmp_path, by):
    """Each file in each way: a clear error, or what was written; and mended, again."""
    before, template, there = damaged_trees(tmp_path)
    tree, kw = (
        (there, {}) if by == "placeholder" else (template, {"directory": tmp_path})
    )
    tried = errors = 0
    for name, file, damaged in damaged_states(tmp_path):
        content = file.read_bytes()
        file.unlink() if damaged is None else file.write_bytes(damaged)
        tried += 1
        back = error = None
        try:
            back = oo.reload_states(tree, donate=False, **kw)
        except (oo.OffloadError, ValueError, FileNotFoundError) as e:
            error = e
        file.write_bytes(content)
        if error is None:
            assert bits(back) == before, name
            continue
        errors += 1
        assert str(tmp_path) in str(error), "the error names the file"
        if isinstance(error, oo.OffloadError):
            arrived = [x for x in error.tree.values() if isinstance(x, jax.Array)]
            assert all(bits([x])[0] in before for x in arrived), name
    # The lock is empty, and who has placeholders needs no manifest.
    harmless = tried - errors
    print(f"{by}: {tried} tried, {errors} errors, {harmless} read right")
    assert tried > 150
    assert harmless == {"placeholder": 8, "template": 1}[by]
    assert bits(oo.reload_states(tree, **kw)) == before


def test_manifest_that_says_otherwise(tmp_path):
    """Well formed, and not what was written."""
    template = template_of({"v": on_device(jnp.ones(3))})
    there = to_disk({"w": on_device(jnp.ones(3))}, directory=tmp_path, block=True)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"w"', '"v"'))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: its hash is not"):
        oo.reload_states(template, directory=tmp_path)
    assert kinds(oo.reload_states(there)) == {"w": "device"}


def test_replicas_are_written_once(tmp_path, monkeypatch):
    """By who has the first."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tree = {"w": jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))}
    written = []
    monkeypatch.setattr(disk.State, "_make_room", lambda self, n: written.append(n))
    there = to_disk(tree, directory=tmp_path, block=True)
    assert written == [32]
    np.testing.assert_array_equal(oo.reload_states(there)["w"], np.ones(8))


def test_damage_half_way_loses_nothing(tmp_path):
    """The others are back, and the files stay."""
    tree = {f"w{i}": on_device(jnp.full(4, float(i))) for i in range(4)}
    there = to_disk(tree, directory=tmp_path, block=True)
    (file,) = tmp_path.glob("state-*/2/c.*")
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(oo.OffloadError, match=r"(?s)DATA_LOSS.*'w2'") as caught:
        oo.reload_states(there)
    now = caught.value.tree
    assert kinds(now)["w2"] == "disk"
    file.write_bytes(content)
    back = oo.reload_states(now)
    assert [float(x[0]) for x in back.values()] == [0, 1, 2, 3]
    assert not files(tmp_path)


FULL = """
import resource, sys
import jax, jax.numpy as jnp
import optax_offload as oo

directory, block = sys.argv[1], sys.argv[2] == "block"
# No file may be larger than 100 KB: the third and the fifth leaf do not fit.
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
sizes = [1000, 2000, 50_000, 3000, 50_000]
tree = {f"w{i}": jnp.full(n, float(i)) for i, n in enumerate(sizes)}
try:
    tree = oo.offload_states(tree, memory_kind="disk", directory=directory, block=block)
    tree = oo.reload_states(tree)
except oo.OffloadError as error:
    print(error)
    tree = error.tree
print(oo.memory_report(tree).totals)
back = oo.reload_states(tree)
print([(x.size, float(x[0]), float(x[-1])) for x in back.values()])
"""


@pytest.mark.parametrize("block", ["block", "at once"])
def test_disk_full(tmp_path, block):
    """A limit of the system on a real process: what fits is moved, nothing is lost."""
    done = run(FULL, tmp_path, block)
    assert done.returncode == 0, done.stderr
    report, values = done.stdout.strip().splitlines()[-2:]
    assert "'disk': 12000" in report or "'disk': 24000" in report, done.stdout
    assert "'device': " in report
    assert "w2" in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    expected = [(n, float(i), float(i)) for i, n in enumerate([1000, 2000, 50_000])]
    assert values.startswith(str(expected)[:-1])
    assert not files(tmp_path)


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    )


KILLS = 8
KILLED = """
import sys
import jax, jax.numpy as jnp
import optax_offload as oo

directory = sys.argv[1]
for n in range(1, 10_000):
    tree = {f"w{i}": jnp.full((16, 64), float(n)) for i in range(8)}
    print("start", n, flush=True)
    there = oo.offload_states(
        tree, memory_kind="disk", directory=directory, block=True
    )
    print("done", n, flush=True)
    oo.reload_states(there, donate=False, block=True)
    del there
"""


@pytest.mark.slow
def test_killed_while_offloading(tmp_path):
    """At random moments: the old or the new is there, whole; and what is left over is
    removed by the next."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=sharding)
    template = {f"w{i}": struct for i in range(8)}
    generator = random.Random(0)
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    came_of_it = {"old": 0, "new": 0}
    left_over = 0
    for _ in range(KILLS):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert process.stdout is not None
        while process.stdout.readline() != "done 2\n":
            assert process.poll() is None
        time.sleep(generator.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split("\n")[:-1]
        process.wait()
        process.stdout.close()
        done = max([2, *(int(s.split()[1]) for s in said if s.startswith("done"))])
        back = oo.reload_states(template, directory=tmp_path, donate=False)
        values = {float(v) for x in back.values() for v in np.unique(np.asarray(x))}
        assert len(values) == 1, "never half of each"
        (value,) = values
        assert value in (done, done + 1)
        came_of_it["new" if value == done + 1 else "old"] += 1
        left_over += len(list(tmp_path.glob("state-*"))) - 1
        there = to_disk(back, directory=tmp_path, block=True)
        assert len(list(tmp_path.glob("state-*"))) == 1
        oo.reload_states(there)
        assert not files(tmp_path)
    print(f"killed {KILLS} times: {came_of_it}, {left_over} incomplete states removed")
    assert left_over, "no kill met a write"


def test_incomplete_state_is_no_state(tmp_path, monkeypatch):
    """Everything written but the manifest: the old one is what is there."""
    tree = {"w": on_device(jnp.ones(3))}
    template = template_of(tree)
    back = oo.reload_states(to_disk(tree, directory=tmp_path, block=True), donate=False)
    new = {"w": back["w"] + 1}
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no rename"))
        )
        with pytest.raises(oo.OffloadError, match="no rename") as caught:
            to_disk(new, directory=tmp_path, block=True)
    found = oo.reload_states(template, directory=tmp_path, donate=False)
    np.testing.assert_array_equal(found["w"], np.ones(3))
    # The new is not lost, and leaves the old alone when it is back.
    np.testing.assert_array_equal(
        oo.reload_states(caught.value.tree)["w"], np.full(3, 2.0)
    )
    found = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(found["w"], np.ones(3))
    assert not files(tmp_path)


def test_manifest_is_json(tmp_path):
    """Which leaves there are, for a person to read."""
    there = to_disk({"w": jnp.ones((2, 3))}, directory=tmp_path, block=True)
    table = json.loads((tmp_path / "manifest.json").read_text())
    (leaf,) = table["leaves"]
    assert (leaf["path"], leaf["dtype"], leaf["shape"]) == ("w", "float32", [2, 3])
    oo.reload_states(there)


def test_failing_in_the_background_gives_back_sources(tmp_path, monkeypatch, caplog):
    """As copies do."""
    monkeypatch.setattr(
        moves,
        "write",
        lambda place: lambda move: 1 / 0 if place.path == "b" else ok(place, move),
    )

    def ok(place, move):
        wait = place.state.write(place, move.source)
        return lambda: wait() or place

    tree = {"a": jnp.ones(3), "b": jnp.ones(3)}
    there = to_disk(tree, directory=tmp_path)
    with pytest.raises(oo.OffloadError, match=r"Not moved: 'b'\.") as caught:
        oo.reload_states(there)
    assert "offload_states failed for 'b'" in caplog.text
    assert kinds(caught.value.tree) == {"a": "disk", "b": "device"}
    back = oo.reload_states(caught.value.tree)
    np.testing.assert_array_equal(back["a"], np.ones(3))
    assert not files(tmp_path)


PROCESSES = """
import os, shutil, sys
import jax, numpy as np
import optax_offload as oo
from optax_offload._states import disk

index, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, index)
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
value = np.arange(32, dtype=np.float32).reshape(8, 4)
shardings = {
    "rows": jax.NamedSharding(mesh, jax.P("x")),
    "columns": jax.NamedSharding(mesh, jax.P(None, "x")),
    "replicated": jax.NamedSharding(mesh, jax.P()),
}
tree = {
    name: jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])
    for name, sharding in shardings.items()
}
template = {
    name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    for name, sharding in shardings.items()
}


def check(tree):
    for x in tree.values():
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])


def said(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


disk = {"memory_kind": "disk", "directory": directory}
for kind in ({"memory_kind": "pinned_host"}, {"memory_kind": "unpinned_host"}, disk):
    tree = oo.offload_states(tree, **kind)
    kinds = {row.actual for row in oo.memory_report(tree).rows}
    assert kinds == {kind["memory_kind"]}, kinds
    tree = oo.reload_states(tree)
    check(tree)
assert not os.listdir(directory)
if index:
    usage = shutil.disk_usage
    shutil.disk_usage = lambda _: usage(directory)._replace(free=0)
try:
    oo.offload_states(tree, **disk)
except OSError as error:
    print("no space:", said(error))
if index:
    shutil.disk_usage = usage
check(tree)

write, read = disk.State.write, disk.State.read


def bad(*_):
    raise ValueError("bad")


if index:
    disk.State.write = bad
try:
    oo.offload_states(tree, donate=False, **disk)
except oo.OffloadError as error:
    print("write:", said(error))
disk.State.write = write
there = oo.offload_states(tree, **disk)
if index:
    disk.State.read = bad
try:
    back = oo.reload_states(there)
except oo.OffloadError as error:
    print("read:", said(error))
    back = error.tree
disk.State.read = read
back = oo.reload_states(back)
check(back)
there = oo.offload_states(back, **disk)
print("states:", sum(name.startswith("state") for name in os.listdir(directory)))
del there
check(oo.reload_states(template, directory=directory))
print("left:", os.listdir(directory) if not index else [])
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each writes its own shards; what fails in one is known to the other."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    count = "--xla_force_host_platform_device_count=2"
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": count}
    env |= {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, str(i), address, tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    try:
        results = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], results
    first, second = (
        [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        for out, _ in results
    )
    assert "another process cannot write to" in first[0]
    assert "has 0 bytes free" in second[0]
    assert "another process failed to write its part" in first[1]
    assert "offload_states stopped: ValueError: bad" in second[1]
    assert second[2].startswith("read: OffloadError: reload_states stopped: ValueErr")
    assert first[2:] == ["states: 1", "left: []"]
    assert second[3:] == ["states: 1", "left: []"]
