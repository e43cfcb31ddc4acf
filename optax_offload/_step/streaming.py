"""`stream`: a step whose values rest where there is room, and are used row by row."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import core as jex

from optax_offload._emit import streamed
from optax_offload._ground import compat, nnx, trees
from optax_offload._ground.errors import warn
from optax_offload._low_bit import decoding, warn_of_gradients
from optax_offload._places import memory
from optax_offload._places.step_options import LateGradients, Options, Residuals
from optax_offload._program import made_and_chosen, of_values, returning, take_apart
from optax_offload._rows import made_by_rows
from optax_offload._schedule import (
    FusedStep,
    plan,
    refusals,
    with_chosen_state,
    with_own_updates,
)

P = ParamSpec("P")
R = TypeVar("R")
# The options of the step that is being planned, with the steps that it calls.
_AS_USUAL = Options()
_planned_around = contextvars.ContextVar("_planned_around", default=_AS_USUAL)

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.Ref)


def stream(
    step: Callable[P, R],
    *,
    fuse: bool = True,
    late_gradients: LateGradients = "auto",
    residuals: Residuals = "device",
) -> Callable[P, R]:
    """Streams values that rest on the host, and updates layers in the backward pass.

    `jit` always does this; `stream` is for trainers that call `jax.jit` themselves.

    **Arguments in host memory are used as if they were on the device.** The step is
    traced that way. Where layers are scanned (`nn.scan`, `nnx.scan`, `lax.scan`), each
    scan loads one layer's row in an iteration. Any other use loads the whole argument
    just before. A result that replaces such an argument, as new parameters do, returns
    to the host, row by row where it is computed that way. A model whose parameters rest
    on the host takes the device memory of one layer:

        params = oo.set_memory_kind(params, r"layers/.*", "pinned_host")

    **Encoded parameters are decoded**, those that `place` encoded, where the step
    begins: it sees their shape and dtype. One that the step passes on is a result as it
    came, encoded.

    **Updates move into the backward pass, so that gradients never exist.** The backward
    pass of scanned layers stacks the gradients of all layers, and the update begins
    when the last one is ready. If the equations from such a gradient to new parameters
    and new state treat every layer alone, as those of most optimizers do, they move
    into the scan: the iteration that computes a layer's gradient updates the layer, in
    place, and loads and stores its offloaded state. This also helps where state stays
    on the device.

    No equation changes, but the compiler joins other equations than before and may
    round differently.

    Args:
      step: A function that can be traced: a train step, which computes gradients,
        updates and new parameters, or one that evaluates or samples.
      fuse: Whether to move updates into the backward pass.
      late_gradients: The place of gradients whose update needs all of them first, as
        clipping by the global norm does. ``"host"`` keeps them in host memory: exact,
        for their bytes over the link once more each way. ``"recompute"`` runs the
        backward pass twice, the first time for the norm alone. ``"auto"`` takes the one
        that a cost model predicts to be faster, and leaves the gradients of steps
        without offloaded state on the device, since both ways cost time. ``"device"``
        leaves all of them there.
      residuals: The memory in which the values rest that a forward scan keeps for its
        backward scan. ``"host"`` stores and loads them row by row; `jax.checkpoint` and
        its policies decide what is kept at all.

    The options of a compiler are its caller's. Where `jit` would compile for one GPU
    without XLA's latency-hiding scheduler, the schedule says so, and the line is

        jax.jit(stream(step), compiler_options={
            "xla_gpu_enable_latency_hiding_scheduler": False})

    and with JAX 0.10 ``"xla_gpu_enable_analytical_sol_latency_estimator": False`` too.

    Returns:
      A function of the same arguments and results. If nothing rests on the host and
      nothing can be fused, it is the step, equation for equation.
      `jit(step).schedule(*args)` says what is fused, and why the rest is not.

    Raises:
      TypeError: when called, the step changes objects of Flax NNX in place and does not
        return them, and a transformation of JAX around it, as `jax.jit`, gave it
        copies. `nnx.jit` and `jit` give them back.
      ValueError: when called, the step computes with a value in host memory that it
        closes over, or reads from a static argument.
      ValueError: when called, a result would replace an encoded parameter.
      ValueError: ``late_gradients`` or ``residuals`` has an unknown value.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3))
      >>> def step(params, state, x):
      ...     layer = lambda h, w: (jnp.tanh(h @ w), None)
      ...     loss = lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0])
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = oo.set_memory_kind(jnp.ones((4, 128, 128)), "", "pinned_host")
      >>> step = jax.jit(oo.stream(step), donate_argnums=(0, 1))
      >>> params, state = step(params, tx.init(params), jnp.ones((8, 128)))
      >>> params.sharding.memory_kind, state[0].mu.sharding.memory_kind
      ('pinned_host', 'pinned_host')
    """
    asked = Options(fuse, late_gradients, residuals)
    of_objects = nnx.Pure(step)

    @functools.wraps(step)
    def streaming(*args: P.args, **kwargs: P.kwargs) -> R:
        if of_objects.takes(args, kwargs):
            values = functools.partial(_streamed, of_objects.of_values, asked)
            return of_objects.call(values, args, kwargs)
        return _streamed(step, asked, *args, **kwargs)

    return streaming


def _streamed(
    step: Callable[..., R], asked: Options, /, *args: Any, **kwargs: Any
) -> R:
    """The results of a step of values, streamed."""
    if compat.jit_is_disabled():
        return one_by_one(step, args, kwargs, asked)
    if is_part_of_another(asked):
        return decoding(step, True)(*args, **kwargs)
    found, values, shape = traced(decoding(step, True), args, kwargs, asked)
    check_new_state(found, shape)
    warn_of_refusals(found, shape)
    if is_as_it_was(found):
        return decoding(step, True)(*args, **kwargs)
    return jax.tree.unflatten(jax.tree.structure(shape), streamed(found, values))


def runs_as_it_is(args: Any) -> bool:
    """Returns whether a jitted function was called as if it were not.

    JAX does so where jit is disabled, and to say which equation makes a NaN
    (`jax_debug_nans`).

    Args:
      args: The function's arguments, which jit would have traced.
    """
    if compat.jit_is_disabled() or not compat.tracing():
        return True
    arrays = [
        x for x in jax.tree.leaves(args) if isinstance(x, (jax.Array, np.ndarray))
    ]
    return not all(memory.is_traced(x) for x in arrays)


def one_by_one(
    step: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    asked: Options,
) -> R:
    """The results of a step that runs as Python has it, with all of it on the device.

    Args:
      step: The step.
      args: Its positional arguments, of which some rest on the host.
      kwargs: Its other arguments.
      asked: The options that are asked for.
    """
    step = decoding(step, False)
    if not any(map(rests, filter(is_array, jax.tree.leaves((args, kwargs))))):
        return step(*args, **kwargs)
    try:
        found, _, _ = traced(step, args, kwargs, asked)
        kinds = [memory.kind_of_type(a.aval) for a in found.step.jaxpr.outvars]
    except jax.errors.JAXTypeError:  # Python looks at values: they are left there.
        kinds = None
    given, named = jax.tree.map(
        lambda x: memory.transfer(x, "device") if is_array(x) and rests(x) else x,
        (args, kwargs),
    )
    with memory.as_on_device(True):
        results, structure = jax.tree.flatten(step(*given, **named))
    if kinds is not None:
        results = memory.transfer_all(results, kinds[: len(results)])
    return jax.tree.unflatten(structure, results)


def traced(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    asked: Options,
) -> tuple[FusedStep, list[Any], Any]:
    """A step, traced.

    Args:
      step: The step.
      args: Its positional arguments.
      kwargs: Its other arguments.
      asked: The options that are asked for.

    Returns:
      The plan of the step; the leaves of the arguments that are arrays; and the tree of
      its results.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    positions = [i for i, x in enumerate(leaves) if is_array(x)]

    def flat(*values: Any) -> Any:
        given = list(leaves)
        for i, x in zip(positions, values, strict=True):
            given[i] = x
        args, kwargs = jax.tree.unflatten(structure, given)
        return step(*args, **kwargs)

    values = [leaves[i] for i in positions]

    def trace(*values: Any) -> tuple[jex.ClosedJaxpr, Any]:
        return jax.make_jaxpr(flat, return_shape=True)(*values)

    moved = moves(values, asked)
    (closed, shape), as_typed = traced_at_rest(trace, values, {}, moved, asked)
    types = None
    if not as_typed:
        types = [memory.host_type(x) if rests(x) else jax.typeof(x) for x in values]
    call = jax.tree.map(lambda x: x if is_array(x) else None, (args, kwargs))
    return plan_of(closed, asked, types, call), values, shape


def traced_at_rest(
    trace: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    moved: bool,
    asked: Options = _AS_USUAL,
) -> tuple[R, bool]:
    """A step, traced as if all were on the device.

    As it is typed where nothing is moved, or where the step itself moves what is in
    host memory, in a way that needs types to say what is. Where nothing rests there yet
    and its update stores new state, types may say that this and the old are apart.

    Args:
      trace: Traces the step, given its arguments.
      args: Its positional arguments.
      kwargs: Its other arguments.
      moved: Whether anything rests on the host.
      asked: The options that are asked for.

    Returns:
      The traced step, and whether it was traced as typed.

    Raises:
      ValueError: The step computes with a value on the host that is no argument.
    """
    given, named = on_the_device((args, kwargs)) if moved else (args, kwargs)

    def on_device() -> tuple[R, bool]:
        token = _planned_around.set(asked)
        try:
            with memory.as_on_device(True):
                return trace(*given, **named), False
        finally:
            _planned_around.reset(token)

    def typed() -> tuple[R, bool]:
        return trace(*args, **kwargs), True

    first, second = (on_device, typed) if moved else (typed, on_device)
    try:
        return first()
    except (TypeError, ValueError) as error:
        try:
            return second()
        except Warning:  # Which is an error where the user asked for that.
            raise
        except Exception:
            _refuse_host_values(error)
            raise error from None


def is_part_of_another(asked: Options) -> bool:
    """Returns whether a step is called in one that is planned with all it calls.

    Warns of what is asked for there in vain.

    Args:
      asked: The options that are asked for.
    """
    if not memory.as_on_device.value:
        return False
    around = _planned_around.get()
    in_vain = [
        f"{name}={value!r}"
        for name, value in dict(**asked).items()
        if value not in (_AS_USUAL[name], around[name])
    ]
    if in_vain:
        warn(
            f"a step that asks for {', '.join(in_vain)} is called in another step of "
            "oo.jit or oo.stream, which plans both, by its own options. Ask for it "
            "there"
        )
    return True


def _refuse_host_values(error: Exception) -> None:
    """Raises where JAX's error is that a step computes with values in host memory."""
    if "memory_space of all inputs" in str(error):
        raise ValueError(
            "the step computes with a value in host memory that is not one of its "
            "arguments. Arguments alone are used as if they were on the device. Give "
            "it what it closes over, or reads from a static argument such as self, as "
            "an argument: oo.jit(lambda params, x: ...)(params, x). Or load it in the "
            "step, all at once: optax_offload.set_memory_kind(x, '.*', 'device'). JAX "
            f"says: {error}"
        ) from error


def is_array(x: Any) -> bool:
    """Returns whether a leaf of a call's arguments is an array, or stands for one."""
    return isinstance(x, (*_ARRAYS, jax.ShapeDtypeStruct))


def rests(x: Any) -> bool:
    """Returns whether an argument rests on the host."""
    return not isinstance(x, jax.Ref) and memory.memory_kind_of(x) == "pinned_host"


def on_the_device(tree: Any) -> Any:
    """Arguments, with the type of a device value for each that rests on the host."""
    return jax.tree.map(lambda x: memory.device_type(x) if rests(x) else x, tree)


def moves(values: Sequence[Any], asked: Options) -> bool:
    """Returns whether a step has anything at rest on the host, given its arguments."""
    return asked.residuals == "host" or any(map(rests, values))


def plan_of(
    closed: jex.ClosedJaxpr,
    asked: Options,
    types: Sequence[Any] | None,
    call: Any,
    places: Mapping[int, int] | None = None,
) -> FusedStep:
    """Plans the updates that are fused in a step, given its jaxpr.

    Args:
      closed: The step.
      asked: The options that are asked for.
      types: The types of its arguments, where they rest, if it was traced as if all
        were on the device; else None.
      call: The arguments of a call of it, by position and by name, or a tree like them.
      places: The donated argument in whose place each result is.
    """
    warn_of_gradients(closed, call)
    if types is None:
        closed = made_by_rows(closed)
    closed, refs = of_values(closed)
    if types is not None:
        types = [getattr(x, "inner_aval", x) for x in types]  # Of refs.
        types += closed.in_avals[len(types) :]
    typed = types is None and any(map(memory.on_host, closed.in_avals))
    in_any_case = None if typed or not asked.fuse else made_and_chosen(closed)
    found = _plan_of_values(closed, asked, types, refs, places)
    if in_any_case is not None:
        other = _plan_of_values(in_any_case, asked, types, refs, places)
        # In a branch neither gradients nor parameters at rest are taken in parts.
        made = [(x.gradient_bytes, x.replaced_bytes) for x in (found, other)]
        if made[1] > made[0]:
            return other
    return found


def _plan_of_values(
    closed: jex.ClosedJaxpr,
    asked: Options,
    types: Sequence[Any] | None,
    refs: tuple[Any, ...],
    places: Mapping[int, int] | None,
) -> FusedStep:
    residuals = asked.residuals == "host"
    chosen = returns = None
    if types is not None:
        closed, chosen = with_chosen_state(closed)
        returns = returning(closed, types, places)
        if asked.fuse:
            closed, returns = with_own_updates(closed, returns)
    step = take_apart(closed, types, refs, returns, residuals=residuals)
    return plan(step, asked, chosen=chosen)


def is_as_it_was(found: FusedStep) -> bool:
    """Returns whether a step can be called as it is."""
    return not found.is_streamed and found.step.at_rest is None


def check_new_state(found: FusedStep, results: Any) -> None:
    """Raises where new state that belongs on the host would be on the device.

    Args:
      found: The plan of a step.
      results: A tree of the step's results, or of what stands for them.

    Raises:
      ValueError: The step returns state, and no update can store it.
    """
    paths = [path for path, _ in trees.leaves_with_paths(results)]
    outvars = found.step.jaxpr.outvars
    moved = [
        paths[k]
        for k in found.chosen.returned
        # The new values of refs, which have no path, come last.
        if k < len(paths) and not memory.on_host(outvars[k].aval)
    ]
    moved += [f"{path} (by {equation})" for path, equation in found.chosen.lost]
    if moved:
        raise ValueError(
            "new state that the rules put in host memory would be returned on the "
            f"device: {trees.listed(moved)}. Between its update and the result, state "
            "may be chosen and computed with, as by jnp.where(ok, new, old), but not "
            "by what has effects, as a callback. Leave that out, or move the result "
            "back in the function: oo.set_memory_kind(state, '.*', 'pinned_host')"
        )


def warn_of_refusals(
    found: FusedStep, results: Any, misplaced: Collection[str] = ()
) -> None:
    """Warns where what was asked for by name cannot be had.

    Args:
      found: The plan of a step.
      results: A tree of the step's results, or of what stands for them.
      misplaced: The state that is known to be on the device instead of the host. With
        any, something else says so, and that is why.
    """
    if misplaced:
        return
    paths = [path for path, _ in trees.leaves_with_paths(results)]
    for message in refusals(found, paths):
        warn(message)
