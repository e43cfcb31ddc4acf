"""States between formats, so that checkpoints with and without can be exchanged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_offload import _memory, _trees
from optax_offload._low_bit import forms
from optax_offload._low_bit.codecs import Bfloat16Remainder
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._low_bit.in_rows import in_its_memory


def low_bit_decode(state: Any, params: Any = None) -> Any:
    """Decodes a state: every leaf gets the dtype that it stands for.

    The result has the structure of the state of the transformation inside `low_bit`.
    Leaves stay in their memory. Outside of `jax.jit` they are decoded one after the
    other, those in host memory row by row, so that few rows are on the device.

    Args:
      state: A state of `low_bit`, with whatever is around it, or a template of one, of
        `jax.ShapeDtypeStruct`, which gives a template.
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
    uppers = {} if params is None else dict(_trees.leaves_with_paths(params))
    without: list[str] = []
    others: list[str] = []

    def decode(keys: Any, x: Any) -> Any:
        if not is_encoded(x) or (keys_of is not None and keys not in keys_of):
            return x
        if isinstance(x.codes, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.codes.sharding)
        param = None
        if isinstance(x.codec, Bfloat16Remainder):
            path = _trees.path_string(keys)
            param = _upper_half(keys, x, uppers)
            if param is None:
                without.append(path)
                return x
            if param.dtype != jnp.bfloat16:
                others.append(f"{path!r} ({param.dtype})")
                return x
        value, _ = in_its_memory(lambda x, param: (x.decoded(param), ()), x, param)
        return value

    decoded = _trees.map_with_path(decode, state, is_leaf=is_encoded)
    if others:
        raise ValueError(
            "half of each of these is in a bfloat16 parameter, and params has the "
            f"parameter in another dtype: {', '.join(others)}. Give the bfloat16 "
            "params that the state was made with; codec='bfloat16-remainder' needs them"
        )
    if without:
        raise ValueError(
            f"{_trees.listed(without)}: half of each is in a bfloat16 parameter, and "
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
    wanted, structure = _trees.flatten_with_path(like, is_leaf=is_encoded)
    leaves, own = _trees.flatten_with_path(state, is_leaf=is_encoded)
    if own != structure:
        theirs, ours = ({_trees.path_string(k) for k, _ in t} for t in (leaves, wanted))
        differing = sorted(theirs ^ ours)
        raise ValueError(
            "state and like differ in their structure"
            + (f", at {_trees.listed(differing)}" if differing else "")
        )
    found: list[Any] = []
    others: list[str] = []
    lost: list[str] = []
    for (keys, x), (_, to) in zip(leaves, wanted, strict=True):
        path = _trees.path_string(keys)
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
        lost += [path] * (not _memory.is_traced(x) and not np.all(holds))
        found.append(_placed(encoded, to))
    if others:
        raise ValueError(
            f"{_trees.listed(others)}: encoded already, and not as in like. Decode the "
            "state first: low_bit_encode(low_bit_decode(state), like)"
        )
    _check_held(lost)
    return jax.tree.unflatten(structure, found)


def converted(state: Any, others: Sequence[forms.OtherForm]) -> Any:
    """A state whose leaves in other forms are in those that their rules name.

    Raises:
      ValueError: A value is none that its codes can hold, or half of it is in a
        parameter.
    """
    state = decoded_at(state, None, {x.keys for x in others})
    named = {x.keys: x for x in others}
    lost: list[str] = []

    def encode(keys: Any, x: Any) -> Any:
        other = named.get(keys)
        if other is None or other.codec is None:
            return x

        def fn(x: Any) -> tuple[Any, Any]:
            new = forms.in_form(jnp.asarray(x), other.codec, other.path)
            return new, _holds(new, x) if is_encoded(new) else ()

        new, holds = in_its_memory(fn, x)
        lost.extend([other.path] * (not np.all(holds)))
        return new

    state = _trees.map_with_path(encode, state, is_leaf=is_encoded)
    _check_held(lost)
    return state


def _check_held(lost: Sequence[str]) -> None:
    if lost:
        raise ValueError(
            f"{_trees.listed(lost)}: values that are infinite or NaN, or negative "
            "where the codec has no sign (Rule(..., signed=True) gives it one)"
        )


def _upper_half(keys: tuple[Any, ...], x: Encoded, params: dict[str, Any]) -> Any:
    """The parameter of the leaf's shape whose path is the longest end of the leaf's.

    Its path begins after the field of `MasterWeightsState`, which has the parameters'
    structure: a parameter may be called as that field is.
    """
    field = jax.tree_util.GetAttrKey("master")
    first = keys.index(field) + 1 if field in keys else 0
    ends = _trees.tails(_trees.path_string(keys[first:]))
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
        traced = _memory.is_traced((x, to))
        return x if sharding is None or traced else jax.device_put(x, sharding)

    return jax.tree.map(put, encoded, like)
