"""The report: planned against actual, and loud when they differ."""

import gc
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._host import host_memory
from optax_offload._report import report as reporting
from optax_offload._states import records

PARAMS = {"w": jnp.ones((256, 128)), "b": jnp.ones(128)}


def test_rows_and_totals():
    """Bytes are those of the arrays."""
    state = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*").init(PARAMS)
    report = oo.memory_report(state, ".*/(mu|nu)/.*").check()
    rows = {row.path: row for row in report.rows}
    assert rows["0/mu/w"].nbytes == 256 * 128 * 4
    assert rows["0/mu/w"].planned == rows["0/mu/w"].actual == "pinned_host"
    assert "under 64.00 KiB" in rows["0/mu/b"].why
    assert rows["0/count"].why == "no rule matches"
    assert report.totals == {"device": 2 * 512 + 4, "pinned_host": 2 * 131072}


def test_bytes_per_device():
    """A sharded leaf weighs its shard."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("x")))
    report = oo.memory_report({"x": x})
    assert report.totals == {"device": 96}
    assert report.totals_per_device == {"device": 24}
    assert report.totals_per_host == {"device": 96}
    replicated = oo.memory_report({"x": jax.device_put(x, NamedSharding(mesh, P()))})
    assert replicated.totals_per_device == {"device": 96}
    assert replicated.totals_per_host == {"device": 4 * 96}


def test_check_names_every_misplaced_leaf():
    """A state that was made without offload is caught."""
    state = optax.adam(1e-3).init(PARAMS)
    report = oo.memory_report(state, ".*")
    message = (
        r"2 of 5 leaves are not where they were planned:\n"
        r"  0/mu/w: planned pinned_host, is device \(128.00 KiB; rule 0 '\.\*'\)\n"
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


@pytest.mark.parametrize("min_bytes", [0, 65536])
def test_numbers_are_in_no_memory(min_bytes):
    """A step counter may be a Python or NumPy number: it is not misplaced."""
    state = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=min_bytes)).init(
        {"w": jnp.ones((256, 128))}
    )
    for count in (3, np.int32(3)):
        numbers = (state[0]._replace(count=count), *state[1:])
        oo.memory_report(numbers, oo.Rule(".*", min_bytes=min_bytes)).check()
    arrays = (state[0]._replace(mu={"w": np.ones((256, 128), np.float32)}), *state[1:])
    with pytest.raises(oo.MemoryKindError, match="planned pinned_host, is None"):
        oo.memory_report(arrays, ".*").check()


def test_check_without_rules():
    """Where nothing was planned there is nothing to check."""
    with pytest.raises(ValueError, match="made without rules, so it has"):
        oo.memory_report(PARAMS).check()


def test_the_table():
    """One line for each leaf, totals below; values that are no arrays have no kind."""
    tree = {"k": jax.random.key(0), "n": None, "s": 3, "w": np.ones((2, 3), np.float32)}
    leaves, sums = str(oo.memory_report(tree)).split("\n\n")
    lines = leaves.splitlines()
    assert lines[0].split()[:4] == ["path", "shape", "dtype", "size"]
    assert lines[0].split()[4:] == ["size/device", "planned", "actual", "why"]
    assert [line.split()[0] for line in lines[2:]] == ["k", "s", "w"]
    assert lines[4].split()[1] == "2x3"
    assert [line.split() for line in sums.splitlines()[2:]] == [
        ["k", "device", *["8", "B"] * 3],
        ["s", "no", "memory", "kind", *["4", "B"] * 3],
        ["w", "no", "memory", "kind", *["24", "B"] * 3],
        ["total", "device", *["8", "B"] * 3],
        ["total", "no", "memory", "kind", *["28", "B"] * 3],
    ]
    assert str(oo.memory_report({})).splitlines()[0].startswith("path")


def test_layers_share_a_line():
    """Leaves that differ in a number only, and in nothing else that is shown."""
    params = {f"layers_{i}": {"kernel": jnp.ones((8, 4))} for i in range(12)}
    params["layers_3"]["kernel"] = jnp.ones((4, 4))
    tree = {"params": params, "heads_0": jnp.ones(2), "heads_2": jnp.ones(2)}
    lines = str(oo.memory_report(tree)).split("\n\n")[0].splitlines()
    assert lines[0].split()[:3] == ["path", "leaves", "shape"]
    assert [line.split()[:5] for line in lines[2:]] == [
        ["heads_{0,2}", "2", "2", "float32", "16"],
        ["params/layers_{0..11}/kernel", "11", "8x4", "float32", "1.38"],
        ["params/layers_3/kernel", "1", "4x4", "float32", "64"],
    ]


def test_values_at_a_prompt():
    """A line, of however many leaves; in a notebook all of it."""
    tree = {f"w_{'x' * i}": jnp.ones((64, 256)) for i in range(40)}
    report = oo.memory_report(tree, ".*")
    assert repr(report) == (
        "<MemoryReport: 40 leaves, 2.50 MiB device, 40 not where planned; print it to "
        "see all>"
    )
    html = report._repr_html_()
    assert html.startswith("<p>40 leaves, 2.50 MiB device, 40 not where planned</p>")
    assert "<b>w_xxxx</b></td>" in html
    schedule = oo.offload(optax.adam(1e-3)).schedule(tree)
    assert repr(schedule) == (
        "<Straight: 40 groups of 5.00 MiB in all, the largest of 128.00 KiB; print it "
        "to see all>"
    )
    step = oo.jit(lambda x: x).schedule(tree)
    assert repr(step).startswith("<FusedStep: nothing is fused")
    assert step._repr_html_() == f"<pre>{step}</pre>"


def test_rules_are_checked_as_for_offload():
    """A rule that matches nothing."""
    with pytest.raises(ValueError, match="matches no leaf"):
        oo.memory_report(PARAMS, "nothing")


def training_state():
    """As of a chain: the wrapped optimizer's state is under ``opt_state/1``."""
    tx = oo.offload(optax.adam(1e-3), "0/(mu|nu)/.*")
    return {
        "params": PARAMS,
        "opt_state": (optax.EmptyState(), tx.init(PARAMS)),
        "batch_stats": {"mean": jnp.zeros(64)},
    }


def test_rules_under_a_path():
    """The same rules as in `offload` for a whole state; the rest has no plan."""
    report = oo.memory_report(training_state(), "0/(mu|nu)/.*", under="opt_state/1")
    rows = {row.path: row for row in report.check().rows}
    assert rows["opt_state/1/0/mu/w"].planned == "pinned_host"
    assert rows["opt_state/1/0/count"].planned == "device"
    assert rows["params/w"].planned is None
    assert rows["params/w"].why == "not under 'opt_state/1'"
    # What has no plan may be anywhere.
    state = oo.set_memory_kind(training_state(), "params/.*", "pinned_host")
    moved = oo.memory_report(state, "0/(mu|nu)/.*", under="opt_state/1").check()
    assert moved.subtrees()["params"].totals == {"pinned_host": 131072 + 512}
    state = oo.set_memory_kind(training_state(), ".*/nu/w", "device")
    message = (
        r"(?s)opt_state/1/0/nu/w: planned pinned.*"
        r"Move them with optax_offload\.place\(tree, rules, under='opt_state/1'\)"
    )
    with pytest.raises(oo.MemoryKindError, match=message):
        oo.memory_report(state, "0/(mu|nu)/.*", under="opt_state/1").check()
    placed = oo.place(state, "0/(mu|nu)/.*", under="opt_state/1")
    oo.memory_report(placed, "0/(mu|nu)/.*", under="opt_state/1").check()


def test_under_nothing():
    """A path that is not there, and a path without rules."""
    with pytest.raises(ValueError, match=r"under='opt': no leaf is there\. Nearest"):
        oo.memory_report(training_state(), ".*", under="opt")
    with pytest.raises(ValueError, match="under='opt_state' says where the paths"):
        oo.memory_report(training_state(), under="opt_state")


def test_subtrees():
    """By the first parts of the path, and in the table."""
    report = oo.memory_report(training_state())
    assert {name: part.totals for name, part in report.subtrees().items()} == {
        "batch_stats": {"device": 256},
        "opt_state": {"device": 2 * 512 + 4, "pinned_host": 2 * 131072},
        "params": {"device": 131072 + 512},
    }
    assert list(report.subtrees(4))[1:3] == ["opt_state/1/0/count", "opt_state/1/0/mu"]
    assert "opt_state    pinned_host  256.00 KiB" in str(report)
    with pytest.raises(ValueError, match="depth is 0; it must be at least 1"):
        report.subtrees(0)


def test_as_dict_is_json():
    """All of it, and back."""
    report = oo.memory_report(training_state() | {"note": np.ones(2)}, under="")
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain == report.as_dict()
    assert len(plain["rows"]) == len(report.rows)
    assert plain["rows"][0] | {"why": ""} == {
        "path": "batch_stats/mean",
        "shape": [64],
        "dtype": "float32",
        "nbytes": 256,
        "nbytes_per_device": 256,
        "nbytes_per_host": 256,
        "planned": None,
        "actual": "device",
        "codec": None,
        "named": None,
        "copies_per_host": 1,
        "why": "",
    }
    assert plain["totals"]["pinned_host"] == {
        "bytes": 262144,
        "bytes_per_device": 262144,
        "bytes_per_host": 262144,
    }
    assert plain["subtrees"]["note"]["no memory kind"]["bytes"] == 8
    assert plain["host"]["needed_bytes"] == {"pinned_host": 262144}


@pytest.mark.parametrize("tree", [training_state(), PARAMS["w"], {}])
def test_plot(tree, tmp_path):
    """A picture for any tree."""
    pytest.importorskip("matplotlib")
    oo.memory_report(tree).plot(tmp_path / "places.png")
    assert (tmp_path / "places.png").read_bytes().startswith(b"\x89PNG")


def test_plot_shows_every_subtree_and_kind(tmp_path):
    """In a format that can be read back."""
    pytest.importorskip("matplotlib")
    oo.memory_report(training_state()).plot(tmp_path / "places.svg", depth=4)
    drawn = (tmp_path / "places.svg").read_text()
    for text in ("opt_state/1/0/mu", "params/w", "total", "pinned_host", "device"):
        assert f"<!-- {text} -->" in drawn


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-offload\[plot\]'"):
        oo.memory_report(PARAMS).plot(tmp_path / "places.png")


def machine(root, free_kib, total_kib=1000):
    """A machine's files, with no cgroups."""
    (root / "proc").mkdir()
    lines = f"MemTotal: {total_kib} kB\nMemAvailable: {free_kib} kB\n"
    (root / "proc/meminfo").write_text(lines)


@pytest.mark.parametrize("shape", ["array", "template"])
def test_too_little_host_memory(shape, tmp_path, monkeypatch):
    """A warning before the first step, for what is not there yet only."""
    machine(tmp_path, free_kib=300)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    state = optax.adam(1e-3).init(PARAMS)
    if shape == "template":
        state = oo.eval_shape(optax.adam(1e-3).init, PARAMS)
    assert oo.memory_report(state, ".*").host.needed_bytes == {"pinned_host": 262144}
    (tmp_path / "proc/meminfo").unlink()
    (tmp_path / "proc").rmdir()
    machine(tmp_path, free_kib=200)
    message = (
        r"this process still needs 256\.00 KiB of host memory \(pinned_host\), but the "
        r"machine has only 200\.00 KiB left of 1000\.00 KiB\. Offload less"
    )
    with pytest.warns(oo.OffloadWarning, match=message):
        report = oo.memory_report(state, ".*")
    assert "(!) this process still needs 256.00 KiB" in str(report)
    assert len(report.as_dict()["host"]["shortages"]) == 1
    placed = oo.offload(optax.adam(1e-3)).init(PARAMS)
    there = oo.memory_report(placed, ".*").host
    assert there.needed_bytes == {"pinned_host": 262144}
    assert there.missing_bytes == {"pinned_host": 0}


def test_host_memory_of_shards(tmp_path, monkeypatch):
    """Each device's copy of a replicated leaf is memory of its own."""
    machine(tmp_path, free_kib=700)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = oo.offload(optax.adam(1e-3))

    def needed(spec):
        sharding = NamedSharding(mesh, spec)
        params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)}
        template = oo.eval_shape(tx.init, params)
        return oo.memory_report(template, ".*").host.needed_bytes["pinned_host"]

    assert needed(P("x")) == 262144
    with pytest.warns(oo.OffloadWarning, match="1.00 MiB of host"):
        assert needed(P()) == 4 * 262144


def test_devices_that_are_not_attached(tmp_path, monkeypatch):
    """Their host is not this machine, but what they need is known."""
    machine(tmp_path, free_kib=1)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    mesh = jax.sharding.AbstractMesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    sharding = NamedSharding(mesh, P("x")).with_memory_kind("pinned_host")
    leaf = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)
    host = oo.memory_report({"mu": leaf}).host
    assert host.needed_bytes == {"pinned_host": 131072}
    assert host.limits == ()


def test_the_cap_of_the_gpu_plugin(tmp_path, monkeypatch):
    """State of GPUs is held to it, with what other arrays have pinned."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr(reporting, "_platforms_here", lambda x: {"gpu"})
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    leaf = jax.ShapeDtypeStruct((2**27,), jnp.float32)
    tree = {"mu": oo.set_memory_kind(leaf, ".*", "pinned_host")}
    records.settle()  # Arrays of other tests, which are still being moved.
    gc.collect()
    before = oo.memory_report(tree).host.limits[0].free_bytes
    other = oo.set_memory_kind(jnp.ones((256, 128)), ".*", "pinned_host")
    message = r"export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2$"
    bigger = jax.ShapeDtypeStruct((2**28,), jnp.float32)
    with pytest.warns(oo.OffloadWarning, match=message):
        report = oo.memory_report(bigger, oo.Rule("", "pinned_host"))
    assert report.host.limits[0].free_bytes == before - other.nbytes


@pytest.mark.parametrize(
    ("spec", "copies"), [(P(), 4), (P("x"), 2), (P(None, "y"), 2), (P("x", "y"), 1)]
)
@pytest.mark.parametrize("abstract", [False, True])
def test_copies_on_a_host(spec, copies, abstract):
    """A part of a leaf is in host memory once for each device that has it."""
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    there = NamedSharding(
        mesh.abstract_mesh if abstract else mesh, spec, memory_kind="pinned_host"
    )
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=there)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=there.update(spec=P()))
    report = oo.memory_report({"x": x, "scalar": scalar, "number": 3})
    rows = {row.path: row.copies_per_host for row in report.rows}
    assert rows == {"x": copies, "scalar": 4, "number": 1}
    assert report.totals_per_host["pinned_host"] == copies * 128 + 4 * 4
    assert report.host.distinct_bytes == {"pinned_host": 128 + 4}
    alone = oo.memory_report({"x": x})
    said = (
        f"pinned_host has {copies} copies of a leaf, one for each device that uses "
        "all of it; with one it would take 128 B: optax_offload.spread"
    )
    assert (said in str(alone)) == (copies > 1)
    assert alone.host.as_dict()["copies"] == {"pinned_host": copies}


def test_functions_are_no_leaves():
    """As of the optimizer itself, given for its state."""
    message = r"functions at 'init', 'update'\. .* memory_report\(tx\.init\(params\), r"
    with pytest.raises(TypeError, match=message):
        oo.memory_report(oo.offload(optax.adam(1e-3)))
