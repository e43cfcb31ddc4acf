"""Compiling for chips that are not there: arguments, shardings, options."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_programs import BOTH, BOTH_FOUR_DEVICES, DEVICE, HOST, descend, struct

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload.aot.compile import _output, mesh_of


@pytest.mark.aot
@BOTH_FOUR_DEVICES
def test_sharding(name):
    """Bytes are those of one device; what has no sharding is whole on each."""
    target = aot.Target(name)
    rows = struct((1024, 1024), target, P("x"))
    columns = NamedSharding(target.mesh(), P(None, "x"))
    compiled = aot.compile(
        lambda a, b: a + b,
        rows,
        struct((1024, 1024)),
        target=target,
        out_shardings=columns,
    )
    usage = aot.peak(compiled)
    assert usage.argument_bytes == 5 * MIB
    assert usage.output_bytes == MIB
    assert "all-to-all" in str(compiled.as_text())


@pytest.mark.aot
def test_shardings_of_a_step_on_devices_of_a_target():
    """Of which JAX takes no memory kinds; on its mesh it does."""
    target = aot.Target("h100")
    tx = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=0))
    state = oo.eval_shape(tx.init, struct((64, 64)))
    devices = jax.sharding.Mesh(np.array(target.devices), ("x",))

    def compiled(mesh):
        kinds = jax.tree.map(lambda x: "pinned_host" if x.shape else "device", state)
        shardings = jax.tree.map(
            lambda kind: NamedSharding(mesh, P(), memory_kind=kind), kinds
        )
        step = oo.jit(tx.update, in_shardings=(None, shardings), donate_argnums=(1,))
        return aot.compile(step, struct((64, 64)), state, target=target)

    assert aot.peak(compiled(target.mesh())).host_argument_bytes
    with pytest.raises(Exception, match="Give shardings on the mesh of"):
        compiled(devices)


@pytest.mark.aot
@BOTH_FOUR_DEVICES
def test_context_mesh(name):
    """In the function a bare PartitionSpec is of the target's mesh."""
    target = aot.Target(name)

    def shard(w):
        return jax.lax.with_sharding_constraint(w * 2.0, P("data"))

    mesh = target.mesh(("data",))
    w = struct((1024, 1024))
    assert aot.peak(aot.compile(shard, w, target=target, mesh=mesh)).output_bytes == MIB
    compiled = aot.compile(descend, w, target=target, out_shardings=P("x"))
    assert aot.peak(compiled).output_bytes == MIB


@pytest.mark.aot
@BOTH_FOUR_DEVICES
def test_arrays_as_arguments(name):
    """Arrays of this process's devices keep mesh, spec and memory kind."""
    target = aot.Target(name)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    on_device = jax.device_put(np.ones((1024, 1024), "f"), NamedSharding(mesh, P("a")))
    sharding = NamedSharding(mesh, P("a", "b"), memory_kind="pinned_host")
    on_host = jax.device_put(np.ones((1024, 1024), "f"), sharding)
    seen = []

    def fn(on_host, on_device, plain, numpy, scalar):
        seen.extend(map(str, map(jax.typeof, (on_host, on_device, plain))))
        return scalar * on_device + jax.device_put(on_host, DEVICE), plain + numpy

    plain, numpy = jnp.ones((256, 1024)), np.ones((256, 1024), "f")
    compiled = aot.compile(fn, on_host, on_device, plain, numpy, 2.0, target=target)
    assert seen == [
        "float32<host>[1024@a,1024@b]",
        "float32[1024@a,1024]",
        "float32[256,1024]",
    ]
    usage = aot.peak(compiled)
    assert usage.host_argument_bytes == MIB
    assert 4 * MIB <= usage.argument_bytes < 4.01 * MIB
    assert on_host.sharding.memory_kind == "pinned_host"  # It was not moved.


@pytest.mark.aot
def test_templates_as_arguments():
    """A template's kind counts, also on one device, as `set_memory_kind` makes them."""
    target = aot.Target("h100:4")
    one = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    sharding = NamedSharding(one, P(), memory_kind="pinned_host")
    template = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    key = jax.random.key(0)
    compiled = aot.compile(
        lambda t, key: jax.device_put(t, DEVICE) + jax.random.normal(key, t.shape),
        template,
        key,
        target=target,
    )
    assert aot.peak(compiled).host_argument_bytes == 4 * MIB


def test_the_mesh_is_that_of_the_first_leaf_on_as_many_devices():
    """One that is on fewer of them says nothing of the target; else its own."""
    target = aot.Target("h100:4")
    few, first, last = (
        jax.NamedSharding(jax.make_mesh((n,), (name,)), jax.P())
        for n, name in ((2, "few"), (4, "first"), (4, "last"))
    )
    assert mesh_of([few, first, last], target).axis_names == ("first",)
    assert mesh_of([few, 3], target) == target.mesh()


def test_a_result_is_moved_to_the_memory_that_its_sharding_stands_for():
    """An abstract mesh takes no kind for none, and would leave it on the host."""
    mesh = aot.Target("h100:4").mesh()
    on_host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    for given, kind in (
        (P("x"), "device"),
        (NamedSharding(mesh, P("x")), "device"),
        (on_host, "pinned_host"),
    ):
        found = _output(given, mesh)
        assert (found.memory_kind, found.spec) == (kind, P("x"))


def test_mesh_of_another_size():
    """Arguments on a mesh of another size are named, all at once, before compiling."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    w = jax.device_put(np.ones((4, 4), "f"), NamedSharding(mesh, P("x")))
    with pytest.raises(
        ValueError, match=r"'v5e:2x2' has 4 devices.*multiply to 4"
    ) as e:
        aot.compile(lambda p: p, {"w": w, "b": w}, target=aot.Target("v5e:2x2"))
    assert "argument '0/b' on" in str(e.value)
    assert "argument '0/w' on" in str(e.value)
    with pytest.raises(ValueError, match=r"output '0' on"):
        aot.compile(
            descend,
            struct((4, 4)),
            target=aot.Target("h100"),
            out_shardings=(w.sharding,),
        )


def test_mesh_argument_of_another_size():
    """A mesh for the arguments that is not of the target's size is an error."""
    with pytest.raises(ValueError, match=r"mesh=.* has 4 devices, 'h100' has 1"):
        aot.compile(
            descend,
            struct((4, 4)),
            target=aot.Target("h100"),
            mesh=aot.Target("h100:4").mesh(),
        )


def test_under_set_mesh():
    """Under a mesh of the process the function's context would be that mesh."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"under jax.set_mesh.*Call it outside"),
    ):
        aot.compile(descend, struct((4, 4)), target=aot.Target("h100"))


@pytest.mark.parametrize(
    "options",
    [{"donate_argnums": 0}, {"static_argnums": (1,)}, {"out_shardings": P()}],
)
def test_options_of_a_jitted_function(options):
    """A jitted function brings its options; a second set is an error."""
    with pytest.raises(ValueError, match=f"{next(iter(options))} cannot be given"):
        aot.compile(
            jax.jit(descend), struct((4, 4)), target=aot.Target("h100"), **options
        )


@pytest.mark.aot
@BOTH
def test_jitted_function(name):
    """A jitted function is compiled with its own donated and static arguments."""
    target = aot.Target(name)
    step = jax.jit(
        lambda w, mode: descend(w) if mode == "descend" else w,
        donate_argnums=0,
        static_argnums=1,
    )
    compiled = aot.compile(step, struct((1024, 1024)), "descend", target=target)
    assert aot.peak(compiled).peak_bytes == 4 * MIB


@pytest.mark.aot
def test_jitted_by_flax():
    """Flax wraps JAX's stages."""
    step = nnx.jit(descend, donate_argnums=0)
    compiled = aot.compile(step, struct((1024, 1024)), target=aot.Target("h100"))
    assert aot.peak(compiled).peak_bytes == 4 * MIB


@pytest.mark.aot
def test_static_arguments():
    """Static arguments of a plain function reach it as they are, from the end too.

    A target's name is enough.
    """

    def fn(w, config, times):
        assert (config, type(times)) == ({"scale": 2.0}, np.float32)
        return w

    class Config(dict):
        __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    w = struct((8, 128))
    config = Config(scale=2.0)
    times = np.float32(3)
    aot.compile(fn, w, config, times, target="h100", static_argnums=(1, -1))


@pytest.mark.aot
@BOTH_FOUR_DEVICES
def test_function_that_names_devices(name):
    """A function with devices of this process in it is an error that says the fix."""
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    step = jax.jit(descend, out_shardings=NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match=r"names devices of this process.*target.mesh"):
        aot.compile(step, struct((1024, 1024)), target=aot.Target(name))


@pytest.mark.aot
def test_linear_algebra():
    """What JAX gives to NVIDIA's libraries compiles without them."""
    compiled = aot.compile(jnp.linalg.qr, struct((64, 64)), target=aot.Target("h100"))
    assert "cusolver_geqrf_ffi" in str(compiled.as_text())


@pytest.mark.aot
def test_compiler_options():
    """XLA's own options reach the compiler."""
    options = {"xla_tpu_max_hbm_size_mib": 1}
    with pytest.raises(aot.DoesNotFitError):
        aot.compile(
            descend,
            struct((1024, 1024)),
            target=aot.Target("v5e"),
            compiler_options=options,
        )


def host_and_device(on_host, on_device):
    """A result that stays on the host, one stored there, one on the device."""
    twice = jax.device_put(jax.device_put(on_host, DEVICE) * 2, HOST)
    return on_host, twice, on_device * 2


@pytest.mark.aot
@BOTH
@pytest.mark.parametrize(
    ("how", "on_host"),
    [("none", 2), ("no kind", 0), ("bare", 0), ("device", 0), ("pinned_host", 3)],
)
def test_kinds_of_results(name, how, on_host):
    """As JAX has it on attached devices: a sharding without a kind means the device.

    The same function is run on the CPU with the same shardings.
    """

    def shardings(mesh):
        kind = how if how in ("device", "pinned_host") else None
        named = NamedSharding(mesh, P(), memory_kind=kind)
        return {"none": None, "bare": P()}.get(how, named)

    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    args = [
        jax.device_put(np.ones((1024, 1024), "f"), sharding)
        for sharding in (host, NamedSharding(mesh, P()))
    ]
    options = {"out_shardings": shardings(mesh)} if how != "none" else {}
    with jax.set_mesh(mesh):
        results = jax.jit(host_and_device, **options)(*args)
    kinds = [x.sharding.memory_kind for x in results]
    assert kinds.count("pinned_host") == on_host

    target = aot.Target(name)
    compiled = aot.compile(
        host_and_device, *args, target=target, out_shardings=shardings(target.mesh())
    )
    assert aot.peak(compiled).host_output_bytes == on_host * 4 * MIB


@pytest.mark.aot
def test_sharding_of_this_process_for_results():
    """A sharding on a device of this process stands for one on the target."""
    target = aot.Target("h100")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    args = struct((1024, 1024), target, kind="pinned_host"), struct((1024, 1024))
    compiled = aot.compile(host_and_device, *args, target=target, out_shardings=here)
    assert aot.peak(compiled).host_output_bytes == 0


@pytest.mark.aot
def test_what_is_no_sharding_is_for_jax_to_refuse():
    """What is given for a sharding and is none reaches JAX as it is."""
    with pytest.raises(
        TypeError, match="PartitionSpec instances or None, but got device"
    ):
        aot.compile(
            descend, struct((8, 8)), target=aot.Target("h100"), out_shardings="device"
        )
