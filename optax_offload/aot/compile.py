"""Compiling for a TPU or a GPU that is not there, and reading what it will need.

The compilers are the real ones, from public wheels (`pip install "optax-offload[aot]"`,
Linux on x86-64), and need no accelerator, no driver and none of NVIDIA's libraries.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from optax_offload import aot
  >>> target = aot.Target("v5e:2x2")
  >>> rows = jax.NamedSharding(target.mesh(), jax.P("x"))
  >>> w = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=rows)
  >>> step = lambda w: w - 0.1 * jnp.tanh(w)
  >>> compiled = aot.compile(step, w, target=target, donate_argnums=0)  # doctest: +SKIP
  >>> print(aot.peak(compiled))  # doctest: +SKIP
  peak 4.00 MiB = arguments 4.00 MiB + temporaries 0 B + outputs 4.00 MiB - aliased ...
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import config as _jax_config  # See `_compile_only`.
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from optax_offload import _memory, _trees
from optax_offload._units import size_text
from optax_offload.aot.targets import Target

__all__ = [
    "DoesNotFitError",
    "Peak",
    "Target",
    "compile",
    "host_computations",
    "peak",
]


class DoesNotFitError(RuntimeError):
    """A program needs more memory than a device of its target has.

    Attributes:
      used_bytes: what it needs on each device. Where the compiler refused the program
        this is its own number, which it rounds.
      limit_bytes: what there is on each device.
      peak: of the program, where there is one nevertheless (on a GPU); else None.
    """

    def __init__(
        self, message: str, used_bytes: int, limit_bytes: int, peak: Peak | None = None
    ):
        super().__init__(message)
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes
        self.peak = peak


@dataclasses.dataclass(frozen=True)
class Peak:
    """The memory of a compiled program, in bytes on each device.

    Attributes:
      argument_bytes: arguments in device memory.
      temporary_bytes: what is only there while the program runs.
      output_bytes: outputs in device memory.
      aliased_bytes: outputs that reuse a donated argument, counted in both.
      host_argument_bytes: arguments in host memory.
      host_temporary_bytes: as above, in host memory.
      host_output_bytes: as above, in host memory.
      host_aliased_bytes: as above, in host memory.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    host_argument_bytes: int
    host_temporary_bytes: int
    host_output_bytes: int
    host_aliased_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Device memory while the program runs."""
        return (
            self.argument_bytes
            + self.temporary_bytes
            + self.output_bytes
            - self.aliased_bytes
        )

    @property
    def host_peak_bytes(self) -> int:
        """Host memory while the program runs, for each device."""
        return (
            self.host_argument_bytes
            + self.host_temporary_bytes
            + self.host_output_bytes
            - self.host_aliased_bytes
        )

    def __str__(self) -> str:
        def line(name: str, prefix: str) -> str:
            def size(field: str) -> str:
                return size_text(getattr(self, f"{prefix}{field}_bytes"))

            return (
                f"{name} {size('peak')} = arguments {size('argument')}"
                f" + temporaries {size('temporary')} + outputs {size('output')}"
                f" - aliased {size('aliased')}"
            )

        device = line("peak", "")
        return f"{device}\n{line('host', 'host_')}" if self.host_peak_bytes else device


def compile(
    fn: Callable[..., Any],
    *args: Any,
    target: Target,
    mesh: Mesh | AbstractMesh | None = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles a function for a target that is not attached.

    Arguments are arrays or `jax.ShapeDtypeStruct`; only shapes, dtypes, shardings and
    memory kinds are read, so nothing is moved. An argument that has no sharding, or is
    on a single device, is replicated over the target. One that is sharded over a mesh
    of this process (say of CPU devices) is taken to be sharded over the same mesh of
    the target's devices. The function is traced with that mesh as its context, so that
    a bare `PartitionSpec` in it means that mesh. It must not name devices of this
    process, and for a GPU it must have no callbacks (`jax.debug.print`).

    Args:
      fn: a function, or a jitted one, which brings its own options.
      *args: its arguments.
      target: what to compile for.
      mesh: for arguments without a sharding; by default the mesh of the first argument
        that has one, else `target.mesh()`.
      out_shardings: as of `jax.jit`, on a mesh of the target or of this process.
      donate_argnums: as of `jax.jit`.
      static_argnums: as of `jax.jit`.
      compiler_options: XLA's, as of `jax.stages.Lowered.compile`.

    Returns:
      What `jax.stages.Lowered.compile` does: for `peak`, `host_computations`, and its
      own `as_text()` (the scheduled program) and `cost_analysis()`. It cannot be run.

    Raises:
      DoesNotFitError: with the compiler's own numbers where it fails (a TPU's). A GPU's
        does not fail, it rematerializes and logs: there `peak` is compared with the
        target's memory.
      ImportError: the compiler's wheel is not installed; says how to install it.
      ValueError: options of `jax.jit` for a function that is jitted; an argument on a
        mesh of another size than the target; an unknown slice.
    """
    options = {
        "out_shardings": out_shardings,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
    }
    options = {k: v for k, v in options.items() if v is not None}
    if not jax.sharding.get_mesh().empty:
        raise ValueError(
            "aot.compile is called under jax.set_mesh, with a mesh of this process's "
            f"devices: {jax.sharding.get_mesh()}. Call it outside: the function's "
            "context is a mesh of the target (see mesh=)"
        )
    jitted = hasattr(fn, "trace")
    if jitted and options:
        raise ValueError(
            f"{', '.join(options)} cannot be given for a function that is jitted: give "
            "it to its jax.jit, or pass the plain function"
        )
    static = options.get("static_argnums", ())
    static = {static} if isinstance(static, int) else set(static)
    tree = {i: x for i, x in enumerate(args) if not static & {i, i - len(args)}}
    if mesh is None:
        mesh = mesh_of((tree, out_shardings), target)
    elif mesh.size != target.device_count:
        raise ValueError(
            f"mesh={mesh} has {mesh.size} devices, {target.name!r} has "
            f"{target.device_count}; make it with target.mesh(...)"
        )
    mesh = _abstract(mesh)
    tree = _for_target("argument", tree, mesh, target)
    args = tuple(tree.get(i, arg) for i, arg in enumerate(args))
    if out_shardings is not None:
        options["out_shardings"] = _for_target("output", out_shardings, mesh, target)
    devices = target.devices
    lowered = _lower(fn if jitted else jax.jit(fn, **options), args, mesh, target)
    compiler_options = dict(compiler_options or {})
    if target.platform == "gpu":
        # There is no GPU to tune kernels on; trying costs as much time again.
        compiler_options.setdefault("xla_gpu_autotune_level", 0)
    if (
        target.platform == "tpu"
        and target.memory_bytes < Target(target.name).memory_bytes
    ):
        compiler_options["xla_tpu_max_hbm_size_mib"] = target.memory_bytes // 2**20
    try:
        compiled = _compile_only(lowered, devices, compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if problem := _does_not_fit(target, str(error)):
            raise problem from error
        raise
    except ValueError as error:
        if "device_assignment" not in str(error):
            raise
        raise ValueError(
            "the function names devices of this process, in the shardings of a jit, "
            "with_sharding_constraint or device_put in it. Make them on "
            f"target.mesh(...), or from bare PartitionSpecs. JAX says: {error}"
        ) from error
    if target.platform == "gpu":
        _check_fit(target, peak(compiled))
    return compiled


def peak(compiled: jax.stages.Compiled) -> Peak:
    """The memory that a compiled program needs, of `compile` or of JAX itself.

    Raises:
      ValueError: the platform that it was compiled for does not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            "memory_analysis() of this compiled program is None: its platform does not "
            "say what memory it needs. Compile it with aot.compile(..., target=...)"
        )
    return Peak(
        argument_bytes=stats.argument_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        host_temporary_bytes=stats.host_temp_size_in_bytes,
        host_output_bytes=stats.host_output_size_in_bytes,
        host_aliased_bytes=stats.host_alias_size_in_bytes,
    )


def host_computations(compiled: jax.stages.Compiled) -> tuple[str, ...]:
    """What a compiled program computes on the host, or in host memory.

    A compiler turns what touches a value in host memory, other than moving it, into
    host computation: slow, and hardly ever meant. A GPU's compiler logs that, a TPU's
    is silent.

    Returns:
      The operations' names (`op_name` in the program's text), without repetitions.
    """
    found = {}
    for line in (compiled.as_text() or "").splitlines():
        if _HOST_COMPUTATION.search(line):
            name = re.search(r'op_name="([^"]*)"', line)
            found[name[1] if name else line.split("=")[0].strip()] = None
    return tuple(found)


# The first is an instruction that XLA left to compute in host memory (GPU), the second
# one that it gave to the host (TPU, and `compute_on` on both).
_HOST_COMPUTATION = re.compile(
    r'_xla_compute_type="host"|custom_call_target="HostExecute"'
)


def mesh_of(tree: Any, target: Target) -> AbstractMesh:
    """The mesh that a function is traced with.

    That of the first leaf that is sharded over as many devices as the target has, else
    the target's own.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = _sharding_of(leaf)
        if (
            isinstance(sharding, NamedSharding)
            and sharding.mesh.size == target.device_count
        ):
            return _abstract(sharding.mesh)
    return target.mesh()


def _sharding_of(leaf: Any) -> Sharding | None:
    sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, Sharding) else None


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    # Not `mesh.abstract_mesh`, which still says that its devices are CPUs.
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _for_target(what: str, tree: Any, mesh: AbstractMesh, target: Target) -> Any:
    """Puts the leaves (arrays, structs or shardings) onto the target's mesh."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    strangers = [
        f"{what} {_trees.path_string(keys)!r} on {_sharding_of(leaf)}"
        for keys, leaf in flat
        if not _can_carry(_sharding_of(leaf), target)
    ]
    if strangers:
        raise ValueError(
            f"{'; '.join(strangers)}: {target.name!r} has {target.device_count} "
            "devices. Use shardings on target.mesh(...), or on a mesh of this process "
            f"whose axis sizes multiply to {target.device_count}"
        )
    leaves = [_leaf_for_target(leaf, mesh) for _, leaf in flat]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _can_carry(sharding: Sharding | None, target: Target) -> bool:
    if sharding is None or sharding.num_devices == 1:
        return True
    same_size = sharding.num_devices == target.device_count
    return same_size and isinstance(sharding, NamedSharding)


def _leaf_for_target(leaf: Any, mesh: AbstractMesh) -> Any:
    if isinstance(leaf, PartitionSpec):
        return NamedSharding(mesh, leaf)
    sharding = _sharding_of(leaf)
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if sharding is None and not is_array:
        return leaf  # A Python scalar, or a static argument of a jitted function.
    spec = PartitionSpec()
    if isinstance(sharding, NamedSharding) and sharding.num_devices == mesh.size:
        mesh, spec = _abstract(sharding.mesh), sharding.spec
    # An abstract mesh cannot tell which kind is the default one, so it is not named.
    kind = _memory.memory_kind_of(leaf)
    kind = None if kind == "device" else kind
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    if not is_array:
        return sharding
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _lower(
    jitted: Any, args: Sequence[Any], mesh: AbstractMesh, target: Target
) -> jax.stages.Lowered:
    # The mesh is abstract because GPU compile-only devices list no memories: on a
    # concrete mesh of them a NamedSharding silently drops its memory kind, and every
    # argument is then taken for one in device memory.
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jitted.trace(*args)
        # JAX lowers a program on an abstract mesh for the client of the default device.
        # That would be the process's own, which has to be initialised to be asked, and
        # compiling for another client's devices with it crashes.
        with jax.default_device(target.devices[0]):
            platform = "cuda" if target.platform == "gpu" else target.platform
            return traced.lower(lowering_platforms=(platform,))


class _CompileOnlyClient:
    """A client for compile-only devices that JAX takes for an ordinary one."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, module: Any, **options: Any) -> Any:
        return self._client.compile(module, **options)


def _compile_only(
    lowered: jax.stages.Lowered,
    devices: tuple[Any, ...],
    compiler_options: dict[str, Any],
) -> jax.stages.Compiled:
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


_SIZE = r"([\d.]+)([KMGTP]?)"
# The ways in which the TPU compiler says that a program is too large
# (https://openxla.org/xla/errors/error_1000).
_OUT_OF_MEMORY = [
    re.compile(pattern.replace("SIZE", _SIZE))
    for pattern in (
        r"Used SIZE of SIZE hbm",
        r"required for HLO temporaries \(SIZE\) exceeds available HBM \(SIZE\)",
        r"Requires SIZE, has SIZE available",
        r"TensorCore Hbm usage: SIZE,.* exceeding available bytes: SIZE",
    )
]


def _does_not_fit(target: Target, message: str) -> DoesNotFitError | None:
    """The error that the TPU compiler's message stands for, if it is about memory."""
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(message):
            used, used_unit, limit, limit_unit = match.groups()
            return DoesNotFitError(
                f"the program does not fit on {target.name!r}. The compiler says: "
                f"{message}",
                used_bytes=_parse_size(used, used_unit),
                limit_bytes=_parse_size(limit, limit_unit),
            )
    return None


def _parse_size(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGTP".index(unit or " "))


def _check_fit(target: Target, usage: Peak) -> None:
    if usage.peak_bytes > target.memory_bytes:
        raise DoesNotFitError(
            f"the program does not fit on {target.name!r}, whose devices have "
            f"{size_text(target.memory_bytes)} each: {usage}\n"
            "(Our comparison: XLA's GPU compiler rematerializes, logs, and goes on.)",
            used_bytes=usage.peak_bytes,
            limit_bytes=target.memory_bytes,
            peak=usage,
        )
