"""`optax_offload.aot`: what a target is, what is compiled for it, and what is read.

The tests marked `aot` compile with the real compilers (the extra `aot`).
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_offload import aot
from optax_offload.aot import targets

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
MIB = 2**20
BOTH = pytest.mark.parametrize("name", ["h100", "v5e"])
BOTH_FOUR_DEVICES = pytest.mark.parametrize("name", ["h100:4", "v5e:2x2"])


def missing_compilers() -> str:
    """Why nothing can be compiled here; empty if it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the compilers' wheels exist for Linux on x86-64 only"
    absent = [m for m in ("libtpu", "jax_plugins") if not importlib.util.find_spec(m)]
    return f"not installed (extra aot): {', '.join(absent)}" if absent else ""


@pytest.fixture(autouse=True)
def compilers(request):
    """Skips a test that compiles where it cannot."""
    if request.node.get_closest_marker("aot") and (reason := missing_compilers()):
        pytest.skip(reason)


def struct(shape, target=None, spec=None, kind=None, dtype=jnp.float32):
    """A `ShapeDtypeStruct`, on the target's mesh if there is a target."""
    if target is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(target.mesh(), spec or P(), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def load_add_store(on_host, on_device):
    """A load, an addition and a store."""
    return jax.device_put(jax.device_put(on_host, DEVICE) + on_device, HOST)


def descend(w):
    """An elementwise update."""
    return w - 0.1 * jnp.tanh(w)


# Targets.


@pytest.mark.parametrize(
    ("name", "normal", "kind", "device_count"),
    [
        ("v4", "v4:1x1x1", "tpu", 1),
        ("v5e", "v5e:1x1", "tpu", 1),
        ("v5e:16x16", "v5e:16x16", "tpu", 256),
        ("v5p:2x2x2", "v5p:2x2x2", "tpu", 8),
        ("v6e:2x4", "v6e:2x4", "tpu", 8),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", "tpu", 8),
        ("h100", "h100", "gpu", 1),
        ("h100:1", "h100", "gpu", 1),
        ("b200:16", "b200:16", "gpu", 16),
    ],
)
def test_target_names(name, normal, kind, device_count):
    """A name says the chip and how many; equal targets are equal and hash alike."""
    target = aot.Target(name)
    assert (target.name, target.platform, target.device_count) == (
        normal,
        kind,
        device_count,
    )
    assert target == aot.Target(normal)
    assert hash(target) == hash(aot.Target(normal))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v7", r"Target\('v7'\) names no chip.*v5e.*'v5e:2x4'.*a100-40.*'h100:8'"),
        ("a100", "names no chip.*a100-40, a100-80"),
        ("v5e-4", "names no chip"),
        ("h100:2x2", "names no chip"),
        ("", "names no chip"),
        ("v5e:4", "a v5e are a grid of 2 dimensions, as in 'v5e:2x2'"),
        ("v5p:2x2", "a v5p are a grid of 3 dimensions, as in 'v5p:2x2x4'"),
        ("v5e:0x2", "a grid of 2 dimensions"),
        ("h100:0", "0 GPUs; allowed are 1 to 8, or whole hosts of 8"),
        ("h100:12", "12 GPUs; allowed are 1 to 8, or whole hosts of 8"),
    ],
)
def test_target_name_errors(name, message):
    """A name that cannot be is an error that says what can."""
    with pytest.raises(ValueError, match=message):
        aot.Target(name)


@pytest.mark.parametrize("memory_bytes", [0, -1, 2**40])
def test_target_memory_errors(memory_bytes):
    """A target's memory can only be set smaller."""
    with pytest.raises(ValueError, match=r"memory_bytes=.*h100 has 84942979072 bytes"):
        aot.Target("h100", memory_bytes=memory_bytes)


def test_target_memory():
    """A target knows the memory of a device, its chip's or a smaller one."""
    assert aot.Target("v5e:2x2").memory_bytes == 2**34 - 258 * MIB
    assert aot.Target("h100", memory_bytes=2**34).memory_bytes == 2**34


def test_mesh():
    """A target's mesh is abstract and over all its devices."""
    target = aot.Target("v5e:2x4")
    assert target.mesh().shape_tuple == (("x", 8),)
    assert target.mesh(("a", "b")).shape_tuple == (("a", 8), ("b", 1))
    mesh = target.mesh(("a", "b"), shape=(2, 4), axis_types=AxisType.Explicit)
    assert mesh.shape_tuple == (("a", 2), ("b", 4))
    assert mesh.axis_types == (AxisType.Explicit,) * 2


@pytest.mark.parametrize("shape", [(2, 2), (8,)])
def test_mesh_errors(shape):
    """A mesh that leaves devices out, or whose axes do not match, is an error."""
    with pytest.raises(ValueError, match=r"not one of the 8 devices.*multiply to 8"):
        aot.Target("v5e:2x4").mesh(("a", "b"), shape=shape)


# Peak, without compiling.


def test_peak_text():
    """The text of a peak is the sum, and the host's only where there is any."""
    usage = aot.Peak(5 * MIB, 512, 3 * MIB, 2 * MIB, 0, 0, 0, 0)
    assert usage.peak_bytes == 6 * MIB + 512
    assert str(usage) == (
        "peak 6.00 MiB = arguments 5.00 MiB + temporaries 512 B + outputs 3.00 MiB"
        " - aliased 2.00 MiB"
    )
    usage = aot.Peak(0, 0, 0, 0, 2**32, 0, 2**32, 2**31)
    assert usage.host_peak_bytes == 6 * 2**30
    assert str(usage).splitlines()[1] == (
        "host 6.00 GiB = arguments 4.00 GiB + temporaries 0 B + outputs 4.00 GiB"
        " - aliased 2.00 GiB"
    )


def test_peak_of_a_platform_that_does_not_say():
    """A program without memory analysis is an error, not a peak of zero."""
    silent = types.SimpleNamespace(memory_analysis=lambda: None)
    with pytest.raises(ValueError, match=r"memory_analysis\(\).*is None.*aot.compile"):
        aot.peak(silent)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("message", "used_bytes", "limit_bytes"),
    [
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.",
            20.5 * 2**30,
            15.75 * 2**30,
        ),
        (
            "the total memory required for HLO temporaries (512.00M) exceeds available "
            "HBM (100.00M). HLO module: jit_f.",
            512 * MIB,
            100 * MIB,
        ),
        (
            "Aborting compilation early because it's unlikely to have enough memory. "
            "Requires 3.5T, has 90.5G available.",
            3.5 * 2**40,
            90.5 * 2**30,
        ),
        (
            "TPU TensorCore Hbm usage: 34.5G, SparseCore Hbm usage 174.10G, exceeding "
            "available bytes: 95.5G",
            34.5 * 2**30,
            95.5 * 2**30,
        ),
    ],
)
def test_compiler_messages(message, used_bytes, limit_bytes):
    """The TPU compiler's numbers are read, in each of its wordings."""
    target = aot.Target("v5e")
    error = aot._does_not_fit(target, f"RESOURCE_EXHAUSTED: {message}")
    assert error is not None
    assert (error.used_bytes, error.limit_bytes) == (used_bytes, limit_bytes)
    assert message in str(error)
    assert "'v5e:1x1'" in str(error)


def test_other_compiler_messages():
    """Running out of another memory than HBM is not taken for a program's size."""
    message = "Ran out of memory in memory space vmem. Used 20.1M of 16.0M vmem."
    assert aot._does_not_fit(aot.Target("v5e"), message) is None


# Missing wheels.


def test_missing_libtpu(monkeypatch):
    """Without libtpu the error is the line that installs the version JAX asks for."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'v5e:8x16' needs the wheel libtpu") as e:
        _ = aot.Target("v5e:8x16").devices
    assert 'pip install "optax-offload[aot]"' in str(e.value)
    assert "pip install 'libtpu==" in str(e.value)
    assert f"jax {jax.__version__} asks for" in str(e.value)


def test_missing_cuda_plugin(monkeypatch):
    """Without the CUDA plugin the error is the line that installs JAX's version."""
    monkeypatch.setattr(targets, "_load_cuda_plugin", lambda: None)
    with pytest.raises(ImportError, match=r"'h100' needs the wheel jax-cuda13") as e:
        _ = aot.Target("h100", memory_bytes=3 * 2**30).devices
    assert 'pip install "optax-offload[aot]"' in str(e.value)
    assert f"pip install 'jax-cuda13-plugin<={jax.__version__}" in str(e.value)


# Compiling.


@pytest.mark.aot
@pytest.mark.parametrize("name", [*targets.GPUS, *targets.TPUS, "h100:16", "v5e:4x4"])
def test_every_chip(name):
    """There is a compiler for every chip, and for several hosts of it."""
    target = aot.Target(name)
    assert len(target.devices) == target.device_count
    compiled = aot.compile(jnp.tanh, struct((1024, 1024)), target=target)
    usage = aot.peak(compiled)
    assert (usage.argument_bytes, usage.output_bytes) == (4 * MIB, 4 * MIB)


@pytest.mark.aot
def test_unknown_slice():
    """A grid that libtpu does not know is an error with libtpu's reason."""
    with pytest.raises(ValueError, match=r"cannot describe.*'v5e:3x3'.*not divisible"):
        _ = aot.Target("v5e:3x3").devices


@pytest.mark.aot
@BOTH
def test_peak_by_hand(name):
    """Host bytes are exactly those of the offloaded array, and reused by its result."""
    target = aot.Target(name)
    on_host = struct((1024, 1024), target, kind="pinned_host")
    compiled = aot.compile(
        load_add_store, on_host, struct((1024, 1024)), target=target, donate_argnums=0
    )
    usage = aot.peak(compiled)
    assert usage.host_argument_bytes == 4 * MIB
    assert usage.host_output_bytes == 4 * MIB
    assert usage.host_aliased_bytes == 4 * MIB
    assert usage.host_temporary_bytes == 0
    assert usage.host_peak_bytes == 4 * MIB
    assert usage.argument_bytes == 4 * MIB
    assert usage.output_bytes < MIB / 2
    assert usage.temporary_bytes >= 4 * MIB
    assert usage.peak_bytes >= 8 * MIB
    assert "S(5)" in str(compiled.as_text())  # XLA's host memory


@pytest.mark.aot
@BOTH
def test_donation(name):
    """A donated argument's memory is its result's."""
    target = aot.Target(name)
    w = struct((1024, 1024))
    kept = aot.peak(aot.compile(descend, w, target=target))
    given = aot.peak(aot.compile(descend, w, target=target, donate_argnums=0))
    assert (kept.aliased_bytes, given.aliased_bytes) == (0, 4 * MIB)
    assert (kept.peak_bytes, given.peak_bytes) == (8 * MIB, 4 * MIB)


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
def test_static_arguments():
    """Static arguments of a plain function reach it as they are, from the end too."""
    target = aot.Target("h100")

    def fn(w, config, times):
        assert (config, type(times)) == ({"scale": 2.0}, np.float32)
        return w

    class Config(dict):
        __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    w = struct((8, 128))
    config = Config(scale=2.0)
    times = np.float32(3)
    aot.compile(fn, w, config, times, target=target, static_argnums=(1, -1))


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
@BOTH
def test_host_computations(name):
    """What a compiler leaves to the host is found in its program."""
    target = aot.Target(name)
    on_host = struct((1024, 1024), target, kind="pinned_host")
    clean = aot.compile(load_add_store, on_host, struct((1024, 1024)), target=target)
    assert aot.host_computations(clean) == ()
    dirty = aot.compile(lambda x: x * 2.0, on_host, target=target)
    (name,) = aot.host_computations(dirty)
    assert name.endswith("/mul")


# What does not fit.


@pytest.mark.aot
@pytest.mark.parametrize("name", [*targets.TPUS])
def test_tpu_memory_is_the_compilers(name):
    """The limit in the compiler's message is the target's memory, as it rounds it."""
    target = aot.Target(name)
    with pytest.raises(aot.DoesNotFitError, match=r"The compiler says: ") as e:
        aot.compile(descend, struct((2**36,)), target=target)
    assert e.value.used_bytes == 2 * 4 * 2**36
    assert e.value.limit_bytes == pytest.approx(target.memory_bytes, abs=0.02 * 2**30)
    assert e.value.peak is None


@pytest.mark.aot
def test_gpu_memory_is_compared():
    """A GPU's compiler goes on, so the peak is compared with the target's memory."""
    with pytest.raises(aot.DoesNotFitError, match=r"'h100'.*79.11 GiB") as e:
        aot.compile(descend, struct((2**36,)), target=aot.Target("h100"))
    assert e.value.used_bytes == 2 * 4 * 2**36
    assert e.value.limit_bytes == 84942979072
    assert e.value.peak is not None
    assert e.value.peak.peak_bytes == e.value.used_bytes


@pytest.mark.aot
@BOTH
def test_smaller_memory(name):
    """With less memory the same program fits no more."""
    big = struct((512, 1024, 1024))
    assert aot.compile(descend, big, target=aot.Target(name))
    small = aot.Target(name, memory_bytes=3 * 2**30)
    with pytest.raises(aot.DoesNotFitError) as e:
        aot.compile(descend, big, target=small)
    assert e.value.used_bytes == 2**32
    assert e.value.limit_bytes == pytest.approx(3 * 2**30, rel=0.01)


@pytest.mark.aot
def test_pressure():
    """A compiler that has less memory makes a program that needs less."""

    def loss(x, *weights):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    layers = range(1, 7)
    args = struct((16384, 1024)), *[struct((1024, 1024)) for _ in layers]

    def temporary_bytes(**memory):
        target = aot.Target("h100", **memory)
        compiled = aot.compile(jax.grad(loss, tuple(layers)), *args, target=target)
        return aot.peak(compiled).temporary_bytes

    assert temporary_bytes(memory_bytes=768 * MIB) < 0.9 * temporary_bytes()


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


# The process.

_FRESH_PROCESS = """
import json, os, signal
from pathlib import Path
import jax, jax.numpy as jnp
import optax_offload
from optax_offload import aot

def mapped():
    maps = Path("/proc/self/maps").read_text()
    return [so for so in ("libtpu.so", "xla_cuda_plugin.so") if so in maps]

def signals():
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]

signal.signal(signal.SIGHUP, signal.SIG_DFL)
loaded_by_import, env, handlers = mapped(), dict(os.environ), signals()
for name in ("v5e", "h100"):
    aot.compile(jnp.tanh, jax.ShapeDtypeStruct((8, 128), jnp.float32),
                target=aot.Target(name))
cached = os.listdir(env["JAX_COMPILATION_CACHE_DIR"])
loaded = mapped()
# Both are errors once a backend is initialised.
jax.config.update("jax_num_cpu_devices", 3)
jax.config.update("jax_platforms", "cpu")
print(json.dumps({
    "loaded by import": loaded_by_import,
    "loaded": loaded,
    "environment": {k: v for k, v in os.environ.items() if env.get(k) != v},
    "removed": sorted(set(env) - set(os.environ)),
    "signals": signals() == handlers,
    "cached": cached,
    "devices": [d.platform for d in jax.devices()],
    "sum": float(jnp.arange(4.0).sum()),
    "cached by the process": len(os.listdir(env["JAX_COMPILATION_CACHE_DIR"])) > 0,
}))
"""


@pytest.mark.aot
def test_process_does_not_notice(tmp_path):
    """A process that has not touched its backend finds everything as it was.

    It runs beside this one, which has libtpu loaded too.
    """
    assert aot.Target("v5e").devices
    ours = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "LIBTPU_INIT_ARGS": "",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FRESH_PROCESS],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == {
        "loaded by import": [],
        "loaded": ["libtpu.so", "xla_cuda_plugin.so"],
        "environment": {},
        "removed": [],
        "signals": True,
        "cached": [],
        "devices": ["cpu", "cpu", "cpu"],
        "sum": 6.0,
        "cached by the process": True,
    }


@pytest.mark.aot
@BOTH
def test_initialised_backend_stays(name):
    """A backend that is there before is the same after, and still the default."""
    devices, x = jax.devices(), jnp.arange(4.0)
    aot.compile(descend, x, target=aot.Target(name))
    assert jax.devices() == devices
    assert jnp.sum(x).devices() == {devices[0]}
