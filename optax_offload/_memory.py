"""Moving values between memory kinds, and keeping the kind in templates.

The only module that knows JAX's names for memories and how JAX versions differ.
"""

from __future__ import annotations

import math
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


def itemsize(x: Any) -> int:
    """The bytes of one number of a value or type."""
    return _aval(x).dtype.itemsize


def shape_on_each_device(x: Any) -> tuple[int, ...]:
    """The shape of a value's or type's part on each device, as far as its type says."""
    aval = _aval(x)
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    shards = (math.prod(mesh.shape[name] for name in _names(part)) for part in spec)
    return tuple(-(-n // k) for n, k in zip(aval.shape, shards, strict=True))


def _axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    return {name for part in spec for name in _names(part)}


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one part of a spec names."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


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
    kind = memory_kind_of(sharding) or "device"
    if kind != "device":
        sharding = _on_mesh(sharding, kind)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
    )


def _on_mesh(sharding: Sharding, memory_kind: str) -> Sharding:
    """The sharding with this kind, on a mesh of one device where it names a device.

    JAX (0.10 to 0.12) types a struct with a single-device sharding as a device value,
    whatever the sharding's kind; and so the arrays that Orbax makes with one (by
    `jax.make_array_from_single_device_arrays`). A NamedSharding is believed.
    """
    if not isinstance(sharding, NamedSharding) and sharding.num_devices == 1:
        (device,) = sharding.device_set
        sharding = NamedSharding(Mesh([device], ("device",)), PartitionSpec())
    return sharding.with_memory_kind(memory_kind)


def eval_shape(fn: Callable[..., Any], *args: Any, out_shardings: Any = None) -> Any:
    """`jax.eval_shape`, with memory kinds and shardings kept: a template to restore.

    `jax.eval_shape` forgets where a result lives (before JAX 0.11 its memory kind
    too), and a template made with it makes a checkpoint library restore offloaded
    state to the device. Here the memory kind is the one that ``fn`` gives the result,
    and the sharding is, in this order:

    - what ``out_shardings`` says;
    - that of an argument of the same shape whose path ends the result's path (as
      ``dense/kernel`` ends ``0/mu/dense/kernel``);
    - that of the result's own type, which has one in JAX's Explicit mode;
    - replicated over the devices of the shardings above, of the mesh set with
      `jax.set_mesh`, or of the first local device.

    Args:
      fn: the function, for instance the ``init`` of an optimizer, or one that makes a
        whole Flax ``TrainState`` or `flax.nnx.state`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`.
      out_shardings: shardings of the results, a tree or a prefix of it as in
        `jax.jit`, None where the library decides. Flax makes them from metadata:
        ``nn.get_sharding(jax.eval_shape(fn), mesh)`` and
        ``nnx.get_named_sharding(jax.eval_shape(fn), mesh)``. Their memory kinds do not
        matter: the kinds are ``fn``'s.

    Returns:
      A pytree of `jax.ShapeDtypeStruct`, each with a sharding that has a memory kind.

    Raises:
      ValueError: ``out_shardings`` is no prefix of the result.
      TypeError: it has a leaf that is no sharding.

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
    given = _given_shardings(out_shardings, shapes, paths)
    like = shardings_like(list(zip(paths, avals, strict=True)), args)
    rest = _replicated([given, args])
    structs = [
        _struct(
            aval,
            _on_mesh(
                here or there or _own_sharding(aval, rest) or rest, kind_of_type(aval)
            ),
        )
        for aval, here, there in zip(avals, given, like, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, structs)


def _given_shardings(
    out_shardings: Any, shapes: Any, paths: list[str]
) -> list[Sharding | None]:
    """For each leaf what a prefix tree of shardings says, None for nothing."""
    given: list[Sharding | None] = []

    def give(sharding: Sharding | None, part: Any) -> None:
        given.extend([sharding] * len(jax.tree.leaves(part)))

    try:
        # Not jax.tree.broadcast: to tell None apart it takes the result's for leaves.
        jax.tree.map(give, out_shardings, shapes, is_leaf=lambda x: x is None)
    except ValueError as e:
        raise ValueError(
            f"out_shardings is no tree prefix of what the function returns: {e}"
        ) from e
    strangers = [
        (path, x)
        for path, x in zip(paths, given, strict=True)
        if not (x is None or isinstance(x, Sharding))
    ]
    if strangers:
        raise TypeError(
            "out_shardings has leaves that are no jax.sharding.Sharding: "
            + ", ".join(f"{path!r} ({type(x).__name__})" for path, x in strangers)
            + ". For a PartitionSpec give jax.NamedSharding(mesh, spec)"
        )
    return given


def _own_sharding(aval: Any, rest: Sharding) -> Sharding | None:
    """The sharding in a type, which in Explicit mode tells, on the devices at hand."""
    mesh = getattr(rest, "mesh", None)
    spec = aval.sharding.spec
    if mesh is None or not _axes_of(spec) <= set(mesh.axis_names):
        return None
    return NamedSharding(mesh, spec) if _axes_of(spec) else None


def kind_of_type(aval: Any) -> str:
    """The memory kind of a type."""
    return "pinned_host" if on_host(aval) else "device"


def shardings_like(
    leaves: Sequence[tuple[str, Any]], args: Sequence[Any]
) -> list[Sharding | None]:
    """Gives each leaf, as (path, type), the sharding of the argument it goes with.

    That is the one of the same shape whose path is the longest tail of the leaf's.
    It is how a moment is matched with its parameter, which a jaxpr does not say:
    ``zeros_like`` of a traced value is a constant. A scalar goes with none: there is
    nothing to shard, and a random key among the arguments says nothing of a counter.
    """
    known: dict[tuple[str, tuple[int, ...]], Sharding] = {}
    for arg in args:
        for keys, x in jax.tree_util.tree_flatten_with_path(arg)[0]:
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, Sharding) and not is_traced(x):
                known.setdefault((_rules.path_string(keys), x.shape), sharding)

    def match(path: str, shape: tuple[int, ...]) -> Sharding | None:
        if not shape:
            return None
        parts = path.split("/") if path else []
        tails = ("/".join(parts[i:]) for i in range(len(parts) + 1))
        found = (known.get((tail, shape)) for tail in tails)
        return next((sharding for sharding in found if sharding is not None), None)

    return [match(path, aval.shape) for path, aval in leaves]


def _replicated(shardings_and_args: Any) -> Sharding:
    """The sharding of a value that all devices in sight hold whole."""
    leaves = jax.tree.leaves(shardings_and_args)
    shardings = [
        x if isinstance(x, Sharding) else getattr(x, "sharding", None) for x in leaves
    ]
    for s in shardings:
        if isinstance(s, NamedSharding):
            return NamedSharding(s.mesh, PartitionSpec())
    one = next((s for s in shardings if isinstance(s, Sharding)), None)
    if one is not None:
        return one
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return _first_device_sharding()
    return NamedSharding(mesh, PartitionSpec())
