"""The train step that a plan is for: what makes it, and which state it has."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from optax_offload import aot
from optax_offload._ground import nnx, trees
from optax_offload._low_bit import encoded_parts, low_bit, master_paths, moments
from optax_offload._places import memory
from optax_offload._places.rules import OffloadConfig, Rule
from optax_offload._plan.allowed import REMAINDER, Codecs, of_parameters
from optax_offload._plan.state import Leaf, Parameter, RecordedOptimizer, pattern_of
from optax_offload._step import before_jit, check_inner


class Step(NamedTuple):
    """A train step, to be compiled: what a step factory returns.

    Attributes:
      fn: The function, or a jitted one, which brings its own options.
      args: Its arguments, arrays or `jax.ShapeDtypeStruct`, with shardings on the
        target's mesh if it has several devices. The optimizer's state is among them.
        Objects of Flax NNX, as `eval_shape` makes them, are changed in place.
      donate_argnums: The arguments to donate, as in `jax.jit`.
      out_shardings: The shardings of the results, as in `jax.jit`.
      tokens: The number of tokens that a step trains on, on all devices; a plan uses it
        to tell how many a second are modeled.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: int | Sequence[int] | None = None
    out_shardings: Any = None
    tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class StepFactory:
    """A function that makes a step, with the target and what else it is called with.

    Attributes:
      make_step: The function, called as ``make_step(offload, target, *args)``.
      target: The chips that the step is made for.
      args: Further arguments of the function.
    """

    make_step: Callable[..., Step]
    target: aot.Target
    args: tuple[Any, ...] = ()

    def step(self, offload: Callable[[Any], Any]) -> Step:
        """Calls the function.

        Args:
          offload: is given the optimizer, and returns the one that the step uses.

        Raises:
          TypeError: the function returns something else than a `Step`, or one of NNX
            objects that another jit than `jit` jitted.
        """
        step = self.make_step(offload, self.target, *self.args)
        if not isinstance(step, Step):
            raise TypeError(
                f"{name_of(self.make_step)} must return an optax_offload.Step(fn, "
                f"args, ...), got {name_of(step) if callable(step) else repr(step)}"
            )
        return _of_values(step)

    def plain_step(self) -> Step:
        """The step without `offload`."""
        return self.step(lambda inner: inner)


def unjitted(step: Step) -> Step:
    """A step of `jit` as if it were not jitted; any other as it is."""
    found = before_jit(step.fn)
    if found is None:
        return step
    fn, options = found
    known = {"donate_argnums", "out_shardings"}
    if not options.keys() <= known:
        return step
    return step._replace(fn=fn, **options)


def check_factory(
    make_step: Callable[..., Any], name: str, *args: Any, **kwargs: Any
) -> None:
    """Raises a ValueError for what cannot be called as a step factory is.

    Args:
      make_step: The function.
      name: Its name.
      *args: The arguments that it is given beside ``offload`` and ``target``.
      **kwargs: Those that it is given by name.
    """
    takes = (
        "A step factory is a function that takes offload and target, and returns an "
        "optax_offload.Step of your train step"
    )
    if inspect.isclass(make_step):
        raise ValueError(f"{name} is a class. {takes}")
    try:
        signature = inspect.signature(make_step)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, *args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with (offload, target"
            + "".join(f", {x!r}" for x in args)
            + "".join(f", {k}={v!r}" for k, v in kwargs.items())
            + f"), but takes {signature}: {error}. {takes}"
        ) from error


def donated(step: Step) -> dict[str, Any] | None:
    """The arguments that a step donates, as `jit` takes them.

    None of a step that `jax.jit` jitted, which says nothing of its own.
    """
    found = before_jit(step.fn)
    if found is None and step.donate_argnums is None and hasattr(step.fn, "trace"):
        return None
    options = {} if found is None else dict(found[1])
    if step.donate_argnums is not None:
        options["donate_argnums"] = step.donate_argnums
    return {k: v for k, v in options.items() if k.startswith("donate")}


def name_of(fn: Any) -> str:
    """The name of a callable, for messages."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{getattr(fn, '__module__', '')}:{name}".removeprefix(":")


def _of_values(step: Step) -> Step:
    """A step of NNX objects as one of values; any other as it is."""
    if not nnx.has_objects(step.args):
        return step
    step = unjitted(step)
    if hasattr(step.fn, "trace"):
        if before_jit(step.fn) is None:
            raise TypeError(
                "the step takes objects of Flax NNX and is jitted, by another jit than "
                "optax_offload.jit. Give oo.Step the function itself, or jit it with "
                "oo.jit"
            )
        return step
    fn, args = nnx.as_values(step.fn, step.args, step.donate_argnums)
    # The results are what becomes of the objects, and what the step returns.
    after = None if step.out_shardings is None else (None, step.out_shardings)
    return step._replace(fn=fn, args=args, out_shardings=after)


class _Call(NamedTuple):
    """An optimizer's initialisation.

    Attributes:
      params: The types of the parameters, by path.
      state: The types of the state, by path.
      formats: The formats of the parts of encoded leaves, by path.
      moments: The paths of moments.
      halves: The paths of master weights of bfloat16 parameters.
    """

    params: list[tuple[str, Any]]
    state: list[tuple[str, Any]]
    formats: Mapping[str, str]
    moments: set[str]
    halves: set[str]


def record(
    factory: StepFactory,
    given: OffloadConfig | None = None,
    codecs: Codecs = (),
) -> tuple[RecordedOptimizer, ...]:
    """Calls a step factory, and notes the state of each optimizer.

    Args:
      factory: Makes the step.
      given: The rules that the user gave, some of which may have a codec.
      codecs: The formats for leaves of which no given rule decides: one of moments,
        that of master weights, both or none.

    Raises:
      TypeError: the factory returns something else than a `Step`.
      ValueError: the factory gives no optimizer to ``offload``, or does not initialise
        it.
    """
    calls: list[_Call | None] = []

    def offload(inner: Any) -> Any:
        wrapped = check_inner(inner)
        position = len(calls)
        calls.append(None)

        def init(params: Any) -> Any:
            state = wrapped.init(params)
            of = moments(state), _halves(state, params)
            rules = _codec_rules(given, codecs, *of)
            if rules is not None:
                state = low_bit(wrapped, rules, codec=None).init(params)
            formats = encoded_parts(state) if codecs else {}
            calls[position] = _Call(_types(params), _types(state), formats, *of)
            return state

        return optax.GradientTransformationExtraArgs(init, wrapped.update)

    step = factory.step(offload)
    if not calls or None in calls:
        missing = "init of the optimizer returned by" if calls else "offload,"
        raise ValueError(
            f"{name_of(factory.make_step)} does not call {missing} its first "
            "argument. "
            "Write tx = optax.chain(..., offload(optimizer)), and give the "
            "step's args the state of oo.eval_shape(tx.init, params)"
        )
    made = [call for call in calls if call is not None]
    state_paths = {path for call in made for path, _ in call.state}
    # By the ends of their paths: all, and those that are no state; in order.
    arguments: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    free: dict[tuple[str, tuple[int, ...]], list[tuple[str, Any]]] = {}
    for path, x in trees.leaves_with_paths(step.args):
        ends = trees.tails(path)
        for end in ends:
            key = end, getattr(x, "shape", ())
            arguments.setdefault(key, []).append(x)
            if not state_paths.intersection(ends):
                free.setdefault(key, []).append((path, x))

    def leaf(path: str, aval: Any) -> Leaf:
        like = arguments.get((path, aval.shape), [None])[0]
        return leaf_of(path, aval, like, factory.target)

    def parameters(call: _Call) -> Iterator[Parameter]:
        for path, aval in call.params:
            for at, x in free.get((path, aval.shape), ()):
                if getattr(x, "dtype", None) == aval.dtype:
                    yield Parameter(leaf(path, aval), at)
                    break

    return tuple(
        RecordedOptimizer(
            state=tuple(_joined([leaf(*x) for x in call.state], call.formats)),
            parameter_bytes=sum(leaf(*x).nbytes_per_device for x in call.params),
            parameters=tuple(parameters(call)),
            moments=frozenset(call.moments),
            halves=frozenset(call.halves),
            parameter_dtypes=tuple(sorted({str(x.dtype) for _, x in call.params})),
        )
        for call in made
    )


def _codec_rules(
    given: OffloadConfig | None,
    codecs: Codecs,
    of_moments: Collection[str],
    halves: Collection[str],
) -> OffloadConfig | None:
    """The rules with a codec: those given, then one for each format of what is left."""
    rules = list(given.made_lenient().rules) if given else []
    for codec in codecs:
        if codec in of_parameters(codecs):
            continue
        paths = halves if codec == REMAINDER else of_moments
        patterns = sorted({pattern_of(path) for path in paths})
        if patterns:
            rules.append(Rule("|".join(patterns), codec=codec, optional=True))
    return OffloadConfig(rules) if any(r.codec for r in rules) else None


def _halves(state: Any, params: Any) -> set[str]:
    """The paths of master weights whose other half a bfloat16 parameter has."""
    short = {
        path
        for path, x in trees.leaves_with_paths(params)
        if getattr(x, "dtype", None) == jnp.bfloat16
    }
    return {p for p in master_paths(state) if short.intersection(trees.tails(p))}


def _joined(leaves: Sequence[Leaf], formats: Mapping[str, str]) -> list[Leaf]:
    """With codes and scales as one leaf again, which one rule moves."""
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        path = trees.encoded_leaf(leaf.path) if leaf.path in formats else None
        codec: Any = formats.get(leaf.path, "").partition(" of ")[0]
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
    return [(path, jax.typeof(x)) for path, x in trees.leaves_with_paths(tree)]


def leaf_of(path: str, aval: Any, like: Any, target: aot.Target) -> Leaf:
    """A leaf, with the sharding of the step's argument that it is.

    That is the one of its shape whose path ends in the leaf's. Where it is None, the
    leaf counts as a type does that says no more.
    """
    nbytes = memory.nbytes(aval)
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
        per_device = nbytes if replicated else memory.nbytes_on_each_device(aval)
        axis = 0 if aval.ndim else None
    return Leaf(path, memory.movable_nbytes(aval), per_device, axis, aval.ndim >= 3)


def check_remainder(
    allow: Codecs, optimizers: Sequence[RecordedOptimizer], factory: StepFactory
) -> None:
    """Raises a ValueError if remainders are allowed, and no state can be kept so.

    Args:
      allow: The codecs that are allowed.
      optimizers: The optimizers of the step.
      factory: Makes the step.
    """
    if REMAINDER not in allow or any(o.halves for o in optimizers):
        return
    write = "write offload(oo.master_weights(optimizer))"
    if master_paths(factory.plain_step().args):
        fix = f"its master weights are outside of offload; {write}"
    elif any("bfloat16" in o.parameter_dtypes for o in optimizers):
        fix = f"its bfloat16 parameters have no such copies; {write}"
    else:
        dtypes = ", ".join(sorted({d for o in optimizers for d in o.parameter_dtypes}))
        fix = f"its parameters are {dtypes}; make them bfloat16, and {write}"
    raise ValueError(
        f"allow has {REMAINDER!r}, which is for float32 master weights of bfloat16 "
        f"parameters, and the state of this step has none: {fix}. Or leave "
        f"{REMAINDER!r} out"
    )
