"""Moving values between memory kinds, and keeping the kind in templates.

The only module that knows JAX's names for memories and how JAX versions differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from optax_offload import _disk, _rules

T = TypeVar("T")

# What the type of a traced value carries. There are two spaces for three kinds: a
# traced value on the host is pinned.
_SPACES = {
    "device": jax.memory.Space.Device,
    "pinned_host": jax.memory.Space.Host,
}
# Kinds that a compiled program can move a value to and from.
COMPILED_KINDS = tuple(_SPACES)


def is_traced(tree: Any) -> bool:
    """Whether any leaf is being traced, so that no value is there to be moved."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def on_host(x: Any) -> bool:
    """Whether the type of a value, or a type itself, is of host memory."""
    return _aval(x).memory_space == jax.memory.Space.Host


def device_type(x: Any) -> Any:
    """The type of a value (shape, dtype, weak type, sharding) were it on the device."""
    return _aval(x).update(memory_space=jax.memory.Space.Device)


def _aval(x: Any) -> Any:
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def nbytes(x: Any) -> int:
    """The bytes of a value or type, over all devices together."""
    aval = _aval(x)
    return aval.size * aval.dtype.itemsize


def nbytes_on_each_device(x: Any) -> int:
    """The bytes of a value or type on each device of its mesh.

    In Auto mode a type does not say how a value is sharded: it is taken to be sharded
    over the whole mesh, as state that is worth offloading is.
    """
    sharding = _aval(x).sharding
    shards = 1
    for name, kind in zip(
        sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True
    ):
        if kind == AxisType.Auto or name in _axes_of(sharding.spec):
            shards *= sharding.mesh.shape[name]
    return -(-nbytes(x) // shards)


def _axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return {name for names in parts for name in names if name is not None}


def slice_axis(x: Any) -> int | None:
    """The axis along which a value or type can be sliced within every shard.

    In Explicit mode the first that is not sharded. In Auto mode a type does not say:
    on a mesh of several devices the leading axis of three or more is taken for a layer
    axis, which is not sharded; of fewer none is. On a single device the leading axis.
    """
    aval = _aval(x)
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


def movable_nbytes(x: Any) -> int | None:
    """The bytes of a value or type that can be on the host, None for one that cannot.

    A random key can be put there, but JAX (0.10 to 0.12) traces it as a device value.
    """
    extended = jnp.issubdtype(_aval(x).dtype, jax.dtypes.extended)
    return None if extended else nbytes(x)


def transfer(x: jax.Array, memory_kind: str) -> jax.Array:
    """Moves a traced value. Nothing happens to a value that is there already."""
    if on_host(x) == (memory_kind == "pinned_host"):
        return x
    return jax.device_put(x, _SPACES[memory_kind])


def array_from(
    shape: tuple[int, ...], sharding: Sharding, value: Callable[[Any], np.ndarray]
) -> jax.Array:
    """An array whose value at an index, as each device asks for it, is given."""
    if isinstance(sharding, SingleDeviceSharding):
        # With JAX 0.10 to 0.12 the call below makes an array that is in host memory
        # and is traced as a device value.
        (index,) = sharding.devices_indices_map(shape).values()
        return jax.device_put(value(index), sharding)
    return jax.make_array_from_callback(shape, sharding, value)


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same value as one of a Python number's dtype, which gives way to others'.

    Arrays made from NumPy's never are, and a step that was compiled for a weakly typed
    counter would be compiled again, or promote otherwise.
    """
    moved = jax.device_put(x, x.sharding.with_memory_kind("device"))
    weak = primitives.convert_element_type_p.bind(
        moved, new_dtype=x.dtype, weak_type=True, sharding=None
    )
    return jax.device_put(weak, x.sharding)


def memory_kind_of(x: Any) -> str | None:
    """The memory kind of an array, a struct or a sharding; None where it has none."""
    if isinstance(x, jax.core.Tracer):
        return "pinned_host" if on_host(x) else "device"
    if isinstance(x, _disk.OnDisk):
        return "disk"
    sharding = x if isinstance(x, Sharding) else getattr(x, "sharding", None)
    if isinstance(sharding, Sharding):
        # A sharding that names no kind stands for the device's default, which every
        # platform of interest calls "device".
        return sharding.memory_kind or "device"
    if isinstance(x, jax.ShapeDtypeStruct):
        space = getattr(x, "_memory_space", None)  # JAX 0.11 and later
        return "pinned_host" if space == jax.memory.Space.Host else "device"
    return None


def set_memory_kind(tree: T, pattern: str | re.Pattern[str], memory_kind: str) -> T:
    """Replaces the memory kind of the leaves whose path matches.

    It can be applied again and again, for other patterns and kinds. Leaves that do
    not match, and leaves that are there already, come back as they are.

    Args:
      tree: a pytree of arrays (which are moved, keeping their sharding), of
        `jax.ShapeDtypeStruct` or of shardings (which are retyped). A struct without
        a sharding gets one, on the first local device.
      pattern: a regex that matches a leaf's whole path, as in `Rule`.
      memory_kind: ``"device"``, ``"pinned_host"`` or ``"unpinned_host"``.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: the pattern matches no leaf, the kind is unknown, or the devices
        of a leaf have no such memory.
      TypeError: a leaf that matches has no memory kind (a Python or NumPy value).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> state = {"mu": jnp.zeros(3), "nu": jnp.zeros(3)}
      >>> state = set_memory_kind(state, "nu", "pinned_host")
      >>> state["mu"].sharding.memory_kind, state["nu"].sharding.memory_kind
      ('device', 'pinned_host')
    """
    regex = _rules.compile_pattern(pattern)
    _rules.check_memory_kind(memory_kind)
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [(_rules.path_string(keys), leaf) for keys, leaf in flat]
    chosen = [(path, x) for path, x in leaves if regex.fullmatch(path)]
    if not chosen:
        paths = [path for path, _ in leaves]
        raise ValueError(_rules.no_match_message(regex.pattern, paths))
    strangers = [(path, x) for path, x in chosen if memory_kind_of(x) is None]
    if strangers:
        raise TypeError(
            "only jax.Array, jax.ShapeDtypeStruct and shardings have a memory kind; "
            f"{regex.pattern!r} also matches "
            + ", ".join(f"{path!r} ({type(x).__name__})" for path, x in strangers)
            + ". Narrow the pattern, or make them arrays with jnp.asarray"
        )
    on_disk = [path for path, x in chosen if isinstance(x, _disk.OnDisk)]
    if on_disk:
        raise ValueError(
            f"{_rules.listed(on_disk)}: on disk. Bring them back first, with "
            "optax_offload.reload_states"
        )
    retyped = [
        _retype(path, x, memory_kind) if regex.fullmatch(path) else x
        for path, x in leaves
    ]
    return jax.tree_util.tree_unflatten(treedef, retyped)


def _retype(path: str, x: Any, memory_kind: str) -> Any:
    if isinstance(x, Sharding):
        return with_kind(path, x, memory_kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        sharding = x.sharding or _first_device_sharding()
        return _struct(x, with_kind(path, sharding, memory_kind))
    if memory_kind_of(x) == memory_kind:
        return x
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


def _first_device_sharding() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _struct(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """A struct like ``x`` that is traced as living where ``sharding`` says."""
    struct = jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
    )
    host = memory_kind_of(sharding) != "device"
    if host and not isinstance(sharding, NamedSharding):
        # JAX traces a struct with a single-device sharding as a device value,
        # whatever the sharding's kind. Later versions (0.11) have a field that says
        # otherwise; before, only a NamedSharding is believed.
        if hasattr(struct, "_memory_space"):
            return struct.update(_memory_space=jax.memory.Space.Host)
        (device,) = sharding.device_set
        kind = sharding.memory_kind
        mesh = Mesh([device], ("device",))
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return _struct(x, sharding)
    return struct


def eval_shape(fn: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape`, with memory kinds and shardings kept.

    `jax.eval_shape` forgets where a result lives (before JAX 0.11 its memory kind
    too), and a template made with it makes a checkpoint library restore offloaded
    state to the device. Here a result whose path ends in the path of an argument of
    the same shape (``0/mu/dense/kernel`` and ``dense/kernel``) has that argument's
    sharding; any other is replicated over the arguments' devices.

    Args:
      fn: the function, for instance the ``init`` of an optimizer.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`.

    Returns:
      A pytree of `jax.ShapeDtypeStruct`, each with a sharding that has a memory kind.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.sgd(0.1, momentum=0.9), ".*trace.*")
      >>> template = oo.eval_shape(tx.init, {"w": jnp.zeros((256, 256))})
      >>> template[0].trace["w"].sharding.memory_kind
      'pinned_host'
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    paths = [_rules.path_string(keys) for keys, _ in flat]
    avals = closed.out_avals
    shardings = shardings_like(list(zip(paths, avals, strict=True)), args)
    rest = _replicated(args)
    structs = [
        _struct(aval, (s or rest).with_memory_kind(kind_of_type(aval)))
        for aval, s in zip(avals, shardings, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, structs)


def kind_of_type(aval: Any) -> str:
    """The memory kind of a type."""
    return "pinned_host" if on_host(aval) else "device"


def shardings_like(
    leaves: Sequence[tuple[str, Any]], args: Sequence[Any]
) -> list[Sharding | None]:
    """Gives each leaf, as (path, type), the sharding of the argument it goes with.

    That is the one of the same shape whose path is the longest tail of the leaf's.
    It is how a moment is matched with its parameter, which a jaxpr does not say:
    ``zeros_like`` of a traced value is a constant.
    """
    known: dict[tuple[str, tuple[int, ...]], Sharding] = {}
    for arg in args:
        for keys, x in jax.tree_util.tree_flatten_with_path(arg)[0]:
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, Sharding) and not is_traced(x):
                known.setdefault((_rules.path_string(keys), x.shape), sharding)

    def match(path: str, shape: tuple[int, ...]) -> Sharding | None:
        parts = path.split("/") if path else []
        tails = ("/".join(parts[i:]) for i in range(len(parts) + 1))
        found = (known.get((tail, shape)) for tail in tails)
        return next((sharding for sharding in found if sharding is not None), None)

    return [match(path, aval.shape) for path, aval in leaves]


def _replicated(args: Any) -> Sharding:
    """The sharding of a value that all devices of the arguments hold whole."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    for s in shardings:
        if isinstance(s, NamedSharding):
            return NamedSharding(s.mesh, PartitionSpec())
    return next(
        (s for s in shardings if isinstance(s, Sharding)), _first_device_sharding()
    )
