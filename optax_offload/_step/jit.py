"""`jax.jit`, for steps that hold state in host memory."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import (
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import jax
import jax.core

from optax_offload._emit import streamed
from optax_offload._ground import compat
from optax_offload._host import one_memory
from optax_offload._low_bit import decoding, has_frozen
from optax_offload._places import memory
from optax_offload._places.step_options import (
    JitOptions,
    LateGradients,
    LatencyHiding,
    Options,
    Residuals,
    check_names,
)
from optax_offload._schedule import FusedStep
from optax_offload._step import donation, machine, shardings, streaming
from optax_offload._step.kinds import (
    Kinds,
    MadeFor,
    OtherVariant,
    argument_types,
    check_effects,
    check_on_device,
    types_at_rest,
    warn_of_types,
)
from optax_offload._step.objects import Commitment, GivenObjects, OfObjects

P = ParamSpec("P")
R = TypeVar("R")

# What `jax.jit` is told to trace a function, and to say which leaves are donated.
_OF_TRACING = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_SHARDINGS = ("in_shardings", "out_shardings")
# Whether a function is traced to be looked at or compiled, maybe for another machine.
_ahead = contextvars.ContextVar("_ahead", default=False)


@overload
def jit(
    fun: Callable[P, R],
    /,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    fuse: bool = True,
    late_gradients: LateGradients = "auto",
    residuals: Residuals = "device",
    latency_hiding: LatencyHiding = "auto",
    **jit_kwargs: Unpack[JitOptions],
) -> Jitted[P, R]: ...
@overload
def jit(
    *,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    fuse: bool = True,
    late_gradients: LateGradients = "auto",
    residuals: Residuals = "device",
    latency_hiding: LatencyHiding = "auto",
    **jit_kwargs: Unpack[JitOptions],
) -> _Decorator: ...
def jit(  # noqa: PLR0913 (as of jax.jit, and what `stream` has)
    fun: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    fuse: bool = True,
    late_gradients: LateGradients = "auto",
    residuals: Residuals = "device",
    latency_hiding: LatencyHiding = "auto",
    **jit_kwargs: Unpack[JitOptions],
) -> Any:
    """`jax.jit`, for train steps that hold state in host memory.

    It is `jax.jit`, with all of its arguments, methods and errors, and four additions.

    **Values that rest on the host are streamed.** Arguments in host memory are used as
    if they were on the device. Scanned layers are updated in the backward pass, so that
    their gradients never exist. See `stream`. The jitted function's ``schedule(*args)``
    says what was fused, and why the rest was not.

    **Donation stays within a memory.** `jax.jit` pairs donated arguments with results
    by shape and dtype, and may write a parameter into a host buffer. This function
    pairs those of one memory kind; a result in the place of a donated tree rests where
    that did. JAX warns of all others: "Some donated buffers were not usable".

    **Results stay where the function left them**, whatever `in_shardings` and
    `out_shardings` say of memory. To JAX a sharding that names no kind means the
    device, so JAX raises for host arguments and moves host results. Here shardings say
    how values are sharded, and the arguments and the function say in which memory they
    are. An `out_shardings` that names a host memory for a result that the function
    left on the device warns: move it in the function, with `jax.device_put`.

    **Objects of Flax NNX** are arguments as of `nnx.jit`: changed in place, with shared
    references, also in trees. What a step leaves as it is, is no result of its program.

    A call takes the jitted function's C++ path and costs what `jax.jit` costs, whatever
    the number of leaves (`benchmarks/time/call_cost.py`). Arguments that arrive in
    other memories than before, as from a checkpoint restored to the device, cost one
    more compilation. Within another `jax.jit`, or under `jax.grad` or `jax.vmap`,
    nothing is donated: jit the outermost function with this.

    Args:
      fun: The function. Without it, a decorator is returned.
      donate_argnums: As in `jax.jit`. An empty one says that nothing should be donated.
      donate_argnames: As in `jax.jit`.
      fuse: Whether updates are moved into the backward pass.
      late_gradients: Where gradients wait whose update needs all of them first, as for
        clipping by the global norm: ``"host"``, ``"device"``, nowhere (``"recompute"``
        runs the backward pass twice), or ``"auto"``, the faster way. See `stream`.
      residuals: Where activations that layers keep for the backward pass rest:
        ``"device"`` or ``"host"``, for their bytes over the link each way.
      latency_hiding: Whether XLA's latency-hiding scheduler orders a GPU's program:
        ``"on"`` or ``"off"`` (its option ``xla_gpu_enable_latency_hiding_scheduler``).
        ``"auto"`` turns it on where all that moves does so in scans: before Hopper a
        GPU's compiler leaves it off, and hides no transfer. It turns it off where it
        does harm: on one GPU, where arguments at rest are loaded whole between the
        operations of a step, and no transfer overlaps the backward pass. There it keeps
        several times more alive for nothing. Elsewhere it is the compiler's choice. On
        several GPUs it hides collectives, for more memory; `plan` tries both. Where
        turns of layers that no scan runs move much, 16 copies may be in flight, and not
        two. An option in ``compiler_options`` or, for ``"auto"``, in ``XLA_FLAGS``
        stands.
      **jit_kwargs: The other arguments of `jax.jit`: ``in_shardings``,
        ``out_shardings``, ``static_argnums``, ``static_argnames``, ``keep_unused``,
        ``device``, ``backend``, ``inline`` and ``compiler_options``.

    Returns:
      The jitted function, a `Jitted`, with the methods that `jax.jit` gives: `lower`,
      `trace`, `eval_shape`, `clear_cache`; and `schedule`.

    Warns:
      OffloadWarning: once, where anything rests on the host, and the device and its
        host share one memory, so that this frees nothing (`optax-offload doctor`).
      OffloadWarning: a step returns new state on the host and donates nothing.

    Raises:
      TypeError: an argument has a name that neither `jax.jit` nor this has.
      ValueError: ``late_gradients``, ``residuals`` or ``latency_hiding`` is unknown.
      TypeError: when called within a transformation of JAX, as `jax.jit`, the function
        changes objects of Flax NNX in place, and does not return them: JAX gives it
        copies, so that it would train nothing.
      ValueError: when called, `device` or `backend` is given and a value is in host
        memory: JAX would move it to the device. Or the function computes with a value
        in host memory that it closes over, or reads from a static argument. Or it
        donates, and a result would replace an encoded parameter.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> state = tx.init(params)
      >>> @oo.jit(donate_argnums=0)
      ... def step(state, params, x):
      ...     grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return state, optax.apply_updates(params, updates)
      >>> state, params = step(state, params, jnp.ones((4, 256)))
      >>> params["w"].sharding.memory_kind, state[0].mu["w"].sharding.memory_kind
      ('device', 'pinned_host')
    """
    check_names(jit_kwargs)
    options: dict[str, Any] = {**jit_kwargs}
    if donate_argnums is not None:
        options["donate_argnums"] = donate_argnums
    if donate_argnames is not None:
        options["donate_argnames"] = donate_argnames
    asked = Options(fuse, late_gradients, residuals, latency_hiding)
    if fun is None:
        return functools.partial(jit, **dataclasses.asdict(asked), **options)
    return Jitted(fun, options, asked)


def before_jit(fn: Any) -> tuple[Callable[..., Any], Mapping[str, Any]] | None:
    """The function that `jit` was given, with JAX's options; None for any other."""
    return (fn._fun, fn._options) if isinstance(fn, Jitted) else None


class _Decorator(Protocol):
    """The decorator that `jit` returns without a function."""

    def __call__(self, fun: Callable[P, R], /) -> Jitted[P, R]:
        """The function, jitted."""
        ...


class Jitted(Generic[P, R]):
    """A function that `jit` returns, with the methods that `jax.jit` gives."""

    def __init__(
        self,
        fun: Callable[P, R],
        options: Mapping[str, Any],
        asked: Options,
    ):
        functools.update_wrapper(self, fun)
        self._fun, self._options, self._asked = fun, dict(options), asked
        of_values = functools.partial(Jitted, asked=asked)
        self._committed = Commitment(fun, options)
        self._objects = OfObjects(fun, self._options, of_values)
        variants = functools.partial(_Variants, fun, objects=self._objects, asked=asked)
        # What is called at top level, and what while something is being traced: there
        # donation means nothing, but for an eager `jax.vmap` or `jax.grad`, whose
        # programs the function's own trace would know nothing of.
        self._outermost = variants(options)
        nested = {k: v for k, v in options.items() if not k.startswith("donate")}
        self._nested = variants(nested, nested=True)

    def __repr__(self) -> str:
        return f"<oo.jit of {self._fun!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, compiled."""
        if self._objects.expected and self._objects.given(args, kwargs):
            return self._objects(*args, **kwargs)
        try:
            return self._of_values(args, kwargs)
        except (GivenObjects, TypeError):
            # A class with `pytree=False` is nothing that JAX takes.
            if not self._objects.given(args, kwargs):
                raise
        compat.forget_only_call(self._outermost.current)
        return self._objects(*args, **kwargs)

    def _of_values(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._committed(args, kwargs)
        variants = self._nested if compat.tracing() else self._outermost
        before = variants.planned
        results = self._called(variants, args, kwargs)
        if variants.planned is not before:
            warn_of_types((args, kwargs), variants.planned)
        return results

    def _called(self, variants: _Variants, args: Any, kwargs: Any) -> Any:
        try:
            return variants.current(*args, **kwargs)
        except OtherVariant as other:
            wanted = other.wanted
        return variants.switch(wanted, (args, kwargs))(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return Jitted, (self._fun, self._options, self._asked)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for arguments, as the method that `jax.jit` gives."""
        if self._objects.given(args, kwargs):
            return self._objects.trace(*args, **kwargs)
        token = _ahead.set(True)
        try:
            return self._trace(*memory.as_placed((args, kwargs)))
        finally:
            _ahead.reset(token)

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> jax.stages.Traced:
        variants = self._nested if compat.tracing() else self._outermost
        try:
            return variants.traced_last().trace(*args, **kwargs)
        except OtherVariant as other:
            wanted = other.wanted
        return variants.switch(wanted, (args, kwargs)).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments, as the method that `jax.jit` gives."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result as structs, as the method of `jax.jit` does."""
        if self._objects.given(args, kwargs):
            return self._objects.eval_shape(*args, **kwargs)
        return self.trace(*args, **kwargs).out_info

    def schedule(self, *args: Any, **kwargs: Any) -> FusedStep:
        """Describes the updates that are fused into the backward pass, and the others.

        Args:
          *args: those of a call: arrays or `jax.ShapeDtypeStruct`.
          **kwargs: those of a call.

        Returns:
          The schedule, whose text is a few lines to read. It warns where a call does.
        """
        if self._objects.given(args, kwargs):
            return self._objects.schedule(*args, **kwargs)
        return self._outermost.schedule(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled, as the method that `jax.jit` gives."""
        for variants in (self._outermost, self._nested, self._objects):
            variants.clear()

    def _cache_size(self) -> int:
        each = self._outermost, self._nested, self._objects
        return sum(variants.cache_size() for variants in each)


class _Variants:
    """A function jitted with given shardings, in all memory kinds that calls had.

    Attributes:
      current: The one that was called last.
      planned: The paths of state that rules put in host memory, in the last trace.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        asked: Options,
        objects: OfObjects,
        *,
        nested: bool = False,
    ):
        self._fun, self._options, self._objects = fun, dict(options), objects
        self._asked, self._is_nested = asked, nested
        # Traces the function once for each signature, and is inlined when called.
        of_tracing = {k: v for k, v in options.items() if k in _OF_TRACING}
        once = functools.partial(jax.jit, inline=compat.INLINE_EARLY, **of_tracing)
        self._tracer: Any = once(fun)
        # What donates is taken for a step, whose results replace its arguments.
        donates = donation.asked_for(options)
        self._decoding: Any = once(decoding(fun, donates))
        self._given = {k: options[k] for k in _SHARDINGS if options.get(k) is not None}
        if isinstance(self._given.get("in_shardings"), list):
            # As `jax.jit` does: a list stands for the tuple of positional arguments.
            self._given["in_shardings"] = tuple(self._given["in_shardings"])
        self._jitted: dict[Hashable, Any] = {}
        self.planned, self._warned = list[str](), False
        self.current = self._variant(self._given)
        # What is traced for devices that are not attached, is not what is called here.
        self._of_target: dict[machine.Machine, Any] = {}

    def traced_last(self) -> Any:
        """The variant that was traced last, for the devices that traces are for."""
        target = machine.target()
        if target is None:
            return self.current
        if target not in self._of_target:
            self._of_target[target] = self._variant(self._given)
        return self._of_target[target]

    def switch(self, wanted: MadeFor, call: Any) -> Any:
        """Makes the variant that is wanted the one to be called, or traced.

        Args:
          wanted: The variant.
          call: The arguments of the call.
        """
        compat.forget_only_call(self.traced_last())
        given = {
            k: shardings.with_kinds(v, wanted.kinds.of[k])
            for k, v in self._given.items()
        }
        found = self._variant(given, wanted, call)
        target = machine.target()
        if target is None:
            self.current = found
        else:
            self._of_target[target] = found
        return found

    def clear(self) -> None:
        for jitted in (self._tracer, self._decoding, *self._jitted.values()):
            jitted.clear_cache()

    def cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _variant(
        self, given: Mapping[str, Any], wanted: MadeFor | None = None, call: Any = ()
    ) -> Any:
        leaves, treedef = jax.tree.flatten(given, is_leaf=lambda x: x is None)
        # Specs mean a mesh only when they are used, other entries bring their own.
        specs = any(map(shardings.names_partition_specs, self._given.values()))
        mesh = wanted.kinds.mesh if wanted is not None and specs else None
        told = {} if wanted is None else wanted.told
        of_compiler = self._compiler_options(told, call)
        options = tuple(of_compiler.get("compiler_options", {}).items())
        key = (tuple(leaves), treedef, mesh, *told.items(), options, machine.target())
        if key not in self._jitted:
            if wanted is not None and "out_shardings" in self._given:
                kinds = wanted.kinds.of["out_shardings"]
                shardings.warn_of_host(self._given["out_shardings"], kinds)
            options = {**self._options, **given, **of_compiler}
            staged = self._staged(given, mesh, told)
            self._jitted[key] = jax.jit(staged, **options)
        return self._jitted[key]

    def _compiler_options(self, told: Mapping[str, Any], call: Any) -> dict[str, Any]:
        """The options of the compiler for a call, where they are not those given."""
        if self._is_nested or not told:
            return {}
        given = self._options.get("compiler_options")
        where = machine.machine_of((call, self._given))
        found = machine.compiler_options(given, self._asked.latency_hiding, told, where)
        return {} if found is None else {"compiler_options": found}

    def _staged(
        self, given: Mapping[str, Any], mesh: Any, told: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The function as it is traced for one variant."""
        on_one_device = any(self._options.get(k) for k in ("device", "backend"))

        @functools.wraps(self._fun)
        def staged(*args: Any, **kwargs: Any) -> Any:
            if self._objects.given(args, kwargs):
                raise GivenObjects
            if streaming.runs_as_it_is((args, kwargs)):
                return streaming.one_by_one(self._fun, args, kwargs, self._asked)
            if streaming.is_part_of_another(self._asked):
                return self._tracer_for(args, kwargs)(*args, **kwargs)
            traced, plan = self._planned(args, kwargs)
            if on_one_device:
                check_on_device(traced, plan)
            wanted = MadeFor(Kinds.of_call(traced, plan), self._told(plan))
            fits = wanted.kinds.fit(given) and mesh in (None, wanted.kinds.mesh)
            other = told != wanted.told and machine.may_be_a_gpu()
            if not fits or other:
                raise OtherVariant(wanted)
            self.planned = [*plan.step.planned.values()]
            if not self._is_nested:
                check_effects(traced, plan)
                arrays = [*filter(streaming.is_array, jax.tree.leaves((args, kwargs)))]
                if not _ahead.get() and streaming.moves(arrays, self._asked):
                    one_memory.warn_if_one_memory()
                if not (_ahead.get() or self._warned):
                    self._warned = donation.warn_if_none(traced, plan, self._options)
                streaming.check_new_state(plan, traced.out_info)
                donation.check_returned(traced, plan)
                args, kwargs = donation.pair((args, kwargs), traced, plan)
            streaming.warn_of_refusals(plan, traced.out_info, plan.step.misplaced)
            if streaming.is_as_it_was(plan):
                return self._tracer_for(args, kwargs)(*args, **kwargs)
            # What is not traced is static.
            leaves = jax.tree.leaves((args, kwargs))
            leaves = [x for x in leaves if isinstance(x, jax.core.Tracer)]
            return jax.tree.unflatten(traced.out_tree, streamed(plan, leaves))

        staged.__name__ = _name_of(self._fun)
        return staged

    def _told(self, plan: FusedStep) -> Mapping[str, Any]:
        if self._is_nested:  # The function around says it.
            return {}
        return machine.told(self._asked.latency_hiding, plan)

    def schedule(self, *args: Any, **kwargs: Any) -> FusedStep:
        """Describes the updates of a call that are fused."""
        traced, plan = self._planned(args, kwargs)
        streaming.warn_of_refusals(plan, traced.out_info, plan.step.misplaced)
        return plan

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[jax.stages.Traced, FusedStep]:
        """The function as it is traced for a call, and the plan of its step."""
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if streaming.is_array(x)]
        asked, trace = self._asked, self._tracer_for(args, kwargs).trace
        moved = streaming.moves(leaves, asked)
        traced, typed = streaming.traced_at_rest(trace, args, kwargs, moved, asked)
        types = None if typed else types_at_rest(argument_types(traced), leaves)
        call, places = traced.args_info, donation.places(traced)
        return traced, streaming.plan_of(traced.jaxpr, asked, types, call, places)

    def _tracer_for(self, *call: Any) -> Any:
        return self._decoding if has_frozen(call) else self._tracer


def _name_of(fun: Any) -> str:
    """The name under which JAX shows a function in its programs."""
    if isinstance(fun, functools.partial):
        return _name_of(fun.func)
    return getattr(fun, "__name__", "<unnamed function>")
