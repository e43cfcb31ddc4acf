"""Loads the compilers for chips that are not attached, and calls them.

Nothing is loaded on import. A compiler is loaded for the first program that asks for
it, and the process must not notice: no backend of JAX is initialised, no plugin is
registered with JAX, no environment variable or signal handler stays changed.

Beside `_ground/compat.py` this is the only module that uses private parts of JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import math
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
from jax._src import config as _jax_config  # See `compile_only`.
from jax.experimental import topologies
from jaxlib import xla_client

from optax_offload.aot.chip import Gpu
from optax_offload.aot.chips import GPUS, GPUS_PER_HOST, TPUS

# Wheels of XLA's CUDA compiler, the first that is there is taken.
_CUDA_VERSIONS = ("cuda13", "cuda12")
# A folder as of CUDA with a `ptxas` that assembles nothing.
_ASSEMBLER = pathlib.Path(__file__).parent / "assembler"
_lock = threading.RLock()


@functools.cache
def tpu_devices(generation: str, grid: str) -> tuple[Any, ...]:
    """The compile-only devices of a slice of TPUs, such as `("v5e", "2x4")`."""
    if importlib.util.find_spec("libtpu") is None:
        raise _missing_wheel(f"{generation}:{grid}", "libtpu", "tpu", "libtpu")
    chips = [int(size) for size in grid.split("x")]
    options: dict[str, Any] = dict(TPUS[generation].topology_options)
    if 1 in chips[:2]:
        # libtpu 0.0.42 takes hosts to have 2x2 chips, and wants them filled.
        options["chips_per_host_bounds"] = (min(chips[0], 2), min(chips[1], 2), 1)
    name = f"{generation}:{grid}"
    try:
        with _lock, _libtpu_settings():
            topology = topologies.get_topology_desc(name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu cannot describe the slice {name!r}: {error}"
        ) from error
    return tuple(topology.devices)


@contextlib.contextmanager
def _libtpu_settings() -> Iterator[None]:
    """Sets variables that libtpu reads on loading, for a machine without a TPU."""
    # `import jax` sets this variable to 1 where it finds no TPU chip. Where there are
    # chips, libtpu is loaded as JAX would load it: the process may want to use them.
    chips = os.environ.get("TPU_SKIP_MDS_QUERY") != "1"
    # JAX itself may have loaded it and then failed on the lock file.
    loaded = xla_client.pjrt_plugin_loaded("tpu")
    if chips or (loaded and xla_client.pjrt_plugin_initialized("tpu")):
        yield
        return
    settings = {
        # Without these three it logs an error, and looks for a metadata server.
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # Otherwise a second process fails on the lock file of the first.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Otherwise each process leaves files in /tmp/tpu_logs.
        "TPU_LOG_DIR": "disabled",
    }
    changes = {k: v for k, v in settings.items() if k not in os.environ}
    # libtpu's handlers for SIGTERM, SIGSEGV and others print a stack trace.
    given = os.environ.get("LIBTPU_INIT_ARGS")
    no_handlers = "--install_signal_handlers=false"
    changes["LIBTPU_INIT_ARGS"] = f"{given} {no_handlers}" if given else no_handlers
    # It also ignores SIGHUP. Python's signal module would restore that in the main
    # thread only, and only what Python itself installed. 256 bytes hold a `struct
    # sigaction` (152 bytes on x86-64 Linux, where libtpu runs).
    hangup = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.sigaction(signal.SIGHUP, None, hangup)
    os.environ.update(changes)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGHUP, hangup, None)
        for name in changes:
            del os.environ[name]
        if given is not None:
            os.environ["LIBTPU_INIT_ARGS"] = given


@functools.cache
def gpu_devices(chip: str, count: int, memory_bytes: int) -> tuple[Any, ...]:
    """The compile-only devices of GPUs with `memory_bytes` each."""
    with _lock:
        plugin = _load_cuda_plugin()
    if plugin is None:
        raise _missing_wheel(
            chip, "jax-cuda13-pjrt", "cuda13-local", "jax-cuda13-plugin"
        )
    # XLA's topology is slices x hosts x GPUs of a host.
    per_host = min(count, GPUS_PER_HOST)
    topology = xla_client.make_c_api_device_topology(
        plugin,
        chip,
        target_config=_gpu_target_config(GPUS[chip], memory_bytes),
        topology=f"1x{count // per_host}x{per_host}",
    )
    # Private: `topologies.get_topology_desc` would do this, but it only knows plugins
    # that JAX has discovered, and that fails where there is no cuDNN.
    return tuple(topology._make_compile_only_devices())


@functools.cache
def _load_cuda_plugin() -> Any:
    """Loads XLA's CUDA compiler under a name of our own; None if there is no wheel.

    JAX discovers the same plugin by itself, as "cuda", and checks for NVIDIA's
    libraries on the way. Under another name the two do not meet.
    """
    for version in _CUDA_VERSIONS:
        spec = importlib.util.find_spec("jax_plugins")
        folders = spec.submodule_search_locations if spec else None
        for folder in folders or ():
            library = pathlib.Path(folder, f"xla_{version}", "xla_cuda_plugin.so")
            if library.exists():
                name = f"optax_offload_{version}"
                c_api = xla_client.load_pjrt_plugin_dynamically(name, str(library))
                xla_client.initialize_pjrt_plugin(name)
                _register_custom_calls(c_api, f"jax_{version}_plugin")
                return c_api
    return None


def _register_custom_calls(c_api: Any, package: str) -> None:
    """Tells the compiler the targets of JAX's linear algebra, such as cuSOLVER's QR.

    Given to the plugin and not to `xla_client.register_custom_call_target`: the first
    handler that this process-wide table gets for CUDA is the only one.
    """
    try:
        extension = importlib.import_module(f"{package}.cuda_plugin_extension")
    except ImportError:  # Only the compiler's wheel: all but linear algebra compiles.
        return
    for name, type_info in extension.ffi_types().items():
        extension.register_custom_type(c_api, name, type_info)
    for name, handler in extension.ffi_handlers().items():
        extension.register_custom_call_target(c_api, name, handler, "CUDA", 1)
    for module in ("gpu_linalg", "gpu_prng", "gpu_solver", "gpu_sparse"):
        calls = importlib.import_module(f"jaxlib.{module}").registrations()["CUDA"]
        for name, handler, api_version in calls:
            extension.register_custom_call_target(
                c_api, name, handler, "CUDA", api_version
            )


def _gpu_target_config(gpu: Gpu, memory_bytes: int) -> str:
    """XLA's `GpuTargetConfigProto` as text."""
    architecture = gpu.architecture
    major, minor = architecture.capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {architecture.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {architecture.shared_memory_per_core_bytes - 1024}
  threads_per_core_limit: {architecture.threads_per_core}
  core_count: {gpu.core_count}
  fpus_per_core: {architecture.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {round(gpu.memory_bytes_per_second)}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {feature}
  }}
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.description}"
"""


class _CompileOnlyClient:
    """A client for compile-only devices that JAX takes for an ordinary one."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, module: Any, **options: Any) -> Any:
        return self._client.compile(module, **options)


def compile_only(
    lowered: jax.stages.Lowered,
    devices: tuple[Any, ...],
    compiler_options: dict[str, Any],
) -> jax.stages.Compiled:
    """Compiles a lowered program for compile-only devices."""
    # Both uses of private parts of JAX are here for the process not to notice.
    # First, for a compile-only client JAX looks for a real one of the same platform, to
    # compile with it, and so initialises the process's own backend: too early for
    # jax.distributed.initialize or jax.config.update("jax_num_cpu_devices", ...), and
    # with a traceback where a CUDA plugin finds no cuDNN.
    lowered._lowering.compile_args["backend"] = _CompileOnlyClient(devices[0].client)
    # Second, JAX's persistent compilation cache, where the process uses it, stores such
    # programs but cannot load them, and warns of that the next time.
    with _jax_config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile(compiler_options, device_assignment=devices)


def without_machine_code() -> dict[str, Any]:
    """The options by which a GPU's compiler makes as little machine code as it can.

    Nothing runs here. What is read of a program is settled before, code takes twice as
    long (an H100's step of a cut model: 14 s, and 7 without CUDA's assembler, both
    without LLVM's passes), and so the machine need not have CUDA.
    """
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    if os.access(_ASSEMBLER / "bin" / "ptxas", os.X_OK):
        options["xla_gpu_cuda_data_dir"] = str(_ASSEMBLER)
    return options


def missing_libdevice(problem: str) -> ImportError | None:
    """The error where CUDA's functions of mathematics are missing, if it is that."""
    if "libdevice not found" not in problem:
        return None
    return ImportError(
        "compiling for a GPU needs CUDA's libdevice.10.bc, which is not here. "
        'Install it with\n    pip install "optax-offload[aot]"\n'
        "or by itself with\n    pip install nvidia-nvvm"
    )


def own_options(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """The options of compilers that a lowered function brings."""
    lowering: Any = lowered._lowering
    return dict(lowering._compiler_options_kvs)


def _missing_wheel(target: str, wheel: str, extra: str, required: str) -> ImportError:
    """The error for a missing compiler, with the line that installs it."""
    version = metadata.version("jax")
    pins = [
        requirement.split(";")[0].strip()
        for requirement in metadata.requires("jax") or ()
        if requirement.startswith(required) and f'"{extra}"' in requirement
    ]
    return ImportError(
        f"compiling for {target!r} needs the wheel {wheel}, which is not installed "
        "(it exists for Linux on x86-64). Install it with\n"
        '    pip install "optax-offload[aot]"\n'
        f"or by itself with\n    pip install {' '.join(map(repr, pins))}\n"
        f"which is the version that jax {version} asks for."
    )
