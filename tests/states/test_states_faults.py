"""Faults on the way: nothing is lost, and the errors say what to do."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import bits
from state_trees import kinds, on_device, what

import optax_offload as oo
from optax_offload._ground import progress
from optax_offload._states import records


def failing(monkeypatch, at, error=None):
    """The call number ``at`` of device_put fails."""
    put, calls = jax.device_put, []

    def device_put(x, sharding):
        calls.append(x)
        if len(calls) == at:
            raise error or jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return put(x, sharding)

    monkeypatch.setattr(jax, "device_put", device_put)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("there_first", [False, True])
def test_failing_half_way_loses_nothing(monkeypatch, at, block, there_first):
    """The error says what moved, and has the tree; going on finishes the work."""
    tree = {f"w{i}": on_device(jnp.full(4, float(i))) for i in range(5)}
    before = what(tree)
    call, other = oo.offload_states, oo.reload_states
    if there_first:
        tree = oo.offload_states(tree, block=True)
        call, other = other, call
    with monkeypatch.context() as patch:
        failing(patch, at)
        message = (
            rf"(?s)_states stopped: JaxRuntimeError: RESOURCE_EXHAUSTED: no memory\. "
            rf"Moved to .*: {at - 1} leaves \(.*\). Not moved: {6 - at} \('w{at - 1}'.*"
            r"Nothing is lost"
        )
        with pytest.raises(oo.OffloadError, match=message) as caught:
            call(tree, block=block)
    records.settle()
    now = caught.value.tree
    assert bits(now) == before[0]
    assert len(set(kinds(now).values())) == (1 if at == 1 else 2)
    assert len(set(kinds(call(now, block=True)).values())) == 1


def test_interrupted_half_way(monkeypatch):
    """A KeyboardInterrupt stays one, and has the tree too."""
    tree = {f"w{i}": on_device(jnp.full(4, float(i))) for i in range(5)}
    before = bits(tree)
    failing(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        oo.offload_states(tree, block=True)
    assert bits(caught.value.tree) == before
    assert "Moved to pinned_host: 2 leaves" in caught.value.__notes__[0]


def test_failing_in_the_background(monkeypatch, caplog):
    """It is logged; the next call raises, and its tree has the source."""
    wait = jax.block_until_ready

    def block_until_ready(x):
        if x.shape == (7,):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return wait(x)

    tree = {"a": on_device(jnp.ones(3)), "b": on_device(jnp.ones(7)), "c": jnp.ones(5)}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", block_until_ready)
        there = oo.offload_states(tree)
        records.settle()
    assert tree["a"].is_deleted()
    assert tree["c"].is_deleted()
    (record,) = caplog.records
    assert (record.levelno, "'b'" in record.getMessage()) == (logging.ERROR, True)
    with pytest.raises(oo.OffloadError, match=r"Not moved: 'b'\. Nothing is") as caught:
        oo.reload_states(there)
    assert kinds(caught.value.tree) == {
        "a": "pinned_host",
        "b": "device",
        "c": "pinned_host",
    }
    assert bits(oo.reload_states(caught.value.tree)) == bits(
        {"a": jnp.ones(3), "b": jnp.ones(7), "c": jnp.ones(5)}
    )


EXHAUSTED = """
import resource, sys
import jax, jax.numpy as jnp
import optax_offload as oo

tree = {f"w{i}": jnp.full((8, 1024, 1024), float(i)) for i in range(6)}
jax.block_until_ready(tree)
oo.reload_states(oo.offload_states({"warm": jnp.ones(3)}, block=True), block=True)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 100 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    # Sources are kept: with donate=True this would fit, leaf by leaf.
    oo.offload_states(tree, block="block" in sys.argv, donate=False)
except oo.OffloadError as error:
    kinds = [x.sharding.memory_kind for x in error.tree.values()]
    values = [float(x[-1, -1, -1]) for x in error.tree.values()]
    print(sorted(set(kinds)), values, error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("block", ["block", "at once"])
def test_host_memory_exhausted(block):
    """A real limit on the memory of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", EXHAUSTED, block],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "['device', 'pinned_host'] [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in done.stdout, (
        done.stderr
    )
    assert "RESOURCE_EXHAUSTED" in done.stdout


def test_pattern_matches_nothing():
    """As everywhere."""
    for call in (oo.offload_states, oo.reload_states):
        with pytest.raises(
            ValueError, match=r"'nuu', matches no leaf\. Write 'nu', which"
        ):
            call({"nu": jnp.ones(1)}, "nuu")


def test_kinds():
    """What there is; and where it is unknown."""
    tree = {"w": jnp.ones(1)}
    message = "memory_kind is 'device'; offload_states moves to 'pinned_host'"
    with pytest.raises(ValueError, match=message):
        oo.offload_states(tree, memory_kind="device")
    with pytest.raises(ValueError, match="'disk' needs a directory, and nothing else"):
        oo.offload_states(tree, memory_kind="disk")
    with pytest.raises(ValueError, match="'disk' needs a directory, and nothing else"):
        oo.offload_states(tree, directory="x")
    message = r"rule 0 \('w'\) has memory_kind 'unpinned_host', but memory_kind='pinned"
    with pytest.raises(ValueError, match=message):
        oo.offload_states(tree, oo.Rule("w", "unpinned_host"))


def test_deleted_leaves():
    """All of them are named."""
    tree = {"a": jnp.ones(1), "b": jnp.ones(1), "c": jnp.ones(1)}
    oo.offload_states(tree, "a|b", block=True)
    for call in (oo.offload_states, oo.reload_states):
        with pytest.raises(ValueError, match=r"'a', 'b': deleted\. The array was"):
            call(tree)
    assert kinds(oo.offload_states({"c": tree["c"]})) == {"c": "pinned_host"}


def test_structs():
    """They have no value to move."""
    tree = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(TypeError, match="'w': a struct has no value; offload_states"):
        oo.offload_states(tree)
    with pytest.raises(TypeError, match="reload_states needs directory"):
        oo.reload_states(tree)


def test_under_jit():
    """There is another call for that."""
    for call in (oo.offload_states, oo.reload_states):
        with pytest.raises(TypeError, match="was called under jit: use optax_offl"):
            jax.jit(call)({"w": jnp.ones(3)})


def test_host_leaves_that_are_not_known(caplog):
    """Where nothing would be done: an error. Beside leaves that return: in the log."""
    there = oo.offload_states({"w": jnp.ones(3), "x": jnp.ones(3)})
    copies = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), there)
    message = (
        r"moved none of these leaves, which are in host memory: 'w', 'x'\. .* "
        r'optax_offload.set_memory_kind\(tree, pattern, "device"\)'
    )
    for unknown in (copies, copies | {"here": jnp.ones(3)}):
        with pytest.raises(ValueError, match=message):
            oo.reload_states(unknown)
    caplog.set_level(logging.DEBUG, "optax_offload")
    back = oo.reload_states({"w": there["w"], "x": copies["x"]})
    again = oo.reload_states(back)  # Nothing is left to do.
    assert kinds(again) == kinds(back) == {"w": "device", "x": "pinned_host"}
    assert "reload_states leaves 'x' in place" in caplog.text


def test_progress_of_long_moves(monkeypatch, caplog):
    """Lines in the log, no more than one in ten seconds."""
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO, "optax_offload")
    tree = {f"w{i}": jnp.ones(2**20) for i in range(4)}
    oo.offload_states(tree, block=True)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("offload_states: 0.0 of 0.0 GiB")
    assert len(lines) == 2
