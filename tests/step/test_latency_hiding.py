"""What compilers for GPUs are told of a scheduler and of graphs, and which are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from limited import limited
from small_steps import train_step, unrolled

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground import compat
from optax_offload._step import machine
from optax_offload._step.machine import (
    GRAPHS,
    IN_FLIGHT,
    MANY_IN_FLIGHT,
    NO_COPIES,
    OFF,
    ON,
    SCHEDULER,
    Machine,
    compiling_for,
    machine_of,
)

LAYERS, WIDTH = 3, 128
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def step_of(loss):
    """A train step with its optimizer."""
    tx = oo.offload(optax.adam(1e-3))
    return train_step(tx, loss), tx


def scanned(params, x):
    """Layers in a scan, which loads a row in each iteration."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean(x**2)


def offloading(params, x):
    """Layers in a loop, whose checkpoints are the model's own transfers."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "y"))

    for w in params:
        x = layer(x, w)
    return jnp.mean(x**2)


def args_of(loss, at_rest=True):
    """Arguments of a step, parameters at rest or on the device."""
    if loss is scanned:
        params = jnp.ones((LAYERS, WIDTH, WIDTH))
    else:
        params = [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]
    step, tx = step_of(loss)
    state = tx.init(params)
    if at_rest:
        params = oo.set_memory_kind(params, ".*", "pinned_host")
    return step, (params, state, jnp.ones((4, WIDTH)))


def told(jitted, args, platform="gpu", devices=1):
    """What the compiler for such a machine is told of its scheduler; None: nothing."""
    with compiling_for(platform, devices):
        lowered = jitted.trace(*args).lower()
    return aot.compilers.own_options(lowered).get(SCHEDULER)


@pytest.mark.parametrize(
    ("loss", "at_rest", "on"),
    [
        (unrolled, True, False),
        (unrolled, False, None),
        (scanned, True, True),
        (scanned, False, True),
        (offloading, True, None),
    ],
)
def test_where_transfers_are_hidden(loss, at_rest, on):
    """On where scans move rows, off where loads lie between operations alone.

    The schedule, which is all that `oo.stream` has, says the latter.
    """
    step, args = args_of(loss, at_rest)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    assert told(jitted, args) is on
    off = on is False
    assert (f"{SCHEDULER}=False" in str(jitted.schedule(*args))) == off


def test_a_large_update_outside_of_scans_leaves_it_to_the_compiler():
    """Its gradients would be kept over the transfers of others."""
    tx = oo.offload(optax.trace(0.9), oo.Rule(".*", min_bytes=0))

    def loss(params, x):
        return scanned(params["layers"], x @ params["embed"])

    step = train_step(tx, loss)
    params = {
        "embed": jnp.ones((2**11, WIDTH)),
        "layers": jnp.ones((LAYERS, WIDTH, WIDTH)),
    }
    jitted = oo.jit(step, donate_argnums=(0, 1))
    args = params, tx.init(params), jnp.ones((4, 2**11))
    assert told(jitted, args) is None


def test_transfers_are_hidden_in_turns_of_layers_that_no_scan_runs(monkeypatch):
    """Their loads are in the turn before: else a compiler may wait (F83)."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, least_segments=3, segment_bytes=WIDTH * WIDTH * 4)
    step, args = args_of(unrolled)
    jitted = oo.jit(step, donate_argnums=(0, 1))
    assert jitted.schedule(*args).chain is not None
    assert told(jitted, args) is True


def test_many_copies_may_be_in_flight_between_turns(monkeypatch):
    """Where much is moved: two of a compiler's hold up those after them (F15)."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    monkeypatch.setattr(compat, "GRAPHS_OVERLAP", True)
    limited(monkeypatch, least_segments=3, segment_bytes=WIDTH * WIDTH * 4)

    def found(loss, **options):
        step, args = args_of(loss)
        with compiling_for("gpu", 1):
            lowered = oo.jit(step, **options).trace(*args).lower()
        return aot.compilers.own_options(lowered)

    assert found(unrolled) == ON
    limited(monkeypatch, much_in_all_bytes=1)
    assert found(unrolled) == ON | MANY_IN_FLIGHT
    limited(monkeypatch, much_in_all_bytes=2**31, much_in_a_turn_bytes=1)
    assert found(unrolled) == ON | MANY_IN_FLIGHT
    assert found(scanned) == ON
    given = {IN_FLIGHT: 4}
    assert found(unrolled, compiler_options=given) == ON | given
    monkeypatch.setenv("XLA_FLAGS", f"--{IN_FLIGHT}=4")
    assert found(unrolled) == ON


@pytest.mark.newest
def test_what_is_loaded_whole_is_used_up_before_the_scan():
    """Else a table would be there for as long: the loss can be computed last (F83)."""

    def fn(params, x):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean((y @ params["head"]) ** 2)

    params = {
        "head": jnp.ones((WIDTH, 2**11)),
        "layers": jnp.ones((6, WIDTH, WIDTH)),
    }
    at_rest = oo.set_memory_kind(params, ".*", "pinned_host")
    args = at_rest, jnp.ones((4, WIDTH))
    jitted = oo.jit(jax.value_and_grad(fn))
    assert told(jitted, args) is True
    with compiling_for("gpu", 1):
        text = jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"optimization_barrier .*: (.*, )?tensor<f32>", text)


@pytest.mark.parametrize(
    ("platform", "devices"), [("cpu", 1), ("tpu", 1), ("tpu", 4), ("gpu", 4)]
)
def test_other_machines_are_told_nothing(platform, devices):
    """It is a GPU's option, and to turn it off a choice on several GPUs."""
    step, args = args_of(unrolled)
    assert told(oo.jit(step), args, platform, devices) is None
    step, args = args_of(scanned)
    assert told(oo.jit(step), args, platform, devices) is (platform == "gpu" or None)


@pytest.mark.parametrize("asked", ["on", "off"])
def test_what_is_asked_for(asked):
    """Of any number of GPUs, and of nothing else."""
    step, args = args_of(unrolled, at_rest=False)
    jitted = oo.jit(step, latency_hiding=asked)
    for devices in (1, 4):
        assert told(jitted, args, "gpu", devices) == (asked == "on")
    for platform in ("cpu", "tpu"):
        assert told(jitted, args, platform) is None


def test_options_of_the_user_stand(monkeypatch):
    """Those of the function beside ours, and XLA's flags where nothing is asked."""
    step, args = args_of(unrolled)
    others = {"xla_embed_ir_in_executable": False}
    jitted = oo.jit(step, compiler_options=others)
    with compiling_for("gpu", 1):
        lowered = jitted.trace(*args).lower()
    found = aot.compilers.own_options(lowered)
    assert {k: x for k, x in found.items() if k != GRAPHS} == others | OFF
    for asked in ("auto", "off"):
        given = {SCHEDULER: True}
        jitted = oo.jit(step, compiler_options=given, latency_hiding=asked)
        assert told(jitted, args) is True
    monkeypatch.setenv("XLA_FLAGS", f"--{SCHEDULER}=true")
    assert told(oo.jit(step), args) is None
    assert told(oo.jit(step, latency_hiding="off"), args) is False


def test_unknown_value():
    """As of the other options."""
    message = r"latency_hiding is 'no'; it must be one of 'auto', 'on', 'off'"
    with pytest.raises(ValueError, match=message):
        oo.jit(lambda x: x, latency_hiding="no")


def test_a_traced_target_is_not_what_is_called():
    """A step that was traced for a GPU runs here as it would have."""
    step, args = args_of(unrolled)
    jitted = oo.jit(step)
    want = jitted(*args)
    assert told(jitted, args) is False
    assert told(jitted, args, "tpu", 4) is None
    got = jitted(*args)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert aot.compilers.own_options(jitted.lower(*args)) == {}


def test_calls_on_a_gpu(monkeypatch):
    """A call is compiled with the option, once, and inside another jit without."""
    monkeypatch.setattr(machine, "may_be_a_gpu", lambda: True)
    monkeypatch.setattr(machine, "_GPUS", ("cpu",))
    monkeypatch.setattr(compat, "GRAPHS_OVERLAP", True)
    step, args = args_of(unrolled)
    traces = []

    def counted(*args):
        traces.append(args)
        return step(*args)

    jitted = oo.jit(counted, latency_hiding="auto")
    want = oo.jit(step, latency_hiding="on")(*args)
    for got in [jitted(*args) for _ in range(3)]:
        jax.tree.map(np.testing.assert_array_equal, want, got)
    assert len(traces) == 1
    assert aot.compilers.own_options(jitted.lower(*args)) == OFF
    # Where it can hide nothing no longer, it is on again.
    assert aot.compilers.own_options(jitted.lower(*args_of(unrolled, False)[1])) == {}
    step, args = args_of(unrolled, at_rest=False)
    jitted = oo.jit(step, latency_hiding="off")
    assert aot.compilers.own_options(jitted.lower(*args)) == OFF
    outer = jax.jit(lambda *args: jitted(*args))
    assert aot.compilers.own_options(outer.lower(*args)) == {}
    outer(*args)


def test_the_machine_of_a_call():
    """By where arguments are, then by the mesh around, then by the default device."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    x = jnp.ones(8)
    assert machine_of(()) == machine_of((x, "a name", 1)) == Machine("cpu", 1)
    assert machine_of((x, jax.device_put(x, devices[1]))) == Machine("cpu", 1)
    assert machine_of((x, jax.device_put(x, sharding))) == Machine("cpu", 4)
    assert machine_of({"in_shardings": sharding}) == Machine("cpu", 4)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert machine_of((struct,)) == Machine("cpu", 4)
    abstract = NamedSharding(aot.Target("h100:4").mesh(), P("x"))
    assert machine_of((struct.update(sharding=abstract),)) == Machine("cpu", 1)
    with jax.set_mesh(mesh):
        assert machine_of((x,)) == Machine("cpu", 4)
    with jax.default_device(devices[1]):
        assert machine_of(()) == Machine("cpu", 1)
    with compiling_for("gpu", 8):
        assert machine_of((x,)) == Machine("gpu", 8)


def test_a_call_is_for_as_many_devices_as_its_largest_leaf():
    """Whatever comes first."""
    four = NamedSharding(jax.make_mesh((4,), ("x",)), P("x"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert machine_of([]).devices == 1
    assert machine_of([four, one]) == machine_of([one, four]) == Machine("cpu", 4)


def test_what_a_user_gives_stands():
    """Each option that is given, beside those that are not."""
    gpu, estimator = Machine("cuda", 1), next(x for x in OFF if x != SCHEDULER)
    given = {estimator: True, "xla_another": 1}
    found = machine.compiler_options(given, "off", OFF, gpu)
    assert found == {SCHEDULER: False, **given}
    given = {SCHEDULER: True}
    assert machine.compiler_options(given, "off", OFF, gpu) is None
    given = {GRAPHS: ""}
    assert machine.compiler_options(given, "auto", NO_COPIES, gpu) is None
    tpu = Machine("tpu", 1)
    assert machine.compiler_options(None, "off", OFF, tpu) is None


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_copies_are_in_no_graph_that_is_a_chain(monkeypatch, loss, devices):
    """Before JAX 0.12, where anything rests on the host (F79)."""
    for overlap, at_rest in [(False, True), (True, True), (False, False)]:
        monkeypatch.setattr(compat, "GRAPHS_OVERLAP", overlap)
        step, args = args_of(loss, at_rest)
        if not at_rest:
            step, args = loss, (args[0], args[2])
        with compiling_for("gpu", devices):
            lowered = oo.jit(step).trace(*args).lower()
        found = aot.compilers.own_options(lowered) or {}
        expected = NO_COPIES if at_rest and not overlap else {}
        assert {k: x for k, x in found.items() if k == GRAPHS} == expected


def test_graphs_that_a_user_asks_for_stand(monkeypatch):
    """In XLA's flags, or among the options of the function."""
    monkeypatch.setattr(compat, "GRAPHS_OVERLAP", False)
    step, args = args_of(scanned)
    given = {GRAPHS: "FUSION"}
    with compiling_for("gpu", 1):
        lowered = oo.jit(step, compiler_options=given).trace(*args).lower()
    assert aot.compilers.own_options(lowered) == ON | given
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=-FUSION")
    with compiling_for("gpu", 1):
        lowered = oo.jit(step).trace(*args).lower()
    assert GRAPHS not in (aot.compilers.own_options(lowered) or {})
