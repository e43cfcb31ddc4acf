"""The parameters of a step that are not trained: which they are, and their codecs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import jax

from optax_offload import aot
from optax_offload._ground import nnx, trees
from optax_offload._low_bit import codec_of, replaced
from optax_offload._places import memory
from optax_offload._places.rules import (
    STATE_CODECS,
    CodecName,
    OffloadConfig,
    Rule,
    compile_pattern,
)
from optax_offload._plan.allowed import Codecs, of_parameters
from optax_offload._plan.state import (
    Parameter,
    RecordedOptimizer,
    movable_state,
    trained_parameters,
)
from optax_offload._plan.step import Step, StepFactory, leaf_of, unjitted
from optax_offload._step import place, traced_at_rest

_NO_TREE = (
    "The step replaces all of its arguments but single arrays: nothing of it is "
    "frozen. Leave frozen out, or give it what it doesn't train as a tree, such as "
    "{'base': array}"
)


@dataclasses.dataclass(frozen=True)
class FrozenParameters:
    """The parameters of a step that are not trained.

    Attributes:
      factory: Makes the step.
      given: The rules that the user gave.
      parameters: The parameters, in their own dtypes.
    """

    factory: StepFactory
    given: OffloadConfig | None
    parameters: tuple[Parameter, ...] = ()

    @classmethod
    def of(
        cls,
        factory: StepFactory,
        optimizers: Sequence[RecordedOptimizer],
        pattern: str | None,
        given: OffloadConfig | None = None,
    ) -> FrozenParameters:
        """Those that a pattern matches, and those that given rules are for.

        They are leaves of trees among the step's arguments. Their paths begin in the
        argument; in one with trained parameters where the paths of these do, if there.

        Args:
          factory: Makes the step.
          optimizers: Its optimizers.
          pattern: The regex of their paths; None for none.
          given: The rules that the user gave.

        Raises:
          ValueError: The pattern matches nothing, or the step replaces what it or a
            given rule with a codec matches.
        """
        trained = {x.argument: x for x in trained_parameters(optimizers)}
        asked = None if pattern is None else Rule(pattern)
        rules = given.parameters if given else ()
        if asked is None and not rules:
            return cls(factory, given)
        step, target = factory.plain_step(), factory.target
        arguments = _candidates(step, optimizers)
        roots = {x.root for x in trained.values()}
        short = {path: _below(path, roots) for path in arguments}
        chosen = [p for p in arguments if asked and asked.matches(short[p])]
        if asked and not chosen:
            regex = compile_pattern(asked.pattern)
            others = _left(step, target, arguments, trained)
            paths = [short[p] for p in others]
            remedy = trees.remedy(regex, paths) if others else _NO_TREE
            text = trees.literal(asked.regex)
            raise ValueError(f"frozen is {text}, which matches no parameter. {remedy}")
        deciding = {p: _deciding(rules, short[p]) for p in arguments}
        stays = [*chosen, *(p for p, r in deciding.items() if r and r.codec)]
        moving = [p for p in stays if p in trained] or _replaced(step, target, stays)
        if moving:
            what = "a rule of parameters has a codec, and"
            if asked and {*moving} & {*chosen}:
                what = f"frozen is {trees.literal(asked.regex)}, which"
            others = [p for p in stays if p not in moving]
            others = others or _left(step, target, arguments, trained)
            left = trees.listed([short[p] for p in others], 3)
            remedy = f"Write a regex of what the step leaves as it is, as of {left}"
            raise ValueError(
                f"{what} matches what the step replaces: "
                f"{trees.listed([short[p] for p in moving])}. "
                + (remedy if others else _NO_TREE)
            )
        # A given rule that is for no trained parameter is for these.
        of_trained = [deciding.get(p) for p in trained]
        every = {
            *chosen,
            *(p for p, r in deciding.items() if r and r not in of_trained),
        }
        found = [
            Parameter(leaf_of(short[p], jax.typeof(x), x, target), p, frozen=True)
            for p, x in arguments.items()
            if p in every
        ]
        return cls(factory, given, tuple(found))

    def check(self, allow: Codecs) -> None:
        """Raises a ValueError if a codec of frozen parameters is allowed for none.

        Args:
          allow: The codecs that are allowed.
        """
        for name in of_parameters(allow):
            if not self.parameters:
                raise ValueError(
                    f"allow has {name!r}, which is for frozen parameters, and nothing "
                    "is frozen. Say what the step does not train: --frozen REGEX "
                    f"(frozen=...), or leave {name!r} out. Codecs of state are "
                    + ", ".join(map(repr, STATE_CODECS))
                )
            kept = self.kept_in((name,))
            if not any(x.leaf.codec for x in kept):
                args = self.factory.plain_step().args
                arguments = dict(trees.leaves_with_paths(args))
                largest = max(kept, key=lambda x: x.leaf.nbytes or 0)
                reason = _why_not(name, arguments[largest.argument])
                raise ValueError(
                    f"allow has {name!r}, and no frozen parameter can be kept so, as "
                    f"{largest.leaf.path!r}: {reason}. Leave {name!r} out"
                )

    def kept_in(self, codecs: Codecs) -> tuple[Parameter, ...]:
        """The parameters, as codecs keep them where they rest on the host.

        Given rules decide first, and others are left in their dtype if they have to be.

        Args:
          codecs: The codecs, of which one at most is for parameters.
        """
        if not self.parameters:
            return ()
        args, target = self.factory.plain_step().args, self.factory.target
        name = next(iter(of_parameters(codecs)), None)
        given = self.given.parameters if self.given else ()
        arguments = dict(trees.leaves_with_paths(args))
        wanted: dict[str, Any] = {}
        for x in self.parameters:
            rule = _deciding(given, x.leaf.path)
            codec = name if rule is None else rule.codec
            # What given rules name, and a leaf cannot have, is an error of `place`.
            if codec and not _why_not(codec, arguments[x.argument], rule is not None):
                wanted[x.argument] = codec
        found = [
            dataclasses.replace(
                x,
                leaf=dataclasses.replace(x.leaf, codec=wanted.get(x.argument)),
            )
            for x in self.parameters
        ]
        parts: dict[str, list[Any]] = {}
        for path, part in trees.leaves_with_paths(placed_in(args, found, ())):
            whole = trees.encoded_leaf(path)
            if whole in wanted:
                leaf = leaf_of(path, jax.typeof(part), part, target)
                parts.setdefault(whole, []).append(leaf)
        return tuple(
            x
            if x.argument not in parts
            else dataclasses.replace(
                x,
                leaf=dataclasses.replace(
                    x.leaf,
                    nbytes=sum(y.nbytes or 0 for y in parts[x.argument]),
                    nbytes_per_device=sum(
                        y.nbytes_per_device for y in parts[x.argument]
                    ),
                ),
            )
            for x in found
        )


def placed_in(
    args: tuple[Any, ...], placed: Sequence[Parameter], moved: Collection[str]
) -> tuple[Any, ...]:
    """The arguments of a step, with parameters where they rest, and encoded.

    Args:
      args: The arguments.
      placed: The parameters, of which those with a codec are encoded.
      moved: The paths of those that rest on the host.
    """
    codecs: dict[str, CodecName | None]
    codecs = {x.argument: x.leaf.codec for x in placed}

    def put(keys: trees.KeyPath, x: Any) -> Any:
        path = trees.path_string(keys)
        kind = "pinned_host" if path in moved else "device"
        if codecs.get(path):
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding_of(x))
            return place([x], Rule(".*", kind, codec=codecs[path]))[0]
        return memory.set_memory_kind([x], ".*", kind)[0] if path in moved else x

    return trees.map_with_path(put, args)


def parameters_of(
    factory: StepFactory,
    optimizers: Sequence[RecordedOptimizer],
    given: OffloadConfig,
) -> list[tuple[str, int | None]]:
    """The parameters that rules are for: trained ones, and others that they match.

    Each with its path and its bytes; of those that are encoded so each part.

    Args:
      factory: Makes the step.
      optimizers: The optimizers of the step.
      given: The rules.
    """
    frozen = FrozenParameters.of(factory, optimizers, None, given).kept_in(())
    state = movable_state(optimizers, None, factory.target.device_count, frozen)
    found = [(x.leaf.path, x.leaf.nbytes) for x in state.trained]
    paths = {x.argument: x.leaf.path for x in frozen}
    args = factory.plain_step().args if frozen else ()
    for path, x in trees.leaves_with_paths(placed_in(args, frozen, ())):
        whole = path if path in paths else trees.encoded_leaf(path)
        if whole in paths:
            of_part = paths[whole] + path.removeprefix(whole)
            found.append((of_part, memory.movable_nbytes(jax.typeof(x))))
    return found


def names_of(step: Step, placed: Sequence[Parameter]) -> tuple[str, ...]:
    """The names of the trees that parameters are in, each once.

    That of trained ones alone is ``params``, as in all of the guides. Beside frozen
    ones, and NNX objects, each is called as the step's function calls its argument.

    Args:
      step: The step.
      placed: The parameters.
    """
    if not (any(x.frozen for x in placed) or nnx.has_split(step.args)):
        return ("params",)
    try:
        known = inspect.signature(step.fn).parameters.values()
    except (TypeError, ValueError):
        known = ()
    names = [x.name for x in known if x.kind is not x.VAR_POSITIONAL]
    found: list[str] = []
    for x in placed:
        position, *inside = x.root.removesuffix("/").split("/")
        of_argument = names[int(position) : int(position) + 1]
        fallback = "base" if x.frozen else "params"
        found.append([fallback, *of_argument, *inside][-1])
    return tuple(dict.fromkeys(found))


def _candidates(step: Step, optimizers: Sequence[RecordedOptimizer]) -> dict[str, Any]:
    """The leaves of trees among the arguments of a step that are no state, by path."""
    state = {x.path for o in optimizers for x in o.state}
    return {
        path: x
        for path, x in trees.leaves_with_paths(step.args)
        if hasattr(x, "shape")
        and "/" in path
        and not state.intersection(trees.tails(path))
    }


def _deciding(rules: Sequence[Rule], path: str) -> Rule | None:
    """The first rule that matches a path; None where none does."""
    return next((rule for rule in rules if rule.matches(path)), None)


def _below(path: str, roots: Collection[str]) -> str:
    """The path of an argument's leaf in the longest root of it, or in the argument."""
    of = [root for root in roots if path.startswith(root)]
    return path.removeprefix(max([path.partition("/")[0] + "/", *of], key=len))


def _replaced(step: Step, target: aot.Target, paths: Collection[str]) -> list[str]:
    """The paths of arguments in whose place the step returns something else."""
    step = unjitted(step)
    if hasattr(step.fn, "trace"):
        return []  # What is jitted already moves and encodes no parameter.
    moving: list[str] = []

    def fn(*args: Any) -> Any:
        flat, _ = trees.flatten_with_path(args)
        known = [(keys, x) for keys, x in flat if trees.path_string(keys) in paths]
        results = step.fn(*args)
        new = replaced(trees.flatten_with_path(results)[0], known)
        moving.extend(map(trees.path_string, new))
        return results

    with jax.sharding.use_abstract_mesh(aot.mesh_of(step.args, target)):
        traced_at_rest(lambda *args: jax.eval_shape(fn, *args), step.args, {}, True)
    return list(dict.fromkeys(moving))


def _left(
    step: Step,
    target: aot.Target,
    paths: Collection[str],
    trained: Collection[str],
) -> list[str]:
    """The paths of arguments that the step leaves as they are."""
    others = [p for p in paths if p not in trained]
    new = {*_replaced(step, target, others)}
    return [p for p in others if p not in new]


def _sharding_of(x: Any) -> Any:
    return getattr(x, "sharding", None)


def _why_not(codec: str, x: Any, given: bool = False) -> str | None:
    """Why an argument is left without a codec, also if a rule names it; else None."""
    found = codec_of(codec)
    return found.why_left(x) or (None if given else found.fitting(x).why_not(x))
