"""Putting every leaf of a restored state, or of parameters, where it belongs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from optax_offload._ground import compat, nnx, trees
from optax_offload._low_bit import (
    check_parameters,
    codecs_named,
    converted,
    in_other_forms,
)
from optax_offload._places import flax_metadata, memory, templates
from optax_offload._places.rules import (
    OffloadConfig,
    Rule,
    Rules,
    as_config,
    decide,
)
from optax_offload._places.unmoved import warn_of_small_leaves

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_SIZED = (*_ARRAYS, jax.ShapeDtypeStruct)


@nnx.in_place
def place(state: T, like: Any, *, under: str = "") -> T:
    """Puts every leaf of a state where it belongs, after a loader that forgets kinds.

    Many loaders return NumPy arrays, or arrays that are all on the device. The first
    update would then find all of the state on the device. This puts each leaf in its
    memory and on its devices, one leaf after the other. NumPy arrays reach host memory
    without passing through the device, and at most one leaf moves at a time. What is
    encoded or decoded is converted row by row. Use it for values, outside of `jax.jit`.

    **Frozen parameters can rest in few bits**, as the base under adapters, in a codec
    of their rule: `place(base, [Rule(r"layers.*", codec="nf4")])`. `jit` and `stream`
    decode them where a step begins, so that a model sees them in their own dtype;
    elsewhere `low_bit_decode` does. A step that would replace one raises.

    - ``"nf4"``: 16 values, a bfloat16 scale for every 64 along the last axis (QLoRA,
      arXiv 2305.14314). 0.531 bytes a value. Of normal weights a 0.0729th part of their
      deviation is lost, on average.
    - ``"nf4-double"``: the same with scales of 8 bits. 0.516 bytes, as much is lost.
    - ``"int8-linear"``: 255 even steps, a bfloat16 scale for every 64. 1.031 bytes, and
      0.0051 are lost: less than by the scale for a row of LLM.int8 (arXiv 2208.07339).

    NumPy arrays, memory maps among them, are read and encoded in parts of some MiB, so
    that of all the files of a model only codes are in memory. Lines in the log
    (``optax_offload``) say how far it is. Leaves keep their dtype if they have fewer
    than 4096 values, or fewer than 128 rows of the last axis, as norms and biases of
    scanned layers do. An unscanned bias has one.

    Args:
      state: A pytree of arrays, of `jax.Array` or NumPy. With rules also of
        `jax.ShapeDtypeStruct`, which gives such a tree. Objects of Flax NNX in it are
        changed in place, so that what they share stays shared.
      like: The places where the leaves belong, as one of

        - a template, a tree like ``state`` as `eval_shape` makes it, or another state;
        - shardings, a tree or a prefix of it, as `state_shardings` makes it. None
          leaves a leaf, or a part of the tree, as it is;
        - the rules that `offload` was given: a regex, a `Rule`, a sequence of them or
          an `OffloadConfig`. Arrays keep their sharding. NumPy arrays get that of an
          array in the state of the same shape whose path ends alike, or are
          replicated. Leaves in another form than their rule's ``codec`` are encoded or
          decoded: a state of `low_bit` needs rules that name its codecs. Leaves that
          no rule matches belong on the device: give rules of parameters a tree of
          parameters alone, or ``under``. No rules, ``()``, leave all as it is: so
          ``place(params, config.parameters)`` is right for every rule file.
      under: With rules, the path of the state they are for, such as ``"opt_state/1"``
        in a ``TrainState``. Other leaves stay as they are.

    Returns:
      A tree like ``state``. Leaves that were in place, leaves that are no arrays, and
      objects of NNX are the same objects. Python numbers become arrays if ``like`` is a
      template.

    Raises:
      ValueError: ``state`` has another structure, other shapes or other dtypes than
        ``like``; all such leaves are named. Or ``like`` does not say where a leaf
        belongs, a leaf is on disk, or a rule matches nothing, or a value is none that
        the codec of its rule can hold, as NaN. Or a large leaf cannot have the codec of
        frozen parameters that its rule names: it has no floating numbers, or 64 does
        not divide its last axis on each device.
      TypeError: A leaf is traced, or ``like`` has a `PartitionSpec` or a string where
        ``state`` has none.

    Warns:
      OffloadWarning: all leaves that rules would move are smaller than their
        ``min_bytes``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> params = {"w": jnp.ones((256, 128))}
      >>> loaded = jax.device_get(tx.init(params))  # as pickle would give it
      >>> state = oo.place(loaded, oo.eval_shape(tx.init, params))
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
      >>> oo.place(params, oo.Rule("w", "device", codec="nf4"))["w"]
      Encoded(nf4, float32[256, 128])
    """
    leaves = trees.leaves_with_paths(state)
    _check_values(leaves)
    if type(like) is tuple and not like:
        return state  # No rules, as of a file that leaves all parameters on the device.
    if _are_rules(like):
        state = _in_form(state, leaves, like, under)
        leaves = trees.leaves_with_paths(state)
        belongs = _by_rules(leaves, like, under)
    elif under:
        raise ValueError(trees.under_no_rules_message(under))
    else:
        _check_no_names(leaves, like)
        belongs = _by_example(state, leaves, like)
    placed = [
        x if at is None else _placed(path, x, at)
        for (path, x), at in zip(leaves, belongs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def _check_values(leaves: Sequence[tuple[str, Any]]) -> None:
    traced = [path for path, x in leaves if isinstance(x, jax.core.Tracer)]
    if traced:
        raise TypeError(
            f"{trees.listed(traced)}: traced. place is for values, outside of "
            "jax.jit; within it use optax_offload.set_memory_kind"
        )
    memory.check_none_on_disk(leaves)


def _check_no_names(leaves: Sequence[tuple[str, Any]], like: Any) -> None:
    """Raises where memory kinds are given by leaf, or in pairs, and are no rules."""
    own = {path for path, x in leaves if isinstance(x, str)}
    named = [(p, x) for p, x in trees.leaves_with_paths(like) if isinstance(x, str)]
    for path, x in named:
        if path not in own:
            raise TypeError(
                f"like has {x!r} at {path!r}, which is no place. Give rules, each a "
                "regex or as optax_offload.Rule('head/.*', 'pinned_host'); or a tree "
                "like state, of arrays, jax.ShapeDtypeStruct or shardings"
            )


def _are_rules(like: Any) -> bool:
    if isinstance(like, (str, re.Pattern, Rule, OffloadConfig)):
        return True
    is_sequence = isinstance(like, (list, tuple)) and len(like) > 0
    return is_sequence and all(isinstance(x, (str, re.Pattern, Rule)) for x in like)


def _is_array(x: Any) -> bool:
    return isinstance(x, _ARRAYS)


def _by_rules(
    leaves: Sequence[tuple[str, Any]], rules: Rules, under: str
) -> list[Sharding | None]:
    """Returns the place of each leaf by rules; None for leaves that stay."""
    sizes = [
        (path, memory.movable_nbytes(x) if isinstance(x, _SIZED) else None)
        for path, x in leaves
    ]
    placements = decide(as_config(rules), sizes, under=under)
    warn_of_small_leaves((p.memory_kind, p.why) for p in placements if p.memory_kind)
    shardings = _shardings_of(leaves)
    return [
        memory.with_kind(path, shardings[i], placement.memory_kind)
        if i in shardings and placement.memory_kind
        else None
        for i, ((path, _), placement) in enumerate(zip(leaves, placements, strict=True))
    ]


def _shardings_of(leaves: Sequence[tuple[str, Any]]) -> dict[int, Sharding]:
    """Shardings of arrays. A NumPy array gets a similar one's, or is replicated."""
    arrays = [(i, path, x) for i, (path, x) in enumerate(leaves) if _is_array(x)]
    kept = [x.sharding if isinstance(x, jax.Array) else None for _, _, x in arrays]
    nearby = templates.like_those_given([(path, x) for _, path, x in arrays], kept)
    rest = templates.replicated(kept)
    found = {
        i: own or near or rest
        for (i, _, _), own, near in zip(arrays, kept, nearby, strict=True)
    }
    first = memory.first_device_sharding
    return found | {
        i: x.sharding or first()
        for i, (_, x) in enumerate(leaves)
        if isinstance(x, jax.ShapeDtypeStruct)
    }


def _in_form(
    state: Any, leaves: Sequence[tuple[str, Any]], rules: Rules, under: str
) -> Any:
    """The state, encoded as rules say."""
    config = as_config(rules).made_lenient()
    named = codecs_named(state, config, under=under)
    check_parameters(state, named)
    # What is encoded is sharded as its values were.
    shardings = _shardings_of(leaves)
    flat, _ = trees.flatten_with_path(state)
    positions = {keys: i for i, (keys, _) in enumerate(flat)}
    # Of what is encoded otherwise, that of its first part: its codes.
    for i, (keys, _) in enumerate(flat):
        positions.setdefault(keys[:-1], i)

    def sharding_of(keys: trees.KeyPath) -> Sharding | None:
        return shardings[positions[keys]]

    def on_host(keys: trees.KeyPath, x: Any) -> Any:
        # From host memory they are converted row by row, and are there on their way.
        if isinstance(x, jax.Array):
            return x
        path = trees.path_string(keys)
        at = memory.with_kind(path, shardings[positions[keys]], "pinned_host")
        return _placed(path, x, at)

    return converted(state, in_other_forms(state, named), sharding_of, on_host)


def _by_example(
    state: Any, leaves: Sequence[tuple[str, Any]], like: Any
) -> list[Any | None]:
    """Returns the place of each leaf by ``like``; None for leaves that stay."""
    examples = _paired(state, leaves, like)
    wrong: list[str] = []
    specs: list[str] = []
    nowhere: list[str] = []
    for (path, x), example in zip(leaves, examples, strict=True):
        if isinstance(example, PartitionSpec):
            specs.append(path)
        elif isinstance(example, (jax.Array, jax.ShapeDtypeStruct)):
            if not isinstance(example.sharding, Sharding):
                nowhere.append(path)
            wrong += _differences(path, x, example)
    if specs:
        raise TypeError(
            f"like has a PartitionSpec, which names no devices, at "
            f"{trees.listed(specs)}. Make shardings with "
            "optax_offload.state_shardings(fn, *args, shardings=like, mesh=mesh)"
        )
    if nowhere:
        raise ValueError(
            "like does not say where these belong, as jax.eval_shape forgets it: "
            f"{trees.listed(nowhere)}. Make it with optax_offload.eval_shape"
        )
    if wrong:
        raise ValueError(
            "state and like differ in shape or dtype:\n  " + "\n  ".join(wrong)
        )
    says_where = (jax.Array, jax.ShapeDtypeStruct, Sharding)
    return [
        example
        if isinstance(example, says_where)
        and (_is_array(x) or isinstance(x, (bool, int, float, complex)))
        else None
        for (_, x), example in zip(leaves, examples, strict=True)
    ]


def _paired(state: Any, leaves: Sequence[tuple[str, Any]], like: Any) -> list[Any]:
    """The leaf of ``like`` for each leaf of the state, or an error that names all."""

    def is_leaf(x: Any) -> bool:
        return x is None or flax_metadata.is_box_of_one(x)

    examples: list[Any] = []
    whole: list[bool] = []

    def pair(example: Any, part: Any) -> None:
        (example,) = jax.tree.leaves(example) or [None]
        count = len(jax.tree.leaves(part))
        examples.extend([example] * count)
        # Of a prefix only shardings and None stand for more than a leaf.
        may_cover = example is None or isinstance(example, Sharding)
        whole.append(may_cover or count == 1)

    try:
        jax.tree.map(pair, like, state, is_leaf=is_leaf)
        if all(whole):
            return examples
        reason = "an array or struct stands where the state has a subtree"
    except ValueError as e:
        reason = str(e)
    like_paths = [path for path, _ in trees.leaves_with_paths(like)]
    paths = [path for path, _ in leaves]
    lines = [
        *(
            f"only in like: {path}"
            for path in like_paths
            if not any(_is_within(p, path) for p in paths)
        ),
        *(
            f"only in state: {path}"
            for path in paths
            if not any(_is_within(path, p) for p in like_paths)
        ),
    ] or [
        "the leaves have the same paths, and the containers are of other types: "
        "jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state)) changes "
        "them"
    ]
    raise ValueError(
        "state and like have different structures:\n  "
        + "\n  ".join(lines)
        + f"\nJAX says: {reason}"
    )


def _is_within(path: str, subtree: str) -> bool:
    return not subtree or path == subtree or path.startswith(subtree + "/")


def _differences(path: str, x: Any, example: Any) -> list[str]:
    if _is_array(x):
        got, wanted = (tuple(x.shape), x.dtype), (tuple(example.shape), example.dtype)
    elif isinstance(x, (bool, int, float, complex)):
        got = ((), type(x).__name__)
        wanted = (tuple(example.shape), example.dtype if example.shape else got[1])
    else:
        return []  # Not an array, such as a function: left as it is.
    if got == wanted:
        return []

    def text(shape: tuple[int, ...], dtype: Any) -> str:
        return f"{dtype}[{','.join(map(str, shape))}]"

    return [f"{path}: state has {text(*got)}, like has {text(*wanted)}"]


def _placed(path: str, x: Any, example: Any) -> Any:
    """Puts a leaf where it belongs, and waits, so that one leaf moves at a time."""
    is_sharding = isinstance(example, Sharding)
    sharding = example if is_sharding else example.sharding
    kind = memory.memory_kind_of(sharding) or "device"
    if isinstance(x, jax.ShapeDtypeStruct):
        return memory.struct(x, sharding)
    weak = not is_sharding and jax.typeof(example).weak_type
    if not isinstance(x, jax.Array):
        dtype = None if is_sharding or _is_array(x) else example.dtype
        value = np.asarray(x, dtype)
        x = memory.array_from(value.shape, sharding, lambda index: value[index])
    elif not (x.sharding.is_equivalent_to(sharding, x.ndim) and _typed(x, kind)):
        there = jax.device_put(x, memory.with_kind(path, sharding, kind))
        # Some loaders make arrays that are in host memory and are traced as device
        # values, and JAX sees nothing to do (F28).
        x = (
            there
            if _typed(there, kind)
            else jax.device_put(x, memory.on_mesh(sharding, kind))
        )
    if weak and not x.weak_type:
        x = compat.weakly_typed(x)
    return x.block_until_ready()


def _typed(x: jax.Array, kind: str) -> bool:
    """Returns whether an array's type has its memory. Keys' never have (F32)."""
    is_key = memory.movable_nbytes(x) is None
    return kind != "pinned_host" or is_key or memory.on_host(x)
