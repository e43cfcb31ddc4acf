"""The report: planned against actual, and loud when they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

PARAMS = {"w": jnp.ones((256, 128)), "b": jnp.ones(128)}


def test_rows_and_totals():
    """Bytes are those of the arrays."""
    state = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*").init(PARAMS)
    report = oo.memory_report(state, ".*/(mu|nu)/.*").check()
    rows = {row.path: row for row in report.rows}
    assert rows["0/mu/w"].nbytes == 256 * 128 * 4
    assert rows["0/mu/w"].planned == rows["0/mu/w"].actual == "pinned_host"
    assert "under 65536 bytes" in rows["0/mu/b"].why
    assert rows["0/count"].why == "no rule matches"
    assert report.totals == {"device": 2 * 512 + 4, "pinned_host": 2 * 131072}


def test_bytes_per_device():
    """A sharded leaf weighs its shard."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("x")))
    report = oo.memory_report({"x": x})
    assert report.totals == {"device": 96}
    assert report.totals_per_device == {"device": 24}


def test_check_names_every_misplaced_leaf():
    """A state that was made without offload is caught."""
    state = optax.adam(1e-3).init(PARAMS)
    report = oo.memory_report(state, ".*")
    message = (
        r"2 of 5 leaves are not where they were planned:\n"
        r"  0/mu/w: planned pinned_host, is device \(131072 bytes; rule 0 '\.\*'\)\n"
        r"  0/nu/w: planned pinned_host, is device"
    )
    with pytest.raises(oo.MemoryKindError, match=message):
        report.check()
    assert "device (!)" in str(report)


def test_out_shardings_without_a_kind_are_caught():
    """JAX moves what a step returns to where its out_shardings say, without a word."""
    tx = oo.offload(optax.adam(1e-3))
    state = tx.init(PARAMS)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(tx.update, out_shardings=NamedSharding(mesh, P()))
    _, state = step(PARAMS, state)
    with pytest.raises(oo.MemoryKindError, match="out_shardings"):
        oo.memory_report(state, ".*").check()


def test_check_without_rules():
    """Where nothing was planned there is nothing to check."""
    with pytest.raises(ValueError, match="nothing was planned: give the rules"):
        oo.memory_report(PARAMS).check()


def test_the_table():
    """One line for each leaf, totals below; values that are no arrays have no kind."""
    tree = {"k": jax.random.key(0), "n": None, "s": 3, "w": np.ones((2, 3), np.float32)}
    lines = str(oo.memory_report(tree)).splitlines()
    assert lines[0].split()[:4] == ["path", "shape", "dtype", "bytes"]
    assert lines[0].split()[4:] == ["bytes/device", "planned", "actual", "why"]
    assert [line.split()[0] for line in lines[2:5]] == ["k", "s", "w"]
    assert lines[4].split()[1] == "2x3"
    assert lines[-2].startswith("device: 8 bytes")
    assert lines[-1].startswith("no memory kind: 28 bytes")
    assert str(oo.memory_report({})).splitlines()[0].startswith("path")


def test_rules_are_checked_as_for_offload():
    """A rule that matches nothing."""
    with pytest.raises(ValueError, match="matches no leaf"):
        oo.memory_report(PARAMS, "nothing")
