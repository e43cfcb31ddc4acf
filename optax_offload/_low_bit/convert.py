"""States and parameters between formats, as `place` and checkpoints need it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_offload._ground import trees
from optax_offload._ground.progress import Progress
from optax_offload._low_bit import by_parts, forms
from optax_offload._low_bit.codecs import Bfloat16Remainder
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._low_bit.in_rows import in_its_memory
from optax_offload._places import memory


def low_bit_decode(state: Any, params: Any = None) -> Any:
    """Decodes a state, or parameters: every leaf gets the dtype that it stands for.

    The result has the structure of the state of the transformation inside `low_bit`, or
    of the parameters that `place` encoded.
    Leaves stay in their memory. Outside of `jax.jit` they are decoded one after the
    other, those in host memory row by row, so that few rows are on the device.

    Args:
      state: A state of `low_bit` or parameters, with whatever is around them, or a
        template, of `jax.ShapeDtypeStruct`, which gives a template.
      params: The parameters, for master weights in ``"bfloat16-remainder"``: their
        other half.

    Returns:
      A pytree without encoded leaves.

    Raises:
      ValueError: There are master weights, and no parameter of their path, or one that
        is not bfloat16.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.low_bit(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> state = tx.init({"w": jnp.ones((64, 256))})
      >>> oo.low_bit_decode(state)[0].mu["w"].dtype
      dtype('float32')
    """
    return decoded_at(state, params)


def decoded_at(
    state: Any, params: Any, keys_of: Collection[tuple[Any, ...]] | None = None
) -> Any:
    """As `low_bit_decode`, of the leaves with these keys; None for all."""
    uppers = {} if params is None else dict(trees.leaves_with_paths(params))
    without: list[str] = []
    others: list[str] = []

    def decode(keys: Any, x: Any) -> Any:
        if not is_encoded(x) or (keys_of is not None and keys not in keys_of):
            return x
        if isinstance(x.codes, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.codes.sharding)
        param = None
        if isinstance(x.codec, Bfloat16Remainder):
            path = trees.path_string(keys)
            param = _upper_half(keys, x, uppers)
            if param is None:
                without.append(path)
                return x
            if param.dtype != jnp.bfloat16:
                others.append(f"{path!r} ({param.dtype})")
                return x
        value, _ = in_its_memory(lambda x, param: (x.decoded(param), ()), x, param)
        return value

    decoded = trees.map_with_path(decode, state, is_leaf=is_encoded)
    if others:
        raise ValueError(
            "half of each of these is in a bfloat16 parameter, and params has the "
            f"parameter in another dtype: {', '.join(others)}. Give the bfloat16 "
            "params that the state was made with; codec='bfloat16-remainder' needs them"
        )
    if without:
        raise ValueError(
            f"{trees.listed(without)}: half of each is in a bfloat16 parameter, and "
            "params has none of that path and shape. Give params, as in "
            "low_bit_decode(state, params) or tx.update(grads, state, params)"
        )
    return decoded


def low_bit_encode(state: Any, like: Any) -> Any:
    """Encodes a state as a template says.

    Args:
      state: A state of the transformation inside `low_bit`, as a run without it has.
      like: A state of `low_bit`, or a template of one, as `eval_shape` makes it: which
        leaves are encoded and how. Where its leaves have a sharding, so have the codes.

    Returns:
      A pytree like ``like``.

    Raises:
      ValueError: The trees differ but for what is encoded, or a value is infinite or
        NaN, or negative where codes have no sign, or a leaf has other codes already;
        all such leaves are named.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> params = {"w": jnp.ones((64, 256))}
      >>> tx = oo.low_bit(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> plain = optax.adam(1e-3).init(params)
      >>> oo.low_bit_encode(plain, oo.eval_shape(tx.init, params))[0].nu["w"]
      Encoded(int8, no sign, float32[64, 256])
    """
    wanted, structure = trees.flatten_with_path(like, is_leaf=is_encoded)
    leaves, own = trees.flatten_with_path(state, is_leaf=is_encoded)
    if own != structure:
        theirs, ours = ({trees.path_string(k) for k, _ in t} for t in (leaves, wanted))
        differing = sorted(theirs ^ ours)
        raise ValueError(
            "state and like differ in their structure"
            + (f", at {trees.listed(differing)}" if differing else "")
        )
    found: list[Any] = []
    others: list[str] = []
    lost: list[str] = []
    for (keys, x), (_, to) in zip(leaves, wanted, strict=True):
        path = trees.path_string(keys)
        if is_encoded(x):
            others += [path] * (not is_encoded(to) or x.codec != to.codec)
        if not is_encoded(to) or is_encoded(x):
            found.append(x)
            continue
        if tuple(x.shape) != tuple(to.shape):
            raise ValueError(f"{path!r} has shape {x.shape}, and like has {to.shape}")

        def encode(x: Any, to: Encoded = to, path: str = path) -> tuple[Encoded, Any]:
            encoded = Encoded.of(x.astype(to.dtype), to.codec, path)
            return encoded, _holds(encoded, x)

        encoded, holds = in_its_memory(encode, x)
        lost += [path] * (not memory.is_traced(x) and not np.all(holds))
        found.append(_placed(encoded, to))
    if others:
        raise ValueError(
            f"{trees.listed(others)}: encoded already, and not as in like. Decode the "
            "state first: low_bit_encode(low_bit_decode(state), like)"
        )
    _check_held(lost)
    return jax.tree.unflatten(structure, found)


def converted(
    state: Any,
    others: Sequence[forms.OtherForm],
    sharding_of: Callable[[tuple[Any, ...]], Any],
    on_host: Callable[[tuple[Any, ...], Any], Any],
) -> Any:
    """A state whose leaves in other forms are in those that their rules name.

    One leaf is converted after the other, and parameters part by part.

    Args:
      state: The state.
      others: Its leaves in other forms.
      sharding_of: Returns how a leaf of these keys is sharded.
      on_host: Returns such a leaf as an array in host memory, where it is NumPy's.

    Raises:
      ValueError: A value is none that its codes can hold, or half of it is in a
        parameter.
    """
    named = {x.keys: x for x in others}
    flat, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    of_state = {k for k, x in flat if is_encoded(x) and not x.codec.of_parameters}
    state = decoded_at(state, None, of_state & named.keys())
    lost: list[str] = []
    not_finite: list[str] = []
    progress = Progress("place", _nbytes_to_encode(state, named))

    def encode(keys: Any, x: Any) -> Any:
        other = named.get(keys)
        if other is None:
            return x
        if is_encoded(x):
            x, _ = in_its_memory(lambda x: (x.decoded(), ()), x)
        if other.codec is None:
            return x
        if other.codec.of_parameters:
            new, finite = _parameter(x, other, sharding_of(keys), progress)
            not_finite.extend([other.path] * (not finite))
            return new

        def fn(x: Any) -> tuple[Any, Any]:
            new = forms.in_form(jnp.asarray(x), other.codec, other.path)
            return new, _holds(new, x) if is_encoded(new) else ()

        new, holds = in_its_memory(fn, on_host(keys, x))
        lost.extend([other.path] * (not np.all(holds)))
        return new

    state = trees.map_with_path(encode, state, is_leaf=is_encoded)
    _check_held(lost)
    if not_finite:
        raise ValueError(
            f"{trees.listed(not_finite)}: values that are infinite or NaN, of which "
            "the scales of a codec would make whole blocks. Look at the files that "
            "they come from, or give them a rule without a codec"
        )
    return state


def _parameter(
    x: Any, other: forms.OtherForm, sharding: Any, progress: Progress
) -> tuple[Any, bool]:
    """A parameter, encoded, and whether all of its values are finite."""
    assert other.codec is not None
    sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    codec = other.codec.fitting(sharded)
    why_not = codec.why_not(sharded)
    if why_not is not None:  # On each device.
        raise ValueError(f"{other.path!r} cannot be {codec.name}: {why_not}")
    if isinstance(x, jax.ShapeDtypeStruct):
        return by_parts.encoded_struct(x, codec, sharding), True
    if not isinstance(x, jax.Array):
        there = sharding.with_memory_kind("pinned_host")
        return by_parts.encoded_by_parts(np.asarray(x), codec, there, progress.add)

    def fn(x: Any) -> tuple[Any, Any]:
        finite = jnp.isfinite(x)
        return (
            Encoded.of(x, codec, other.path),
            jnp.all(finite, axis=tuple(range(1, finite.ndim))),
        )

    on_one = len(x.sharding.device_set) == 1 and x.sharding.memory_kind == "device"
    if on_one and x.size > by_parts.PART_VALUES:
        fn = functools.partial(by_parts.encoded_on_device, codec=codec)
    new, finite = in_its_memory(fn, x)
    new = jax.tree.map(
        lambda part: jax.device_put(part, by_parts.for_part(sharding, part.ndim)), new
    )
    progress.add(x.nbytes)
    return new, bool(np.all(finite))


def _nbytes_to_encode(state: Any, named: dict[Any, forms.OtherForm]) -> int:
    flat, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    codecs = ((named[keys].codec, x) for keys, x in flat if keys in named)
    return sum(
        x.size * np.dtype(x.dtype).itemsize
        for codec, x in codecs
        if codec is not None and codec.of_parameters
    )


def _check_held(lost: Sequence[str]) -> None:
    if lost:
        raise ValueError(
            f"{trees.listed(lost)}: values that are infinite or NaN, or negative "
            "where the codec has no sign (Rule(..., signed=True) gives it one)"
        )


def _upper_half(keys: tuple[Any, ...], x: Encoded, params: dict[str, Any]) -> Any:
    """The parameter of the leaf's shape whose path is the longest end of the leaf's.

    Its path begins after the field of `MasterWeightsState`, which has the parameters'
    structure: a parameter may be called as that field is.
    """
    field = jax.tree_util.GetAttrKey("master")
    first = keys.index(field) + 1 if field in keys else 0
    ends = trees.tails(trees.path_string(keys[first:]))
    found = [p for end in ends if (p := params.get(end)) is not None]
    return next((p for p in found if p.shape == x.shape), None)


def _holds(encoded: Encoded, x: Any) -> jax.Array:
    """Returns whether what was encoded is finite, row by row."""
    is_half = isinstance(encoded.codec, Bfloat16Remainder)
    finite = jnp.isfinite(x if is_half else encoded.decoded())
    return jnp.all(finite, axis=tuple(range(1, finite.ndim)))


def _placed(encoded: Encoded, like: Encoded) -> Encoded:
    """The parts where those of another are."""

    def put(x: Any, to: Any) -> Any:
        sharding = getattr(to, "sharding", None)
        traced = memory.is_traced((x, to))
        return x if sharding is None or traced else jax.device_put(x, sharding)

    return jax.tree.map(put, encoded, like)
