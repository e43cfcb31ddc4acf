"""Memory kinds, sizes on each device, and transfers between memories.

This is the only module that knows JAX's names for memories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from optax_offload._ground import compat, nnx, trees
from optax_offload._places.rules import MemoryKind, check_memory_kind, compile_pattern

T = TypeVar("T")

# The memory space in the type of a traced value, for each kind. There are two spaces
# for three kinds: a traced value on the host is pinned (F31).
_SPACES = {
    "device": jax.memory.Space.Device,
    "pinned_host": jax.memory.Space.Host,
}
# Kinds that a compiled program can move a value to and from.
COMPILED_KINDS = tuple(_SPACES)


# While it is True, types say nothing of memory: a step is traced as if all were on the
# device. What an update takes from host memory is then the rules' say, and so is where
# its results go (`at_rest.py`). JAX traces nothing once for both values.
as_on_device = jax.make_user_context(False)


def is_traced(tree: Any) -> bool:
    """Returns whether any leaf is traced, so that no value can be moved."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def is_uncommitted(x: Any) -> bool:
    """Returns whether JAX may move an array to other devices, as it may NumPy's."""
    if isinstance(x, jax.Array):
        return not (is_traced(x) or x.committed)
    return isinstance(x, (np.ndarray, np.generic))


def on_host(x: Any) -> bool:
    """Returns whether the type of a value, or a type itself, is of host memory."""
    return type_of(x).memory_space == jax.memory.Space.Host


def kind_of_type(x: Any) -> str:
    """The memory kind that the type of a value, or a type itself, is of."""
    return "pinned_host" if on_host(x) else "device"


def device_type(x: Any) -> Any:
    """The type of a value (shape, dtype, weak type, sharding) were it on the device."""
    return type_of(x).update(memory_space=_SPACES["device"])


def host_type(x: Any) -> Any:
    """The type of a value were it in host memory."""
    return type_of(x).update(memory_space=_SPACES["pinned_host"])


def type_of(x: Any) -> Any:
    """The type of a value, or of a type itself."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def stack_type(x: Any, count: int) -> Any:
    """The type of so many values as rows, of a value whose type says no sharding."""
    aval = type_of(x)
    return jax.core.ShapedArray((count, *aval.shape), aval.dtype)


def nbytes(x: Any) -> int:
    """The bytes of a value or type, over all devices together."""
    aval = type_of(x)
    return aval.size * aval.dtype.itemsize


def nbytes_on_each_device(x: Any) -> int:
    """The bytes of a value or type on each device of its mesh.

    In Auto mode a type does not say how a value is sharded (F30): it is taken to be
    sharded over the whole mesh, as state that is worth offloading is.
    """
    sharding = type_of(x).sharding
    shards = 1
    for name, kind in zip(
        sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True
    ):
        if kind == AxisType.Auto or name in axes_of(sharding.spec):
            shards *= sharding.mesh.shape[name]
    return -(-nbytes(x) // shards)


def decoded_nbytes_on_each_device(x: Any, holds_codes: bool) -> int:
    """The bytes on each device; of codes of 8 bits those of the float32 they become."""
    return (4 if holds_codes else 1) * nbytes_on_each_device(x)


def itemsize(x: Any) -> int:
    """The bytes of one number of a value or type."""
    return type_of(x).dtype.itemsize


def devices_of(x: Any) -> int:
    """The devices of the mesh that a value or type is on; 1 of none."""
    return type_of(x).sharding.mesh.size or 1


def shape_on_each_device(x: Any) -> tuple[int, ...]:
    """The shape of a value's or type's part on each device, as far as its type says."""
    aval = type_of(x)
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    shards = (math.prod(mesh.shape[name] for name in names_of(part)) for part in spec)
    return tuple(-(-n // k) for n, k in zip(aval.shape, shards, strict=True))


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding that a type says; None in Auto mode, and where no mesh is."""
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    return aval.sharding if explicit else None


def axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    return {name for part in spec for name in names_of(part)}


def names_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one part of a spec names."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def slice_axis(x: Any) -> int | None:
    """The axis along which a value or type can be sliced within every shard.

    In Explicit mode the first that is not sharded. In Auto mode a type does not say
    (F30): on a mesh of several devices the leading axis of three or more is taken for a
    layer axis, which is not sharded; of fewer none is. On a single device the leading
    axis.
    """
    aval = type_of(x)
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    if not aval.shape:
        return None
    auto = any(
        kind == AxisType.Auto and mesh.shape[name] > 1
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
    if auto and len(aval.shape) < 3:
        return None
    return next((i for i, names in enumerate(spec) if names is None), None)


def is_key(x: Any) -> bool:
    """Returns whether a value or type is of random keys, which have data."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def movable_nbytes(x: Any) -> int | None:
    """The bytes of a value or type that can be on the host, None for one that cannot.

    A random key can be put there, but JAX traces it as a device value (F32).
    """
    extended = jnp.issubdtype(type_of(x).dtype, jax.dtypes.extended)
    return None if extended else nbytes(x)


def transfer(x: jax.Array, memory_kind: str) -> jax.Array:
    """Moves a traced value. Nothing happens to a value that is there already."""
    before = kind_of_type(x)
    if before == memory_kind:
        return x
    # Without `src` JAX leaves the cotangent of what is moved to the host there.
    return jax.device_put(x, _SPACES[memory_kind], src=_SPACES[before])


def transfer_all(values: Iterable[Any], memory_kinds: Iterable[str]) -> list[Any]:
    """Moves traced values, each to its memory kind."""
    return [transfer(x, k) for x, k in zip(values, memory_kinds, strict=True)]


def full(aval: Any, value: Any, memory_kind: str = "device") -> jax.Array:
    """A traced array of a type, filled with a number, in a memory."""
    # In Auto mode the compiler chooses.
    sharding = explicit_sharding(aval)
    filled = lax.full(aval.shape, value, aval.dtype, sharding=sharding)
    if explicit_sharding(type_of(filled)) != sharding:
        # JAX 0.12 forgets it where no mesh is set. And within `jax.sharding.auto_axes`,
        # as where an embedding is looked up, it is one of Auto mode.
        filled = jax.sharding.reshard(filled, aval.sharding)
    return transfer(filled, memory_kind)


def positions() -> Callable[[Any], Any]:
    """Returns a function to pass the positions of slices in a loop through.

    Call this before the loop, and the function that it returns inside.

    Before JAX 0.11.1 a GPU's compiler takes any function of a loop's counter, such as
    `7 - i` or `2 * i`, for the counter itself, and copies other rows (U10). It reads no
    position with a number in it that the compiler does not know: kernels then move the
    rows, which is slower, and right.
    """
    if compat.COPIES_AT_POSITIONS:
        return lambda position: position
    unknown = lax.optimization_barrier
    zero = lax.platform_dependent(
        jnp.int32(0), cuda=unknown, rocm=unknown, default=lambda zero: zero
    )

    def unread(position: Any) -> Any:
        position = jnp.asarray(position)
        return position + zero.astype(position.dtype)

    return unread


def moved_by_kernels() -> str:
    """Returns a line on the cost of `positions` for slices; "" if it is free."""
    if compat.COPIES_AT_POSITIONS:
        return ""
    return (
        f"on GPUs, with JAX {jax.__version__}, kernels move these slices, and nothing "
        "else computes meanwhile; with 0.11.1 or newer copy engines move them"
    )


def array_from(
    shape: tuple[int, ...], sharding: Sharding, value: Callable[[Any], np.ndarray]
) -> jax.Array:
    """An array whose value at an index, as each device asks for it, is given."""
    if isinstance(sharding, SingleDeviceSharding):
        # The call below makes an array that is in host memory and is traced as a
        # device value (F28).
        (index,) = sharding.devices_indices_map(shape).values()
        return jax.device_put(value(index), sharding)
    return jax.make_array_from_callback(shape, sharding, value)


def memory_kind_of(x: Any) -> str | None:
    """The memory kind of an array, a struct or a sharding; None where it has none."""
    if isinstance(x, jax.core.Tracer):
        return kind_of_type(x)
    sharding = x if isinstance(x, Sharding) else getattr(x, "sharding", None)
    if sharding is not x and hasattr(x, "memory_kind"):
        return x.memory_kind  # What stands for a leaf on disk says so itself.
    if isinstance(sharding, Sharding):
        # A sharding that names no kind stands for the device's default, which every
        # platform of interest calls "device".
        return sharding.memory_kind or "device"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "pinned_host" if compat.struct_is_on_host(x) else "device"
    return None


def pinned_bytes_of_this_process() -> int:
    """The bytes of all arrays that are in pinned host memory now."""
    # Shards are not looked at: that would make them arrays, to be counted next time.
    return sum(
        math.prod(x.sharding.shard_shape(x.shape))
        * x.dtype.itemsize
        * len(x.sharding.addressable_devices)
        for x in jax.live_arrays()
        if memory_kind_of(x) == "pinned_host"
    )


@nnx.in_place
def set_memory_kind(
    tree: T, pattern: str | re.Pattern[str], memory_kind: MemoryKind
) -> T:
    """Replaces the memory kind of the leaves whose path matches.

    Apply it several times for several patterns and kinds. Leaves that do not match, and
    leaves that are in that memory already, come back unchanged.

    Args:
      tree: A pytree of arrays (which are transferred, keeping their sharding), of
        `jax.ShapeDtypeStruct` or of shardings (which are retyped). A struct without
        a sharding gets one, on the first local device. Objects of Flax NNX are changed
        in place.
      pattern: A regex that matches a leaf's whole path, as in `Rule`.
      memory_kind: ``"device"``, ``"pinned_host"`` or ``"unpinned_host"``.

    Returns:
      A tree of the same structure, with the same objects of NNX.

    Raises:
      ValueError: The pattern matches no leaf, the kind is unknown, or the devices
        of a leaf have no such memory.
      TypeError: A leaf that matches has no memory kind (a Python or NumPy value, a
        `PartitionSpec`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> state = {"mu": jnp.zeros(3), "nu": jnp.zeros(3)}
      >>> state = set_memory_kind(state, "nu", "pinned_host")
      >>> state["mu"].sharding.memory_kind, state["nu"].sharding.memory_kind
      ('device', 'pinned_host')
    """
    regex = compile_pattern(pattern)
    check_memory_kind(memory_kind)
    flat, treedef = trees.flatten_with_path(tree)
    leaves = [(trees.path_string(keys), leaf) for keys, leaf in flat]
    chosen = [(path, x) for path, x in leaves if trees.matches(regex, path)]
    if not chosen:
        paths = [path for path, _ in leaves]
        raise ValueError(trees.no_match_message(regex, paths))
    strangers = [(path, x) for path, x in chosen if memory_kind_of(x) is None]
    if strangers:
        raise TypeError(
            "only jax.Array, jax.ShapeDtypeStruct and shardings have a memory kind; "
            f"{trees.literal(regex.pattern)} also matches "
            + ", ".join(f"{path!r} ({type(x).__name__})" for path, x in strangers)
            + f". {_remedy([x for _, x in strangers])}"
        )
    check_none_on_disk(chosen)
    retyped = [
        _retype(path, x, memory_kind) if trees.matches(regex, path) else x
        for path, x in leaves
    ]
    return jax.tree_util.tree_unflatten(treedef, retyped)


def check_none_on_disk(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises a ValueError that names the leaves, given with paths, that are on disk."""
    on_disk = [path for path, x in leaves if memory_kind_of(x) == "disk"]
    if on_disk:
        raise ValueError(
            f"{trees.listed(on_disk)}: on disk. Bring them back first, with "
            "optax_offload.reload_states"
        )


def _remedy(strangers: list[Any]) -> str:
    """Returns a fix for leaves that have no memory kind."""
    specs = [isinstance(x, PartitionSpec) for x in strangers]
    remedies = ["Narrow the pattern"]
    if any(specs):
        remedies.append(
            "give jax.NamedSharding(mesh, spec) for each PartitionSpec, which names no "
            "devices"
        )
    if not all(specs):
        remedies.append("make values arrays with jnp.asarray")
    return ", or ".join(remedies)


def _retype(path: str, x: Any, memory_kind: str) -> Any:
    if isinstance(x, Sharding):
        return with_kind(path, x, memory_kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        sharding = x.sharding or first_device_sharding()
        return struct(x, with_kind(path, sharding, memory_kind))
    if memory_kind_of(x) == memory_kind:
        # Its type may not say where a traced value is.
        unknown = as_on_device.value and is_traced(x) and memory_kind == "device"
        return jax.device_put(x, _SPACES[memory_kind]) if unknown else x
    if isinstance(x, jax.core.Tracer):
        if memory_kind not in COMPILED_KINDS:
            raise ValueError(
                f"{path!r} is traced; under jit its memory kind can be "
                f"{' or '.join(map(repr, COMPILED_KINDS))}, not {memory_kind!r}"
            )
        return transfer(x, memory_kind)
    return jax.device_put(x, with_kind(path, x.sharding, memory_kind))


def with_kind(path: str, sharding: Sharding, memory_kind: str) -> Sharding:
    """The sharding in another memory, or an error that names the leaf."""
    try:
        return sharding.with_memory_kind(memory_kind)
    except ValueError as e:
        raise ValueError(
            f"{path!r} cannot be put into {memory_kind!r} with {sharding}: {e}"
        ) from e


def first_device_sharding() -> Sharding:
    """Returns the sharding of values that have none: the first device."""
    return SingleDeviceSharding(jax.local_devices()[0])


def struct(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """A struct like ``x`` that is traced as living where ``sharding`` says."""
    kind = memory_kind_of(sharding) or "device"
    if kind != "device":
        sharding = on_mesh(sharding, kind)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
    )


def as_placed(tree: T) -> T:
    """A tree whose structs are all traced as living where their shardings say (F28)."""

    def placed(x: Any) -> Any:
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        kind = memory_kind_of(sharding)
        if sharding is None or kind in (None, "device"):
            return x
        if isinstance(sharding, NamedSharding):
            return x  # It is believed.
        there, layout = on_mesh(sharding, kind), x.format.layout
        return x.update(sharding=Format(layout, there) if layout else there)

    leaves, structure = jax.tree.flatten(tree)
    typed = list(map(placed, leaves))
    # What is static is the same object where it has no such struct in it.
    same = all(a is b for a, b in zip(leaves, typed, strict=True))
    return tree if same else jax.tree.unflatten(structure, typed)


def on_mesh(sharding: Sharding, memory_kind: str) -> Sharding:
    """The sharding with this kind, on a mesh of one device where it names a device.

    JAX types a struct with a single-device sharding as a device value, whatever the
    sharding's kind; and so the arrays that Orbax makes with one (by
    `jax.make_array_from_single_device_arrays`). A NamedSharding is believed (F28).
    """
    if not isinstance(sharding, NamedSharding) and sharding.num_devices == 1:
        (device,) = sharding.device_set
        sharding = NamedSharding(Mesh([device], ("device",)), PartitionSpec())
    return sharding.with_memory_kind(memory_kind)
