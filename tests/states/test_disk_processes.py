"""States on disk in processes of their own: a full disk, kills, two at once."""

import errno
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_trees import files

import optax_offload as oo

pytest.importorskip("tensorstore", reason="needs the extra disk")

ROOT = Path(__file__).parent.parent.parent
to_disk = functools.partial(oo.offload_states, memory_kind="disk")


def run(program, *arguments):
    """Runs a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ
        | harness.of_processes()
        | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    )


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
    """At random moments: the old or the new is there, whole.

    What is left over is removed by the next.
    """
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


PROCESSES = """
import os, shutil, sys
import jax, numpy as np
import optax_offload as oo
from optax_offload._states import manifest
from optax_offload._states.files import StateFiles

index, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
# A file, since gloo's threads print to stdout too, in the middle of each other's lines.
sys.stdout = open(sys.argv[4], "w")
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

write, read = StateFiles.write, StateFiles.read


def bad(*_):
    raise ValueError("bad")


if index:
    StateFiles.write = bad
try:
    oo.offload_states(tree, donate=False, **disk)
except oo.OffloadError as error:
    print("write:", said(error))
StateFiles.write = write
make_known = manifest.write
if not index:
    manifest.write = bad
try:
    oo.offload_states(tree, donate=False, **disk)
except oo.OffloadError as error:
    print("manifest:", said(error))
manifest.write = make_known
there = oo.offload_states(tree, **disk)
known = there["rows"].files._checksums.values()
print("checksums:", [len(x._known) for x in known])
if index:
    StateFiles.read = bad
try:
    back = oo.reload_states(there)
except oo.OffloadError as error:
    print("read:", said(error))
    back = error.tree
StateFiles.read = read
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
    directory = tmp_path / "states"
    directory.mkdir()
    said = [tmp_path / f"said-{i}" for i in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, str(i), address, directory, said[i]],
            stdout=subprocess.DEVNULL,
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
    first, second = (path.read_text().splitlines() for path in said)
    assert "another process cannot write to" in first[0]
    assert "has 0 bytes free" in second[0]
    assert "another process failed to write its part" in first[1]
    assert "offload_states stopped: ValueError: bad" in second[1]
    assert "offload_states stopped: ValueError: bad" in first[2]
    assert "another process cannot write the manifest" in second[2]
    # Of four shards in rows, four in columns and one for all: also those that another
    # process wrote.
    assert first[3] == second[3] == "checksums: [4, 1, 4]"
    assert second[4].startswith("read: OffloadError: reload_states stopped: ValueErr")
    assert first[4:] == ["states: 1", "left: []"]
    assert second[5:] == ["states: 1", "left: []"]
