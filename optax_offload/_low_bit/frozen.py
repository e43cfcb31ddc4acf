"""Encoded parameters as arguments of a step: decoded at its entry, never replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_offload._ground import nnx, trees
from optax_offload._ground.errors import warn
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._program import CODES, gradients_of_codes

_At = tuple[trees.KeyPath, Any]


def has_frozen(tree: Any) -> bool:
    """Returns whether any node of a tree is an encoded parameter."""
    return any(map(_is_frozen, jax.tree.leaves(tree, is_leaf=is_encoded)))


def decoding(fn: Callable[..., Any], replaces: bool) -> Callable[..., Any]:
    """The function, which sees encoded parameters of its arguments decoded.

    A result that is such a parameter, passed on, is encoded as it was.

    Args:
      fn: The function.
      replaces: Whether results replace arguments, as those of a step do: then a new
        value in the place of an encoded parameter raises. In NNX objects it always
        does.
    """

    @functools.wraps(fn)
    def decoded(*args: Any, **kwargs: Any) -> Any:
        found: list[tuple[trees.KeyPath, Encoded, Any]] = []
        args = tuple(_decoded(x, (i,), found) for i, x in enumerate(args))
        kwargs = {name: _decoded(x, (name,), found) for name, x in kwargs.items()}
        results = fn(*args, **kwargs)
        if not found:
            return results
        codes = {id(value): node for _, node, value in found}
        flat, structure = trees.flatten_with_path(results)
        if replaces or nnx.has_split((args, kwargs)):
            _check_kept(flat, found)
        return jax.tree.unflatten(structure, [codes.get(id(x), x) for _, x in flat])

    return decoded


def check_state(state: Any) -> None:
    """Raises where a new state of an optimizer is of encoded parameters."""
    flat, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    paths = [trees.path_string(keys) for keys, x in flat if _is_frozen(x)]
    if paths:
        raise ValueError(
            f"{trees.listed(paths)}: state of parameters that are encoded, so frozen. "
            "Give the optimizer adapters alone, in init and in update, or have it "
            "leave the others out: optax.masked(tx, mask). Apply updates to the "
            "adapters alone, too"
        )


def warn_of_gradients(jaxpr: Any, call: Any) -> None:
    """Warns where a step computes gradients of encoded parameters.

    Args:
      jaxpr: The step.
      call: Its arguments, by position and by name, in which encoded parameters are
        nodes. Each leaf is an argument of the jaxpr; these come last there.
    """
    if not has_frozen(call):
        return
    flat, _ = trees.flatten_with_path(call)
    first = len(jaxpr.in_avals) - len(flat)
    paths: dict[str, None] = {}
    for i in gradients_of_codes(jaxpr):
        keys = flat[i - first][0][1:-1]  # Codes and scales are below the parameter.
        paths[trees.path_string(keys[1:] or keys)] = None
    if paths:
        warn(
            "the step computes gradients of parameters that are encoded, so frozen: "
            f"{trees.listed([*paths])}. They are right, and as large as the decoded "
            "parameters. Differentiate with respect to adapters alone, as in "
            "jax.grad(loss)(adapters, base), and leave others out of norms of "
            "gradients. If instead this is of a trained parameter of the same size "
            "beside it, on the same input, ignore this warning"
        )


def _is_frozen(x: Any) -> bool:
    return is_encoded(x) and x.codec.of_parameters


def _decoded(x: Any, at: trees.KeyPath, found: list[Any]) -> Any:
    """An argument, decoded; encoded nodes and their values are added to those found."""
    if not has_frozen(x):
        return x  # The same object: it may be static.

    def decode(keys: trees.KeyPath, node: Any) -> Any:
        if not _is_frozen(node):
            return node
        named = jax.tree.map(lambda x: checkpoint_name(x, CODES), node)
        value = named.decoded()
        found.append(((*at, *keys), node, value))
        return value

    return trees.map_with_path(decode, x, is_leaf=is_encoded)


def replaced(results: Sequence[_At], arguments: Sequence[_At]) -> list[trees.KeyPath]:
    """Returns the keys of the arguments in whose place a step returns a new value.

    That is at its path below its argument, in the results, in one of them or in one of
    these; of an argument that is a leaf itself, at the argument's position.

    Args:
      results: The leaves of the results, each with its keys.
      arguments: Leaves of the arguments, each with its keys.
    """
    places: dict[str, Any] = {}
    for keys, x in results:
        for inside in [keys[i:] for i in range(min(len(keys), 3))]:
            places.setdefault(trees.path_string(inside), x)
    whole = {trees.path_string(keys) or "0": x for keys, x in results}
    found: list[trees.KeyPath] = []
    for keys, value in arguments:
        path = trees.path_string(keys[1:])
        new = places.get(path) if path else whole.get(trees.path_string(keys))
        if new is not None and new is not value and _is_like(new, value):
            found.append(keys)
    return found


def _check_kept(
    results: Sequence[_At], found: list[tuple[trees.KeyPath, Encoded, Any]]
) -> None:
    """Raises where a new value is in the place of an encoded parameter."""
    new = replaced(results, [(keys, value) for keys, _, value in found])
    if new:
        name = found[0][1].codec.name
        paths = [trees.path_string(keys[1:] or keys) for keys in new]
        raise ValueError(
            f"the step replaces parameters that are encoded, as codec {name!r}: "
            f"{trees.listed(paths)}. An update is less than what encoding rounds "
            "away, so these are frozen. Return them as they came, and train adapters: "
            "gradients, optimizer and updates of the adapters alone. To train these "
            "themselves in few bytes, leave the codec out of their rule, and give "
            "offload(optax_offload.master_weights(tx), rules) a rule of "
            "codec='bfloat16-remainder', or use optax_offload.stochastic_round"
        )


def _is_like(x: Any, value: Any) -> bool:
    return getattr(x, "shape", None) == value.shape
