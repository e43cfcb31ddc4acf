"""Compiling for a TPU or a GPU that is not there.

The compilers are the real ones, from public wheels (`pip install "optax-offload[aot]"`,
Linux on x86-64), and need no accelerator, no driver and none of NVIDIA's libraries.
`peak.py` and `transfers.py` read what they make.

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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from optax_offload._ground import nnx, trees
from optax_offload._ground.units import MIB
from optax_offload._places import memory
from optax_offload._step import compiling_for
from optax_offload.aot import compilers
from optax_offload.aot.peak import check_fit, does_not_fit, peak
from optax_offload.aot.targets import Target


# The options of `jax.jit` have the names that they have there.
def compile(  # noqa: PLR0913
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str,
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
      fn: A function, or a jitted one, which brings its own options, as those of
        compilers.
      *args: Its arguments.
      target: The chips to compile for, or their name.
      mesh: The mesh of arguments without a sharding; by default that of the first
        argument that has one, else `target.mesh()`.
      out_shardings: As of `jax.jit`, on a mesh of the target or of this process. As
        there, a result with a sharding that names no memory kind, or `"device"`, is
        moved to the device; one without a sharding stays where the function left it.
      donate_argnums: As of `jax.jit`.
      static_argnums: As of `jax.jit`.
      compiler_options: XLA's, as of `jax.stages.Lowered.compile`.

    Returns:
      The compiled program, as from `jax.stages.Lowered.compile`: for `peak`,
      `transfers`, `host_computations`, and its own `as_text()` (the scheduled program)
      and `cost_analysis()`. It cannot be run, and a GPU's has no machine code.

    Raises:
      DoesNotFitError: It does not fit, by the compiler's own numbers where it fails (a
        TPU's). A GPU's does not fail, it rematerializes and logs: there `peak` is
        compared with the target's memory.
      ImportError: The compiler's wheel is not installed; says how to install it.
      ValueError: Options of `jax.jit` for a function that is jitted; an argument on a
        mesh of another size than the target; an unknown slice.
    """
    target = Target(target) if isinstance(target, str) else target
    options = {
        "out_shardings": out_shardings,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
    }
    lowered = lower(fn, args, target, options, mesh)
    compiled = compile_lowered(lowered, target, dict(compiler_options or {}))
    if target.platform == "gpu":
        check_fit(target, peak(compiled))
    return compiled


def lower(  # noqa: PLR0913
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: Target,
    options: Mapping[str, Any],
    mesh: Mesh | AbstractMesh | None = None,
    jit: Callable[..., Any] = jax.jit,
) -> jax.stages.Lowered:
    """Lowers a function for a target, to be compiled by `compile`.

    Args:
      fn: As of `compile`.
      args: As of `compile`.
      target: As of `compile`.
      options: Those of `jax.jit`, by name; None where one is not given.
      mesh: As of `compile`.
      jit: The function that jits a function that is not jitted.
    """
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
    out_shardings = options.get("out_shardings")
    if not jitted:
        donated = options.get("donate_argnums")
        values = nnx.as_values(fn, args, donated, [*static])
        if values[1] is not args and out_shardings is not None:
            out_shardings = None, out_shardings  # First what becomes of the objects.
        fn, args = values
    tree = {i: x for i, x in enumerate(args) if not static & {i, i - len(args)}}
    if mesh is None:
        mesh = mesh_of((tree, out_shardings), target)
    elif mesh.size != target.device_count:
        raise ValueError(
            f"mesh={mesh} has {mesh.size} devices, {target.name!r} has "
            f"{target.device_count}; make it with target.mesh(...)"
        )
    mesh = _abstract(mesh)
    _check_sizes("argument", tree, target)
    tree = _arguments(tree, mesh)
    args = tuple(tree.get(i, arg) for i, arg in enumerate(args))
    if out_shardings is not None:
        _check_sizes("output", out_shardings, target)
        options["out_shardings"] = jax.tree.map(
            lambda leaf: _output(leaf, mesh), out_shardings
        )
    return _lower(fn if jitted else jit(fn, **options), args, mesh, target)


def compile_lowered(
    lowered: jax.stages.Lowered, target: Target, compiler_options: dict[str, Any]
) -> jax.stages.Compiled:
    """Compiles what `lower` made.

    Raises:
      DoesNotFitError: A TPU's compiler refuses it.
      ImportError: A GPU's compiler lacks what it links with.
    """
    if target.platform == "gpu":
        # There is no GPU to tune kernels on; trying costs as much time again.
        compiler_options.setdefault("xla_gpu_autotune_level", 0)
        compiler_options = compilers.without_machine_code() | compiler_options
    elif target.memory_bytes < target.chip.memory_bytes:
        compiler_options["xla_tpu_max_hbm_size_mib"] = target.memory_bytes // MIB
    try:
        return compilers.compile_only(lowered, target.devices, compiler_options)
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        problem = does_not_fit(target, text) or compilers.missing_libdevice(text)
        if problem is None:
            raise
        raise problem from error
    except ValueError as error:
        if "device_assignment" not in str(error):
            raise
        raise ValueError(
            "the function names devices of this process, in the shardings of a jit, "
            "with_sharding_constraint or device_put in it. Make them on "
            f"target.mesh(...), or from bare PartitionSpecs. JAX says: {error}"
        ) from error


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


def _check_sizes(what: str, tree: Any, target: Target) -> None:
    """Raises unless all leaves (arrays, structs, shardings) fit the target's mesh."""
    strangers = [
        f"{what} {trees.path_string(keys)!r} on {_sharding_of(leaf)}"
        for keys, leaf in trees.flatten_with_path(tree)[0]
        if not _can_carry(_sharding_of(leaf), target)
    ]
    if strangers:
        raise ValueError(
            f"{'; '.join(strangers)}: {target.name!r} has {target.device_count} "
            "devices. Use shardings on target.mesh(...), or on a mesh of this process "
            f"whose axis sizes multiply to {target.device_count}"
        )


def _can_carry(sharding: Sharding | None, target: Target) -> bool:
    if sharding is None or sharding.num_devices == 1:
        return True
    same_size = sharding.num_devices == target.device_count
    return same_size and isinstance(sharding, NamedSharding)


def _arguments(tree: Any, mesh: AbstractMesh) -> Any:
    """The templates of arguments, whose objects of NNX share what they shared."""
    split = nnx.splits(lambda: tree)()
    found = jax.tree.map(lambda leaf: _argument(leaf, mesh), split)
    return found if split is tree else nnx.merged(found)


def _argument(leaf: Any, mesh: AbstractMesh) -> Any:
    """The template of an array on the target's mesh; what is no array as it is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf  # A Python scalar, or a static argument of a jitted function.
    # An abstract mesh cannot tell which kind is the default one, so it is not named.
    kind = memory.memory_kind_of(leaf)
    sharding = _moved(leaf, mesh, None if kind == "device" else kind)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _output(leaf: Any, mesh: AbstractMesh) -> Any:
    """The sharding of a result on the target's mesh.

    Its kind is always named: on a mesh of real devices JAX takes no kind for
    `"device"`, and moves the result there. On an abstract one it would leave a result
    on the host, and then find that this is not what the sharding says.
    """
    if isinstance(leaf, PartitionSpec):
        return NamedSharding(mesh, leaf, memory_kind="device")
    if not isinstance(leaf, Sharding):
        return leaf  # For JAX to refuse.
    return _moved(leaf, mesh, memory.memory_kind_of(leaf))


def _moved(leaf: Any, mesh: AbstractMesh, kind: str | None) -> NamedSharding:
    sharding = _sharding_of(leaf)
    if isinstance(sharding, NamedSharding) and sharding.num_devices == mesh.size:
        return NamedSharding(_abstract(sharding.mesh), sharding.spec, memory_kind=kind)
    return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)


def _lower(
    jitted: Any, args: Sequence[Any], mesh: AbstractMesh, target: Target
) -> jax.stages.Lowered:
    # The mesh is abstract because GPU compile-only devices list no memories: on a
    # concrete mesh of them a NamedSharding silently drops its memory kind, and every
    # argument is then taken for one in device memory.
    known = compiling_for(target.platform, target.device_count)
    with known, jax.sharding.use_abstract_mesh(mesh):
        traced = jitted.trace(*args)
        # JAX lowers a program on an abstract mesh for the client of the default device.
        # That would be the process's own, which has to be initialised to be asked, and
        # compiling for another client's devices with it crashes.
        with jax.default_device(target.devices[0]):
            platform = "cuda" if target.platform == "gpu" else target.platform
            lowered = traced.lower(lowering_platforms=(platform,))
    return getattr(lowered, "lowered", lowered)  # `nnx.jit` has it around JAX's.
