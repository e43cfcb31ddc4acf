"""Trees of which arrays are deleted: found before anything starts, and never denied."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_trees import kinds, on_device

import optax_offload as oo
from optax_offload._states import records
from optax_offload._states.files import StateFiles


@pytest.fixture
def gate(monkeypatch):
    """Holds back the background until it is opened."""
    records.settle()  # Nothing of other tests waits at the gate.
    opened = threading.Event()
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (opened.wait(), wait(x))[1])
    yield opened
    opened.set()
    records.settle()


def test_given_twice_while_the_first_call_runs(gate):
    """What is being freed belongs to the first call: an error, and nothing starts."""
    tree = {"a": on_device(jnp.ones(3)), "b": on_device(jnp.zeros(3))}
    there = oo.offload_states(tree)
    for call in (oo.offload_states, oo.reload_states):
        with pytest.raises(ValueError, match=r"'a', 'b': deleted\. The array was don"):
            call(tree)
    gate.set()
    assert kinds(oo.reload_states(there)) == {"a": "device", "b": "device"}


@pytest.fixture
def disk_gate(monkeypatch):
    """Holds back what is written to disk until it is opened."""
    pytest.importorskip("tensorstore", reason="needs the extra disk")
    opened = threading.Event()
    write = StateFiles.write
    monkeypatch.setattr(
        StateFiles, "write", lambda *args: (opened.wait(), write(*args))[1]
    )
    yield opened
    opened.set()
    records.settle()


def test_given_twice_to_disk(tmp_path, disk_gate):
    """As it is written in the background."""
    tree = {"a": on_device(jnp.ones(3)), "b": on_device(jnp.zeros(3))}
    disk = {"memory_kind": "disk"}
    there = oo.offload_states(tree, directory=tmp_path / "1", **disk)
    with pytest.raises(ValueError, match=r"'a', 'b': deleted\. The array was donated"):
        oo.offload_states(tree, directory=tmp_path / "2", **disk)
    disk_gate.set()
    assert not (tmp_path / "2").exists()
    np.testing.assert_array_equal(oo.reload_states(there)["a"], np.ones(3))


def test_kept_sources_can_be_given_twice(gate):
    """Without donation nothing is freed."""
    tree = {"a": on_device(jnp.ones(3))}
    first = oo.offload_states(tree, donate=False)
    second = oo.offload_states(tree, donate=False)
    gate.set()
    assert kinds(first) == kinds(second) == {"a": "pinned_host"}


def test_deleted_while_it_is_moved(monkeypatch):
    """The error says what is lost, and not that nothing is."""
    tree = {f"w{i}": on_device(jnp.ones(4)) for i in range(4)}
    put, calls = jax.device_put, []

    def device_put(x, sharding):
        calls.append(x)
        if len(calls) == 3:
            x.delete()  # A step in another thread, to which it was donated.
        return put(x, sharding)

    monkeypatch.setattr(jax, "device_put", device_put)
    message = (
        r"Not moved: 2 \('w2', 'w3'\)\. 'w2': deleted meanwhile, by a step or a call "
        r"that it was donated to\. All other leaves are there: this error's \.tree"
    )
    with pytest.raises(oo.OffloadError, match=message) as caught:
        oo.offload_states(tree, block=True)
    assert "Nothing is lost" not in str(caught.value)


def test_deleted_while_it_waits_for_the_disk(tmp_path, disk_gate):
    """The call that is next given the leaf says so."""
    tree = {"a": on_device(jnp.ones(3)), "b": on_device(jnp.zeros(3))}
    there = oo.offload_states(tree, memory_kind="disk", directory=tmp_path)
    tree["b"].delete()
    disk_gate.set()
    message = r"Not moved: 'b'\. 'b': deleted meanwhile, .* All other leaves are there"
    with pytest.raises(oo.OffloadError, match=message) as caught:
        oo.reload_states(there)
    assert kinds({"a": caught.value.tree["a"]}) == {"a": "disk"}
