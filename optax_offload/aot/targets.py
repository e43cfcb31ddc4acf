"""The chips that `optax_offload.aot` compiles for, and how their compilers are loaded.

Nothing is loaded on import. A compiler is loaded on the first program that asks for
it, and the process must not notice: no backend of JAX is initialised, no plugin is
registered with JAX, no environment variable or signal handler stays changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import pathlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType
from jaxlib import xla_client

from optax_offload._units import size_text

_GIB = 2**30
_MIB = 2**20


class Tpu(NamedTuple):
    """A generation of TPUs: how its slices are named, and what a device has."""

    memory_bytes: int  # usable by a program, for each device
    dimensions: int
    devices_per_chip: int = 1
    options: Mapping[str, str] = {}


class Architecture(NamedTuple):
    """What all GPUs of a compute capability have in common."""

    capability: tuple[int, int]
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core_bytes: int


class Gpu(NamedTuple):
    """What XLA's GPU compiler asks about a chip."""

    description: str
    architecture: Architecture
    core_count: int
    l2_cache_mib: float
    memory_bytes: int
    memory_gb_per_second: float
    clock_ghz: float


# The compiler's own numbers: the HBM of a device less what its "Total hbm usage" calls
# "reserved", read from programs that are too large by a few KB. They differ a little
# between versions of libtpu (0.0.42 and 0.0.51 tried, the larger reserve taken).
TPUS: dict[str, Tpu] = {
    # One device for each chip, as JAX has it on a real v4; libtpu's default is two.
    "v4": Tpu(32 * _GIB - 1280 * _MIB, 3, options={"chip_config_name": "megacore"}),
    "v5e": Tpu(16 * _GIB - 258 * _MIB, 2),
    "v5p": Tpu(96 * _GIB - 279 * _MIB, 3),
    "v6e": Tpu(31 * _GIB + 248 * _MIB, 2),  # 31.5 GiB less 264 MiB
    "tpu7x": Tpu(95 * _GIB - 268 * _MIB, 3, devices_per_chip=2),
}

# From the CUDA programming guide, "Technical Specifications per Compute Capability".
_AMPERE = Architecture((8, 0), 64, 2048, 164 * 1024)
_ADA = Architecture((8, 9), 128, 1536, 100 * 1024)
_HOPPER = Architecture((9, 0), 128, 2048, 228 * 1024)
_BLACKWELL = Architecture((10, 0), 128, 2048, 228 * 1024)

# Where XLA itself describes a chip, the numbers are those of its description, the file
# named beside each (in openxla/xla, under xla/backends/gpu/target_config/specs).
GPUS: dict[str, Gpu] = {
    # a100_sxm_40.txtpb, a100_sxm_80.txtpb
    "a100-40": Gpu(
        "NVIDIA A100-SXM4-40GB", _AMPERE, 108, 40, 42331013120, 1555.2, 1.41
    ),
    "a100-80": Gpu(
        "NVIDIA A100-SXM4-80GB", _AMPERE, 108, 40, 85100068864, 2039.0, 1.41
    ),
    # h100_sxm.txtpb, h200.txtpb, b200.txtpb
    "h100": Gpu("NVIDIA H100 80GB HBM3", _HOPPER, 132, 50, 84942979072, 3352.3, 1.98),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e", _HOPPER, 132, 50, 151397597184, 4800.0, 1.98
    ),
    "b200": Gpu("NVIDIA B200", _BLACKWELL, 148, 126.5, 191514411008, 7672.3, 1.965),
    # deviceQuery on the chip; bandwidth from NVIDIA's L4 datasheet.
    "l4": Gpu("NVIDIA L4", _ADA, 58, 48, 23612293120, 300.0, 2.04),
    # deviceQuery on the chip; bandwidth of its 384 bit at 10501 MHz, double data rate.
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", _ADA, 128, 72, 25250627584, 1008.1, 2.52),
}

_NAME = re.compile(r"(?P<chip>[\w-]+)(:(?P<size>\d+(x\d+)*))?")


@dataclasses.dataclass(frozen=True, init=False)
class Target:
    """A chip, or several of them, to compile for. Nothing is loaded to make one.

    Attributes:
      name: a TPU generation and its grid of chips (``"v5e:2x4"``, ``"v5p:2x2x1"``;
        one chip without a grid), or a GPU and how many (``"h100"``, ``"h100:8"``).
      memory_bytes: device memory of each device. What a TPU's program can use; all that
        a GPU has, of which JAX by default takes 75 % (``XLA_CLIENT_MEM_FRACTION``).
      platform: ``"tpu"`` or ``"gpu"``.
      device_count: the number of JAX devices.

    Example:
      >>> from optax_offload import aot
      >>> aot.Target("v5p:2x2x2").device_count
      8
      >>> aot.Target("h100", memory_bytes=24 * 2**30).memory_bytes
      25769803776
    """

    name: str
    memory_bytes: int
    platform: str
    device_count: int

    def __init__(self, name: str, *, memory_bytes: int | None = None):
        """Checks the name.

        Args:
          name: see the class.
          memory_bytes: less than the chip has, to compile under pressure. A TPU's is
            rounded down to MiB.

        Raises:
          ValueError: an unknown chip, a size that it does not come in, or more memory
            than it has.
        """
        match = _NAME.fullmatch(name)
        chip, size = match["chip"] if match else None, match["size"] if match else None
        if chip in TPUS:
            tpu = TPUS[chip]
            size = size or "x".join("1" * tpu.dimensions)
            counts = [int(n) for n in size.split("x")]
            if len(counts) != tpu.dimensions or 0 in counts:
                example = "x".join("2244"[: tpu.dimensions])
                raise ValueError(
                    f"Target({name!r}): the chips of a {chip} are a grid of "
                    f"{tpu.dimensions} dimensions, as in '{chip}:{example}'"
                )
            platform, available = "tpu", tpu.memory_bytes
            device_count = math.prod(counts) * tpu.devices_per_chip
            name = f"{chip}:{size}"
        elif chip in GPUS and (size or "1").isdigit():
            platform, available = "gpu", GPUS[chip].memory_bytes
            device_count = int(size or 1)
            if device_count < 1 or (device_count > 8 and device_count % 8):
                raise ValueError(
                    f"Target({name!r}): {device_count} GPUs; allowed are 1 to 8, or "
                    "whole hosts of 8 (16, 24, ...)"
                )
            name = chip if device_count == 1 else f"{chip}:{device_count}"
        else:
            raise ValueError(
                f"Target({name!r}) names no chip. A TPU is one of "
                f"{', '.join(TPUS)} and its grid of chips, as in 'v5e:2x4'; "
                f"a GPU is one of {', '.join(GPUS)} and how many, as in 'h100:8'"
            )
        if memory_bytes is None:
            memory_bytes = available
        if not 2**20 <= memory_bytes <= available:
            raise ValueError(
                f"Target({name!r}, memory_bytes={memory_bytes}): a {chip} has "
                f"{available} bytes ({size_text(available)}) for each device; pass "
                "between 1 MiB and that, or leave it out"
            )
        values = {
            "name": name,
            "memory_bytes": memory_bytes,
            "platform": platform,
            "device_count": device_count,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The target's compile-only devices; this loads its compiler.

        Raises:
          ImportError: the compiler's wheel is not installed; says how to install it.
          ValueError: libtpu cannot describe such a slice.
        """
        chip, _, size = self.name.partition(":")
        if self.platform == "tpu":
            return _tpu_devices(chip, size)
        return _gpu_devices(chip, self.device_count, self.memory_bytes)

    def mesh(
        self,
        axis_names: Sequence[str] = ("x",),
        *,
        shape: Sequence[int] | None = None,
        axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
    ) -> AbstractMesh:
        """A mesh over all devices of the target, to make shardings of arguments on.

        Args:
          axis_names: as of `jax.make_mesh`.
          shape: the size of each axis; by default all devices are on the first.
          axis_types: one for all axes, or one for each.

        Raises:
          ValueError: the shape is not one of that many devices and axes.

        Example:
          >>> from optax_offload import aot
          >>> aot.Target("v5e:2x4").mesh(("data", "model"), shape=(2, 4)).shape_tuple
          (('data', 2), ('model', 4))
        """
        names = tuple(axis_names)
        if shape is None:
            shape = (self.device_count,) + (1,) * (len(names) - 1)
        if len(shape) != len(names) or math.prod(shape) != self.device_count:
            raise ValueError(
                f"a mesh of shape {tuple(shape)} and axes {names} is not one of the "
                f"{self.device_count} devices of {self.name!r}: pass one size for each "
                f"axis, which multiply to {self.device_count}"
            )
        if isinstance(axis_types, AxisType):
            axis_types = (axis_types,) * len(names)
        return AbstractMesh(tuple(shape), names, axis_types=tuple(axis_types))


_CUDA_VERSIONS = ("cuda13", "cuda12")
_lock = threading.RLock()


@functools.cache
def _tpu_devices(generation: str, grid: str) -> tuple[Any, ...]:
    """The compile-only devices of a slice of TPUs, such as `("v5e", "2x4")`."""
    if importlib.util.find_spec("libtpu") is None:
        raise _missing_wheel(f"{generation}:{grid}", "libtpu", "tpu", "libtpu")
    chips = [int(size) for size in grid.split("x")]
    options: dict[str, Any] = dict(TPUS[generation].options)
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
    """What libtpu reads while it is loaded, as fits a machine without a TPU."""
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
def _gpu_devices(chip: str, count: int, memory_bytes: int) -> tuple[Any, ...]:
    """The compile-only devices of GPUs with `memory_bytes` each."""
    with _lock:
        plugin = _load_cuda_plugin()
    if plugin is None:
        raise _missing_wheel(
            chip, "jax-cuda13-pjrt", "cuda13-local", "jax-cuda13-plugin"
        )
    # XLA's topology is slices x hosts x GPUs of a host.
    hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
    topology = xla_client.make_c_api_device_topology(
        plugin,
        chip,
        target_config=_gpu_target_config(GPUS[chip], memory_bytes),
        topology=f"1x{hosts}x{per_host}",
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
  memory_bandwidth: {round(gpu.memory_gb_per_second * 1e9)}
  l2_cache_size: {round(gpu.l2_cache_mib * _MIB)}
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
