"""Values stay in their memory, whatever in_shardings and out_shardings say of it."""

import contextlib
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close, kinds
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._step import shardings

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RULES = r".*/(mu|nu)/.*"
TX = oo.offload(optax.adamw(1e-2), RULES, on_misplaced="move")


def mesh_of(axis_type=AxisType.Auto):
    """All devices along one axis."""
    return Mesh(np.array(jax.devices()), ("x",), axis_types=(axis_type,))


def init(key):
    """Parameters, and state of which two leaves are to be on the host."""
    params = {"w": jax.random.normal(key, (256, 128)), "b": jnp.zeros(128)}
    return params, TX.init(params)


def step(carry):
    """An update of both."""
    params, state = carry
    updates, state = TX.update(params, state, params)
    return optax.apply_updates(params, updates), state


def shardings_of_a_trainer(mesh):
    """As from `jax.eval_shape`: they name no memory."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, P("x") if x.ndim == 2 else P()),
        jax.eval_shape(init, jax.random.key(0)),
    )


def train(jit, shardings, steps=3):
    """Some steps as a trainer makes them; the jitted step, and what is left."""
    carry = jit(init, out_shardings=shardings)(jax.random.key(0))
    jitted = jit(
        step, in_shardings=(shardings,), out_shardings=shardings, donate_argnums=0
    )
    for _ in range(steps):
        carry = jitted(carry)
    return jitted, carry


@pytest.mark.filterwarnings("ignore:state planned for pinned_host")
@pytest.mark.parametrize("prefix", ["tree", "per-argument", "one"])
def test_a_trainers_shardings_keep_the_state_on_the_host(prefix):
    """With `jax.jit` it is on the device after every step; compiled once."""
    mesh = mesh_of()
    shardings = shardings_of_a_trainer(mesh)
    if prefix == "per-argument":
        shardings = (NamedSharding(mesh, P()), shardings[1])
    if prefix == "one":
        shardings = NamedSharding(mesh, P())
    step, carry = train(oo.jit, shardings)
    oo.memory_report(carry, RULES, under="1").check()
    assert kinds(carry[1]).count("pinned_host") == 2
    assert step._cache_size() == 1
    _, plain = train(jax.jit, shardings)
    assert kinds(plain[1]).count("pinned_host") == 0
    assert_close(carry, plain, rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda a, b: (
            a.sharding.is_equivalent_to(
                b.sharding.with_memory_kind(a.sharding.memory_kind), a.ndim
            )
            or pytest.fail(f"{a.sharding} {b.sharding}")
        ),
        carry,
        plain,
    )


@pytest.mark.parametrize("named", ["nothing", "device", "right"])
def test_a_named_device_is_like_no_name(named):
    """JAX itself does not tell them apart, so both are how a value is sharded."""
    kind = {"nothing": None, "device": "device", "right": "pinned_host"}[named]
    sharding = NamedSharding(mesh_of(), P("x"), memory_kind=kind)
    x = jax.device_put(jnp.ones((8, 8)), sharding.with_memory_kind("pinned_host"))
    same = oo.jit(lambda x: x, in_shardings=sharding, out_shardings=sharding)
    assert kinds(same(x)) == ["pinned_host"]
    assert same(x).sharding == x.sharding
    moved = oo.jit(lambda x: jax.device_put(x, DEVICE) + 1, in_shardings=sharding)
    assert kinds(moved(x)) == ["device"]


def test_a_host_memory_that_only_out_shardings_name_warns():
    """The result stays where the function left it, and the warning names it."""
    host = NamedSharding(mesh_of(), P("x"), memory_kind="pinned_host")
    make = oo.jit(lambda x: {"a": x, "b": None}, out_shardings=host)
    with pytest.warns(oo.OffloadWarning, match=r"host memory .* stay: 'a'\. Move them"):
        result = make(jnp.ones((8, 8)))
    assert kinds(result) == ["device"]


def test_shardings_within_other_entries():
    """None, partition specs under a mesh, and layouts."""
    mesh = mesh_of()
    rows = NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.ones((8, 8)), rows.with_memory_kind("pinned_host"))
    with jax.set_mesh(mesh):
        specs = oo.jit(
            lambda x, y: (x, y), in_shardings=(P("x"), None), out_shardings=P("x")
        )
        for _ in range(2):
            assert kinds(specs(x, jnp.ones(8))) == ["pinned_host", "device"]
        assert specs._cache_size() == 1
    layout = Format(Layout((0, 1)), rows)
    formats = oo.jit(lambda x: x, in_shardings=layout, out_shardings=layout)
    assert kinds(formats(x)) == ["pinned_host"]


def test_partition_specs_follow_the_mesh_that_is_set():
    """Also after a call under another one."""
    twice = oo.jit(lambda x: x, in_shardings=P("x"), out_shardings=P("x"))
    for devices in (jax.devices(), jax.devices()[:4], jax.devices()):
        mesh = Mesh(np.array(devices), ("x",))
        sharding = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
        x = jax.device_put(jnp.ones((8, 8)), sharding)
        with jax.set_mesh(mesh):
            assert twice(x).sharding == sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_with_a_mesh_that_is_set(axis_type):
    """In Auto and in Explicit mode."""
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params = jax.device_put(
            {"w": jnp.ones((256, 128))}, NamedSharding(mesh, P("x"))
        )
        carry = params, TX.init(params)
        jitted = oo.jit(lambda state, params: step((params, state)), donate_argnums=0)
        for _ in range(3):
            params, state = jitted(carry[1], carry[0])
            carry = params, state
    oo.memory_report(carry, RULES, under="1").check()
    assert kinds(params) == ["device"]


@contextlib.contextmanager
def compilations():
    """The names of functions that are compiled meanwhile."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            if found := re.match(
                r"Finished XLA compilation of jit\((\w+)\)", record.getMessage()
            ):
                names.append(found[1])

    logger, handler = logging.getLogger("jax"), Handler()
    with jax.log_compiles(True):
        logger.addHandler(handler)
        propagates, logger.propagate = logger.propagate, False
        try:
            yield names
        finally:
            logger.propagate = propagates
            logger.removeHandler(handler)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("named", [True, False])
def test_a_restored_plain_checkpoint_is_one_more_compilation(named):
    """Then the state is on the host again, and the step that was compiled goes on."""
    rows = NamedSharding(mesh_of(), P("x"))
    options = {"in_shardings": rows, "out_shardings": rows} if named else {}

    @oo.jit(donate_argnums=0, **options)
    def step(state, x):
        return jax.device_put(jax.device_put(state, DEVICE) + x, HOST)

    x, state = jax.device_put((jnp.ones((8, 8)), jnp.zeros((8, 8))), rows)
    state = jax.device_put(state, rows.with_memory_kind("pinned_host"))
    step(jnp.copy(state), x)
    with compilations() as count:
        for _ in range(2):
            state = step(state, x)
    assert count == []
    plain = jax.device_put(state, rows)
    with compilations() as count:
        state = step(plain, x)
    assert count == ["step"]
    with compilations() as count:
        for _ in range(4):
            state = step(state, x)
    assert count == []
    np.testing.assert_array_equal(state, 7.0)
    assert kinds(state) == ["pinned_host"]


def test_the_function_is_traced_once_for_each_signature():
    """Also when the shardings turn out to name other memories than it has."""
    traces = []

    def same(x):
        traces.append(x.shape)
        return x

    rows = NamedSharding(mesh_of(), P("x"))
    jitted = oo.jit(same, in_shardings=rows, out_shardings=rows)
    for n in (8, 16, 8):
        x = jax.device_put(jnp.ones((n, 8)), rows.with_memory_kind("pinned_host"))
        jitted(x)
        jitted.lower(x)
        jitted(jax.device_put(x, rows))
    assert traces == [(8, 8), (8, 8), (16, 8), (16, 8)]


def test_within_another_jit():
    """The inner one's shardings move nothing either."""
    rows = NamedSharding(mesh_of(), P("x"))
    inner = oo.jit(lambda x: x, out_shardings=rows, donate_argnums=0)
    x = jax.device_put(jnp.ones((8, 8)), rows.with_memory_kind("pinned_host"))
    assert kinds(jax.jit(lambda x: inner(x))(x)) == ["pinned_host"]
    assert kinds(inner(x)) == ["pinned_host"]


@pytest.mark.filterwarnings("ignore:backend and device argument")
def test_device_and_backend_are_refused_for_host_values():
    """`jax.jit` moves them to the device; without host values both are as of it."""
    device = jax.devices()[1]
    assert oo.jit(lambda x: x + 1, device=device)(1.0).devices() == {device}
    keep = oo.jit(lambda x: {"mu": jax.device_put(x["mu"], HOST)}, device=device)
    with pytest.raises(
        ValueError, match=r"these are in host memory: 'result mu'\. Leav"
    ):
        keep({"mu": jnp.ones(8)})
    with pytest.raises(ValueError, match=r"'argument 0/mu', 'result mu'"):
        keep({"mu": jax.device_put(jnp.ones(8), HOST)})


def test_jaxs_own_errors_of_shardings():
    """A prefix that is none, keyword arguments, and a sharding of another rank."""
    rows = NamedSharding(mesh_of(), P("x"))
    x = jax.device_put(jnp.ones((8, 8)), rows)
    messages = []
    for jit in (oo.jit, jax.jit):
        for options, args, kwargs in [
            ({"out_shardings": {"b": rows}}, (x,), {}),
            ({"in_shardings": (rows, rows)}, (x,), {}),
            ({"in_shardings": rows}, (), {"x": x}),
            ({"out_shardings": NamedSharding(mesh_of(), P(None, None, "x"))}, (x,), {}),
            ({"in_shardings": NamedSharding(mesh_of(), P(None, "x"))}, (x,), {}),
            ({"in_shardings": SingleDeviceSharding(jax.devices()[0])}, (x,), {}),
        ]:
            with pytest.raises(ValueError, match=r"\w") as error:
                jit(lambda x: {"a": x}, **options)(*args, **kwargs)
            messages.append(str(error.value))
    half = len(messages) // 2
    assert messages[:half] == messages[half:]


def test_lists_are_taken_as_jax_takes_them():
    """Of in_shardings one stands for a tuple; of out_shardings it is JAX's error."""
    replicated = NamedSharding(mesh_of(), P())
    host = jax.device_put(jnp.ones((8, 8)), replicated.with_memory_kind("pinned_host"))

    def add(state, x):
        return (jax.device_put(state, DEVICE) + x, state)

    x = jax.device_put(jnp.ones((8, 8)), replicated)
    given = oo.jit(add, in_shardings=[replicated, replicated])(host, x)
    assert kinds(given) == ["device", "pinned_host"]
    both: Any = {"in_shardings": [replicated] * 2, "out_shardings": [replicated] * 2}
    for jit in (jax.jit, oo.jit):
        with pytest.raises(ValueError, match="prefix pytree pjit out_shardings has"):
            jit(add, **both)(host, x)


def test_which_host_memory_is_what_a_sharding_says():
    """A type says only on which side a value is: a sharding for that side stays."""
    device, pinned, unpinned = (
        NamedSharding(mesh_of(), P("x"), memory_kind=kind)
        for kind in ("device", "pinned_host", "unpinned_host")
    )
    given = {"a": unpinned, "b": pinned, "c": device, "d": None}
    on_host = dict.fromkeys(given, "pinned_host")
    wanted = {"a": unpinned, "b": pinned, "c": pinned, "d": None}
    assert shardings.with_kinds(given, on_host) == wanted
    assert not shardings.fit(given, on_host)
    assert shardings.fit(wanted, on_host)
    assert shardings.asked_for_host(given, on_host) == []
    on_device = dict.fromkeys(given, "device")
    assert shardings.asked_for_host(given, on_device) == ["a", "b"]
    wanted = {"a": device, "b": device, "c": device, "d": None}
    assert shardings.with_kinds(given, on_device) == wanted


@pytest.mark.parametrize("tx", [optax.adam(1e-2), TX], ids=["plain", "offloaded"])
@pytest.mark.parametrize("first", [P(), P("x")], ids=["whole", "in parts"])
def test_a_step_says_how_parameters_at_rest_are_spread(first, tx):
    """They are so after it, as those are that are on the device."""
    mesh = mesh_of()
    other = NamedSharding(mesh, P("x") if first == P() else P())
    old = jax.device_put(jnp.ones((256, 128)), NamedSharding(mesh, first))
    at_rest = oo.set_memory_kind({"w": old}, ".*", "pinned_host")

    def fn(params, state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return jax.lax.with_sharding_constraint(new, other), state

    x = jnp.ones((8, 256))
    new, _ = oo.jit(fn)(at_rest, tx.init(at_rest), x)
    want, _ = jax.jit(fn)({"w": old}, tx.init({"w": old}), x)
    assert want["w"].sharding.spec == other.spec
    assert new["w"].sharding.spec == other.spec
    assert new["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(new["w"], want["w"], rtol=1e-6)
