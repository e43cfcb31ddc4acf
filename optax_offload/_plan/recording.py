"""Which state the optimizers of a step have, and how much of it is on each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Sharding

from optax_offload import _memory, _offload, _rules, _trees, aot
from optax_offload._low_bit import encoded_parts, low_bit, moments
from optax_offload._plan.patterns import Leaf, pattern_of
from optax_offload._plan.step import StepFactory


class RecordedOptimizer(NamedTuple):
    """An optimizer that a step factory gave to its ``offload``.

    Attributes:
      state: The leaves of the optimizer's state.
      parameter_bytes: The bytes on each device of the parameters that it was
        initialised with.
    """

    state: tuple[Leaf, ...]
    parameter_bytes: int


def record(
    factory: StepFactory,
    given: _rules.OffloadConfig | None = None,
    codec: _rules.CodecName | None = None,
) -> tuple[RecordedOptimizer, ...]:
    """Calls a step factory, and notes the state of each optimizer.

    Args:
      factory: Makes the step.
      given: The rules that the user gave, some of which may have a codec.
      codec: The format for moments of which no given rule decides; None for none.

    Raises:
      TypeError: the factory returns something else than a `Step`.
      ValueError: the factory gives no optimizer to ``offload``, or does not initialise
        it.
    """
    calls: list[tuple[Any, Any, Mapping[str, str]] | None] = []

    def offload(inner: Any) -> Any:
        wrapped = _offload.check_inner(inner)
        position = len(calls)
        calls.append(None)

        def init(params: Any) -> Any:
            state = wrapped.init(params)
            rules = _codecs(state, given, codec)
            if rules is not None:
                state = low_bit(wrapped, rules, codec=None).init(params)
            formats = encoded_parts(state) if codec else {}
            calls[position] = (_types(params), _types(state), formats)
            return state

        return optax.GradientTransformationExtraArgs(init, wrapped.update)

    step = factory.step(offload)
    if not calls or None in calls:
        missing = "init of what" if calls else "its first argument: what"
        raise ValueError(
            f"{factory.make_step!r} does not call {missing} it makes has to be in the "
            "step. Write tx = optax.chain(..., offload(optimizer)), and give the "
            "step's args the state of oo.eval_shape(tx.init, params)"
        )
    arguments = _trees.leaves_with_paths(step.args)
    recorded = []
    for call in calls:
        assert call is not None
        params, state, formats = call
        leaves = [_leaf(path, x, arguments, factory.target) for path, x in state]
        leaves = _joined(leaves, formats, codec)
        weights = [_leaf(path, x, arguments, factory.target) for path, x in params]
        nbytes = sum(leaf.nbytes_per_device for leaf in weights)
        recorded.append(RecordedOptimizer(tuple(leaves), nbytes))
    return tuple(recorded)


def _codecs(
    state: Any, given: _rules.OffloadConfig | None, codec: _rules.CodecName | None
) -> _rules.OffloadConfig | None:
    """The rules with a codec: those given, then one for moments that are left."""
    rules = list(given.made_lenient().rules) if given else []
    if codec is not None:
        patterns = sorted({pattern_of(path) for path in moments(state)})
        if patterns:
            rules.append(_rules.Rule("|".join(patterns), codec=codec, optional=True))
    return _rules.OffloadConfig(rules) if any(r.codec for r in rules) else None


def _joined(
    leaves: Sequence[Leaf], formats: Mapping[str, str], codec: _rules.CodecName | None
) -> list[Leaf]:
    """With codes and scales as one leaf again, which one rule moves."""
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        path = _trees.encoded_leaf(leaf.path) if leaf.path in formats else None
        if path is None:
            found[leaf.path] = leaf
        elif path not in found:
            found[path] = dataclasses.replace(leaf, path=path, codec=codec)
        else:
            whole = found[path]
            found[path] = dataclasses.replace(
                whole,
                nbytes=(whole.nbytes or 0) + (leaf.nbytes or 0),
                nbytes_per_device=whole.nbytes_per_device + leaf.nbytes_per_device,
            )
    return list(found.values())


def _types(tree: Any) -> list[tuple[str, Any]]:
    return [(path, jax.typeof(x)) for path, x in _trees.leaves_with_paths(tree)]


def _leaf(
    path: str, aval: Any, arguments: list[tuple[str, Any]], target: aot.Target
) -> Leaf:
    """A leaf, with the sharding of the step's argument that it is.

    That is the one of its shape whose path ends in the leaf's. Where none is, it counts
    as a type does that says no more.
    """
    like = next(
        (
            x
            for found, x in arguments
            if (found == path or found.endswith(f"/{path}"))
            and getattr(x, "shape", None) == aval.shape
        ),
        None,
    )
    nbytes = _memory.nbytes(aval)
    sharding = getattr(like, "sharding", None)
    if isinstance(sharding, Sharding) and aval.ndim:
        shard = sharding.shard_shape(aval.shape)
        per_device = math.ceil(
            nbytes * math.prod(shard) / max(math.prod(aval.shape), 1)
        )
        whole = [i for i, n in enumerate(shard) if n == aval.shape[i]]
        axis = whole[0] if whole else None
    else:
        replicated = like is not None or target.device_count == 1
        per_device = nbytes if replicated else _memory.nbytes_on_each_device(aval)
        axis = 0 if aval.ndim else None
    return Leaf(path, _memory.movable_nbytes(aval), per_device, axis, aval.ndim >= 3)
