"""Templates: results described with their shardings and memory kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_offload._ground import compat, nnx, trees
from optax_offload._places import memory

T = TypeVar("T")


def eval_shape(fn: Callable[..., T], *args: Any, out_shardings: Any = None) -> T:
    """Makes a template, as `jax.eval_shape`, with memory kinds and shardings.

    `jax.eval_shape` forgets where a result lives (F29: before JAX 0.11 its memory kind
    too), so a checkpoint library that is given its template restores offloaded state to
    the device. Here the memory kind is the one that ``fn`` gives the result, and the
    sharding is, in this order:

    - what ``out_shardings`` says;
    - that of an argument of the same shape whose path ends the result's path (as
      ``dense/kernel`` ends ``0/mu/dense/kernel``);
    - what ``out_shardings`` says of a leaf of the same shape whose path ends alike (as
      ``params/dense/kernel`` and ``opt_state/0/mu/dense/kernel`` do);
    - that of the result's own type, which has one in JAX's Explicit mode;
    - replicated over the devices of the shardings above, of the mesh set with
      `jax.set_mesh`, or of the first local device.

    Args:
      fn: The function, for instance the ``init`` of an optimizer, or one that makes a
        whole Flax ``TrainState``, or objects of Flax NNX, which share what they do.
      *args: Pytrees of arrays or `jax.ShapeDtypeStruct`.
      out_shardings: Shardings of the results, a tree or a prefix of it as in
        `jax.jit`, None where the library decides. Flax makes them from metadata:
        ``nn.get_sharding(jax.eval_shape(fn), mesh)`` and
        ``nnx.get_named_sharding(jax.eval_shape(fn), mesh)``. Their memory kinds do not
        matter: the kinds are ``fn``'s.

    Returns:
      A pytree of `jax.ShapeDtypeStruct`, each with a sharding that has a memory kind.
      To a type checker it is what ``fn`` returns.

    Raises:
      ValueError: ``out_shardings`` is no prefix of the result.
      TypeError: ``out_shardings`` has a leaf that is no sharding.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.sgd(0.1, momentum=0.9), ".*trace.*")
      >>> template = oo.eval_shape(tx.init, {"w": jnp.zeros((256, 256))})
      >>> template[0].trace["w"].sharding.memory_kind
      'pinned_host'
    """
    result = trace(nnx.splits(fn), args)
    given = spread("out_shardings", out_shardings, result)
    check_shardings("out_shardings", given, result)
    shardings = choose(result, given, args)
    structs = [
        memory.struct(x, s) for x, s in zip(result.types, shardings, strict=True)
    ]
    structure = jax.tree.structure(result.shapes)
    return nnx.merged(jax.tree.unflatten(structure, structs))


@dataclasses.dataclass(frozen=True)
class Result:
    """The traced result of a function. Nothing is computed.

    Attributes:
      shapes: The tree that the function returns, of `jax.ShapeDtypeStruct`.
      paths: The path of each leaf.
      types: The type of each leaf, which says its memory kind too.
    """

    shapes: Any
    paths: list[str]
    types: list[Any]


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> Result:
    """Traces ``fn(*args)``."""
    given = memory.as_placed(tuple(args))
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*given)
    paths = [path for path, _ in trees.leaves_with_paths(shapes)]
    return Result(shapes, paths, list(closed.out_avals))


def spread(
    name: str,
    prefix: Any,
    result: Result,
    is_leaf: Callable[[Any], bool] = lambda x: False,
) -> list[Any]:
    """The leaf of a prefix tree, the argument ``name``, for each leaf of a result.

    None, and what ``is_leaf`` says, are leaves of the prefix tree.
    """
    given: list[Any] = []

    def give(x: Any, part: Any) -> None:
        given.extend([x] * len(jax.tree.leaves(part)))

    try:
        # Not jax.tree.broadcast: to tell None apart it takes the result's for leaves.
        jax.tree.map(
            give, prefix, result.shapes, is_leaf=lambda x: x is None or is_leaf(x)
        )
    except ValueError as e:
        raise ValueError(
            f"{name} is not a tree prefix of what the function returns: {e}"
        ) from e
    return given


def check_shardings(name: str, given: Sequence[Any], result: Result) -> None:
    """Raises unless what was given for each leaf is a sharding or None."""
    strangers = [
        (path, x)
        for path, x in zip(result.paths, given, strict=True)
        if not (x is None or isinstance(x, Sharding))
    ]
    if strangers:
        raise TypeError(
            f"{name} has leaves that are not a jax.sharding.Sharding: "
            + ", ".join(f"{path!r} ({type(x).__name__})" for path, x in strangers)
            + ". For a PartitionSpec give jax.NamedSharding(mesh, spec)"
        )


def choose(
    result: Result,
    given: Sequence[Sharding | None],
    args: Sequence[Any],
    rest: Sharding | None = None,
) -> list[Sharding]:
    """The sharding of each leaf of a result, with the kind that its type says.

    ``rest`` is for leaves of which nothing else says how they are sharded.
    """
    with_paths = list(zip(result.paths, result.types, strict=True))
    candidates = zip(
        given,
        shardings_like(with_paths, args),
        like_those_given(with_paths, given),
        strict=True,
    )
    rest = rest or replicated([given, args])
    return [
        memory.on_mesh(
            next((s for s in said if s is not None), None)
            or _own_sharding(aval, rest)
            or rest,
            memory.kind_of_type(aval),
        )
        for said, aval in zip(candidates, result.types, strict=True)
    ]


def like_those_given(
    leaves: Sequence[tuple[str, Any]], given: Sequence[Sharding | None]
) -> list[Sharding | None]:
    """Gives each leaf the sharding given for one of the same shape and a like path.

    ``opt_state/0/mu/dense/kernel`` matches ``params/dense/kernel``: they share the
    longest tail, ``dense/kernel``. If the shardings of those that share it differ, the
    leaf has none.
    """
    known: dict[tuple[str, tuple[int, ...]], set[Sharding]] = {}
    for (path, aval), sharding in zip(leaves, given, strict=True):
        if sharding is not None:
            for tail in trees.tails(path)[:-1]:
                known.setdefault((tail, aval.shape), set()).add(sharding)

    def match(path: str, shape: tuple[int, ...]) -> Sharding | None:
        if not shape:
            return None
        found = (known.get((tail, shape)) for tail in trees.tails(path)[:-1])
        first = next((shardings for shardings in found if shardings), set())
        return next(iter(first)) if len(first) == 1 else None

    return _matched(match, leaves, {shape for _, shape in known}, _for_scales)


def _own_sharding(aval: Any, rest: Sharding) -> Sharding | None:
    """The sharding in a type, which in Explicit mode tells, on the devices at hand."""
    mesh = getattr(rest, "mesh", None)
    spec = aval.sharding.spec
    if mesh is None or not memory.axes_of(spec) <= set(mesh.axis_names):
        return None
    return NamedSharding(mesh, spec) if memory.axes_of(spec) else None


def shardings_like(
    leaves: Sequence[tuple[str, Any]], args: Sequence[Any]
) -> list[Sharding | None]:
    """Gives each leaf, as (path, type), the sharding of the argument that it matches.

    That is the one of the same shape whose path is the longest tail of the leaf's.
    It is how a moment is matched with its parameter, which a jaxpr does not say:
    ``zeros_like`` of a traced value is a constant. A scalar matches none: it has
    nothing to shard, and a random key among the arguments says nothing of a counter.
    """
    known: dict[tuple[str, tuple[int, ...]], Sharding] = {}
    on_mesh = replicated(args)
    for arg in args:
        for keys, x in trees.flatten_with_path(arg)[0]:
            sharding = getattr(x, "sharding", None)
            if isinstance(on_mesh, NamedSharding) and memory.is_uncommitted(x):
                sharding = on_mesh  # JAX puts it there in the first step.
            if isinstance(sharding, Sharding) and not memory.is_traced(x):
                known.setdefault((trees.path_string(keys), x.shape), sharding)

    match = _by_longest_tail(known)
    return _matched(match, leaves, {shape for _, shape in known}, _for_scales)


def arguments_like(
    leaves: Sequence[tuple[str, Any]], args: Sequence[Any]
) -> list[int | None]:
    """Gives each leaf the argument that it matches, as a position among all leaves.

    As `shardings_like`, for arguments whose sharding is not known yet.
    """
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    flat = [kx for arg in args for kx in trees.flatten_with_path(arg)[0]]
    for i, (keys, x) in enumerate(flat):
        known.setdefault((trees.path_string(keys), jnp.shape(x)), i)
    match = _by_longest_tail(known)
    shapes = {shape for _, shape in known}
    return _matched(match, leaves, shapes, lambda position, _: position)


def _by_longest_tail(
    known: Mapping[tuple[str, tuple[int, ...]], T],
) -> Callable[[str, tuple[int, ...]], T | None]:
    """Finds what is known of the longest end of a path, for arrays of a shape."""

    def match(path: str, shape: tuple[int, ...]) -> T | None:
        if not shape:
            return None
        found = (known.get((tail, shape)) for tail in trees.tails(path))
        return next((x for x in found if x is not None), None)

    return match


def _matched(
    match: Callable[[str, tuple[int, ...]], T | None],
    leaves: Sequence[tuple[str, Any]],
    shapes: set[tuple[int, ...]],
    for_part: Callable[[T, tuple[int, ...]], T],
) -> list[T | None]:
    """The match of each leaf, else that of the leaf that it is an encoded part of.

    Codes and scales have the shape of the leaf but for a shorter last axis.
    """

    def matched(path: str, shape: tuple[int, ...]) -> T | None:
        found = match(path, shape)
        leaf = trees.encoded_leaf(path)
        if found is not None or leaf is None or not shape:
            return found
        like = (
            s for s in sorted(shapes) if s[:-1] == shape[:-1] and s[-1] >= shape[-1]
        )
        candidates = (match(leaf, s) for s in like)
        found = next((s for s in candidates if s is not None), None)
        return None if found is None else for_part(found, shape)

    return [matched(path, aval.shape) for path, aval in leaves]


def _for_scales(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """The sharding of a leaf for its scales, each with its block, if that divides."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        if not isinstance(sharding, NamedSharding):
            raise
        return sharding.update(spec=PartitionSpec(*sharding.spec[: len(shape) - 1]))
    return sharding


def replicated(shardings_and_args: Any) -> Sharding:
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
    # Within a trace JAX says no mesh of devices.
    if compat.tracing() or (mesh := jax.sharding.get_mesh()).empty:
        return memory.first_device_sharding()
    return NamedSharding(mesh, PartitionSpec())


def make(init: Callable[..., Any], params: Any, args: Any) -> Any:
    """New state, made by one program, each leaf where its parameter is.

    Under jit ``zeros_like`` knows nothing of its argument's sharding, so what it makes
    would be on every device whole.

    Args:
      init: The function.
      params: The parameters.
      args: What the program takes in their place: these, or nothing.
    """
    mesh = replicated(params)
    if not isinstance(mesh, NamedSharding):
        return jax.jit(init)(args)
    closed, out = jax.make_jaxpr(init, return_shape=True)(args)
    paths = [path for path, _ in trees.leaves_with_paths(out)]
    like = shardings_like(list(zip(paths, closed.out_avals, strict=True)), [params])
    chosen = [
        s and s.with_memory_kind(memory.kind_of_type(x))
        for s, x in zip(like, closed.out_avals, strict=True)
    ]
    # One program takes values of one mesh. Those of another, as of a later stage, go
    # through the first one.
    here = [s if s and s.device_set == mesh.device_set else None for s in chosen]

    def there(x: Any) -> Any:
        devices = getattr(getattr(x, "sharding", mesh), "device_set", mesh.device_set)
        stays = devices == mesh.device_set or memory.is_uncommitted(x)
        return x if stays else jax.device_put(x, mesh)

    structure = jax.tree.structure(out)
    shardings = jax.tree.unflatten(structure, here)
    state = jax.jit(init, out_shardings=shardings)(jax.tree.map(there, args))
    moved = [
        x if s is None or s == at else jax.device_put(x, s)
        for x, s, at in zip(jax.tree.leaves(state), chosen, here, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def typed_like_parameters(state: Any, params: Any) -> Any:
    """New state whose types have the shardings that types of parameters say.

    Without `jax.set_mesh` JAX 0.12 types what ``zeros_like`` makes under jit as
    replicated, in Explicit mode too.
    """
    flat, structure = trees.flatten_with_path(state)
    typed = [(trees.path_string(keys), jax.typeof(x)) for keys, x in flat]
    arguments = [jax.typeof(x).sharding for x in jax.tree.leaves(params)]

    def like(x: Any, position: int | None) -> Any:
        own = jax.typeof(x).sharding
        of = own if position is None else arguments[position]
        if memory.axes_of(own.spec) or not memory.axes_of(of.spec):
            return x
        return jax.sharding.reshard(x, _for_scales(of, x.shape))

    positions = arguments_like(typed, [params])
    leaves = [like(x, i) for (_, x), i in zip(flat, positions, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def gathered(
    fn: Callable[..., tuple[Any, Any]], args: Sequence[Any], state: Any
) -> Callable[..., tuple[Any, Any]]:
    """An update for which state is sharded as its parameters, wherever it rests.

    State may rest spread over devices that each have all of its parameter (`spread`).
    In Explicit mode types say so, and an optimizer is written for types as its ``init``
    makes them of these parameters. So its state is gathered on the device, and spread
    again. In Auto mode no type says it, and the compiler shards the update itself.

    Args:
      fn: A function that returns (updates, state).
      args: Its arguments: gradients, state and parameters first, if there is a state.
      state: The state among them; () where there is none.
    """
    types = [(path, jax.typeof(x)) for path, x in trees.leaves_with_paths(state)]
    if not any(memory.axes_of(aval.sharding.spec) for _, aval in types):
        return fn
    # Gradients of an update without parameters are sharded as these.
    gradients, _, params, *_ = args
    example = gradients if params is None else params
    used = [
        memory.axes_of(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(example)
    ]
    anywhere = {name for names in used for name in names}
    rests: dict[str, tuple[Any, Any]] = {}
    for (path, aval), j in zip(types, arguments_like(types, [example]), strict=True):
        at = aval.sharding
        # What follows no parameter, as a factored moment, is sharded as some may be.
        on_device = _only_over(at, anywhere if j is None else used[j])
        if on_device != at:
            rests[path] = at, on_device
    if not rests:
        return fn

    def gather(keys: Any, x: Any) -> Any:
        path = trees.path_string(keys)
        if path not in rests:
            return x
        at, on_device = rests[path]
        # First as it rests: or a TPU's compiler gathers it in host memory, where that
        # is a computation (`test_spread_state.py::test_on_chips`).
        return jax.sharding.reshard(jax.sharding.reshard(x, at), on_device)

    def scatter(keys: Any, x: Any) -> Any:
        path = trees.path_string(keys)
        return jax.sharding.reshard(x, rests[path][0]) if path in rests else x

    def gathering(updates: Any, state: Any, *rest: Any) -> tuple[Any, Any]:
        updates, new = fn(updates, trees.map_with_path(gather, state), *rest)
        return updates, trees.map_with_path(scatter, new)

    return gathering


def _only_over(sharding: Any, axes: Collection[str]) -> Any:
    """The sharding of a type, over no other mesh axes than these."""
    if memory.axes_of(sharding.spec) <= set(axes):
        return sharding
    kept = [
        tuple(name for name in memory.names_of(part) if name in axes) or None
        for part in sharding.spec
    ]
    return sharding.update(spec=PartitionSpec(*kept))
