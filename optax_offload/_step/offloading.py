"""`offload`: an optax transformation whose state lives in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax

from optax_offload._ground import compat, trees
from optax_offload._ground.errors import is_called_by, warn
from optax_offload._ground.extra_args import (
    Static,
    Transformation,
    as_transformation,
    split,
)
from optax_offload._low_bit import as_rules_say, check_state, warn_of_blocks
from optax_offload._places import memory, templates
from optax_offload._places.rules import (
    OffloadConfig,
    Rules,
    as_config,
    decide,
)
from optax_offload._places.unmoved import warn_of_small_leaves, why_nothing_moves
from optax_offload._program import Caller, Update, call_update, trace
from optax_offload._schedule import AnySchedule, Schedule, schedule
from optax_offload._step.misplaced import Asked, Placed, Seen
from optax_offload._step.other_state import UNREADABLE, refuse_other_state


class Offloaded(optax.GradientTransformationExtraArgs):
    """A transformation that `offload` returns, which can describe its updates."""

    def schedule(self, params: optax.Params, **extra_args: Any) -> Schedule:
        """Describes an update and its reasons: window, loops, slices.

        This computes nothing. The logger ``optax_offload`` logs the same at level
        DEBUG.

        Args:
          params: a pytree of arrays or `jax.ShapeDtypeStruct`. Their shardings count:
            bytes are those on each device.
          **extra_args: the other arguments of ``update``.

        Returns:
          The schedule, whose text is a few lines. An update that may also keep its
          state has lines for each version. Groups that are updated whole are counted by
          the equation that keeps them from being sliced.

        Example:
          >>> import jax.numpy as jnp, optax, optax_offload as oo
          >>> tx = oo.offload(optax.adam(1e-3), window_bytes=2**20)
          >>> print(tx.schedule({"w": jnp.ones((512, 1024))}))  # doctest: +ELLIPSIS
          1 group of 4.00 MiB in all, the largest of 4.00 MiB
          window of 1.00 MiB: as asked
          loop over 1 group, in 4 slices of 1.00 MiB, ... to an iteration...
        """
        core = getattr(self.update, "__self__", None)
        if not isinstance(core, _Offloading):
            raise TypeError(
                "the update of this transformation was replaced by "
                f"{self.update!r}, which has no schedule. Call schedule of the one "
                "that offload(...) returned"
            )
        return core.schedule(params, **extra_args)


def offload(
    inner: Transformation,
    rules: Rules = ".*",
    *,
    window_bytes: int | None = None,
    on_misplaced: Literal["raise", "move"] = "raise",
) -> Offloaded:
    """Keeps chosen state of an optimizer in host memory.

    State and updates have the structure, shapes and dtypes of ``inner``'s own. Only the
    memory in which leaves rest between two updates differs. An update loads state to
    the device, updates it and stores it back, group by group, within a bounded window.
    A group is the state leaves and outputs that need each other, usually those of one
    parameter.

    ``init`` and ``update`` work under `jax.jit` and without it; without it each runs
    in a jit of its own.

    Args:
      inner: any optax transformation that can be jitted. Put `optax.MultiSteps` inside:
        around an offloaded optimizer its ``where`` over the state moves all of it in
        every step, and without `jit` of this library computes on the host.
      rules: the leaves to move: a regex that matches the whole path of a leaf of
        ``inner``'s state, such as ``0/mu/dense/kernel``; or a `Rule`, a sequence of
        them, or an `OffloadConfig`. By default all leaves of at least 64 KiB. Leaves
        whose rule names a ``codec`` are kept encoded, as by `low_bit`.
      window_bytes: the bytes of state that may be in transfer at once, on each device.
        None takes a sixteenth of the state, at least 16 and at most 64 MiB: several
        transfers of 4 to 8 MiB in flight fill a link, and more costs memory and gains
        little. A leaf that cannot be cut that small is on the device by itself. If
        given, it also bounds the rows of parameters and residuals at rest that an
        iteration of a scan loads for the next one (see `stream`).
      on_misplaced: what ``update`` does with state that the rules put in host memory
        and that arrives on the device, or that has another form than its rule's
        ``codec``, as from an older checkpoint. ``"raise"`` raises an error. ``"move"``,
        for the first step after a restore, warns, and moves or converts it in that
        step.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose ``schedule(params)`` describes
      an update and its reasons.

    Raises:
      TypeError: ``inner`` is no transformation, or is offloaded already, or ``rules``
        has an unknown form.
      ValueError: a rule or ``on_misplaced`` is wrong; or, from ``init``, a rule matches
        no leaf, or it would make state of parameters that `place` encoded.
      MemoryKindError: from ``update``, state is not where the rules put it.
      CodecError: from ``update``, state is not in the form that the rules name.
      ValueError: from ``update``, state that ``inner`` cannot read is not what ``init``
        makes of these parameters.

    Warns:
      OffloadWarning: from ``init``, `optax.MultiSteps` is around what this returns, or
        all leaves that rules would move are smaller than their ``min_bytes``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> state = tx.init({"w": jnp.ones((256, 128))})
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    config = as_config(rules, window_bytes)
    _check_compiled_kinds(config)
    inner = check_inner(inner)
    if on_misplaced not in ("raise", "move"):
        raise ValueError(
            f"on_misplaced is {on_misplaced!r}; it must be 'raise' or 'move'"
        )
    inner = as_rules_say(inner, config, on_misplaced)
    core = _Offloading(inner, Asked(config, on_misplaced, Seen()))
    return Offloaded(core.init, core.update)


class _Offloading:
    """An optimizer and its rules: what the two functions of a transformation share."""

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        asked: Asked,
    ):
        self._inner, self._asked = inner, asked
        self._jitted_update = jax.jit(self._traced_update, static_argnums=4)

    def init(self, params: optax.Params) -> optax.OptState:
        """As of `optax.GradientTransformation`."""
        config = self._asked.config
        if not (jax.tree.leaves(params) or config.lenient):
            # Rules may match nothing then: optax.tree.map_params has a placeholder.
            lenient = self._asked._replace(config=config.made_lenient())
            return _Offloading(self._inner, lenient).init(params)
        if is_called_by(optax.MultiSteps.init):
            warn(
                "optax.MultiSteps is around an offloaded optimizer, so steps that only "
                "accumulate gradients move all of its state too. Put it inside: "
                "offload(optax.MultiSteps(optimizer, every_k_schedule), rules)"
            )
        if memory.is_traced(params):
            self._asked.seen.made = "traced"
            state = self._traced_init(params)
            self._check(state)
            return state
        self._asked.seen.made = "eagerly"
        init, args = self._traced_init, params
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            # No arguments for jit; as in optax an init may ask for their shapes only.
            inner = self._inner._replace(init=lambda _: self._inner.init(params))
            init, args = _Offloading(inner, self._asked)._traced_init, ()
        try:
            state = templates.make(init, params, args)
        except TypeError as error:
            _refuse_leaves(error, "init", {"params": params})
            raise
        self._check(state)
        warn_of_blocks(state)
        return state

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """As of `optax.GradientTransformationExtraArgs`."""
        args = (updates, state, params, extra_args)
        if memory.is_traced(args) or memory.as_on_device.value:
            dynamic, static = split(extra_args, (jax.Array, np.ndarray, np.generic))
            return self._traced_update(updates, state, params, dynamic, static)
        # A number may be another in every step: traced, it costs no compilation.
        numbers = (int, float, complex)
        dynamic, static = split(
            extra_args, (jax.Array, np.ndarray, np.generic, *numbers)
        )
        try:
            return self._jitted_update(updates, state, params, dynamic, static)
        except TypeError as error:
            given = {"updates": updates, "state": state, "params": params}
            _refuse_leaves(error, "update", given)
            raise

    def schedule(self, params: optax.Params, **extra_args: Any) -> Schedule:
        """The schedule of an update."""
        params, extra_args = memory.as_placed((params, extra_args))
        dynamic, static = split(
            extra_args, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
        )
        found: list[tuple[Update, AnySchedule]] = []
        config = self._asked.config

        def update(*args: Any) -> None:
            traced, _ = trace(self._fn(static), config, args, args[1])
            found.append((traced, schedule(traced, config.window_bytes)))

        state = templates.eval_shape(self._traced_init, params)
        jax.eval_shape(update, params, state, params, dynamic)
        ((traced, planned),) = found
        if traced.loads or traced.stores:
            return planned
        why = why_nothing_moves(self._planned(state))
        return dataclasses.replace(planned.straights()[0], why_nothing_moves=why)

    def _planned(self, state: optax.OptState) -> list[tuple[str, str]]:
        """The memory kind that rules plan for each leaf of the state, and why."""
        leaves = trees.leaves_with_paths(state)
        sizes = [(path, memory.movable_nbytes(x)) for path, x in leaves]
        placements = decide(self._asked.config.made_lenient(), sizes)
        return [(p.memory_kind, p.why) for p in placements]

    def _traced_init(self, params: optax.Params) -> optax.OptState:
        def plain(params: optax.Params) -> tuple[Any, Any]:
            return (), self._inner.init(params)

        # JAX's errors name it.
        def init(params: optax.Params) -> tuple[Any, Any]:
            _, state = plain(params)
            return (), templates.typed_like_parameters(state, params)

        called = _called(init, (params,), (), self._asked) or plain(params)
        return called[1]

    def _check(self, state: optax.OptState) -> None:
        """Raises or warns of new state that is not as it was asked for."""
        check_state(state)
        if not self._asked.config.lenient:
            warn_of_small_leaves(self._planned(state))

    def _traced_update(
        self, updates: Any, state: Any, params: Any, dynamic: Any, static: Static
    ) -> tuple[optax.Updates, optax.OptState]:
        fn, args = self._fn(static), (updates, state, params, dynamic)
        called = _called(fn, args, state, self._asked, static.values)
        return called or fn(*args)

    def _fn(self, static: Static) -> Callable[..., tuple[Any, Any]]:
        """The plain update of these extra arguments."""

        # JAX's errors name it.
        def update(updates: Any, state: Any, params: Any, dynamic: Any) -> Any:
            try:
                return self._inner.update(
                    updates, state, params, **dynamic, **static.values
                )
            except UNREADABLE as error:
                like = updates if params is None else params
                refuse_other_state(error, self._inner.init, state, like)
                raise

        return update


def _called(
    fn: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    state: Any,
    asked: Asked,
    known: Mapping[str, Any] | None = None,
) -> tuple[Any, Any] | None:
    """Calls a function that returns (updates, state), with state where rules say.

    Args:
      fn: The function.
      args: Its arguments: gradients, and then the state, if there is one.
      state: The state among them; () where there is none.
      asked: The request to `offload`.
      known: The extra arguments that it closes over.

    Returns:
      Its results; None where nothing moves, so that the program is the plain one.
    """
    update, structure = trace(
        templates.gathered(fn, args, state), asked.config, args, state
    )
    placed = Placed.of(update, asked, args, state)
    typed = set(update.loads)
    planned = set(placed.planned)
    if not (memory.as_on_device.value or compat.tracing_for_jit_alone()):
        # In a loop or in a branch nothing but the type says where it is.
        placed.check({}, typed)
        planned &= typed
    update = update.with_inputs_on_host(typed | planned)
    if not (update.loads or update.stores):
        return None
    _check_refs(update, known or {})
    has_state = bool(jax.tree.leaves(state))

    def again(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        called = _called(fn, args, args[1] if has_state else (), asked)
        return called or fn(*args)

    paths = {i: placed.paths[i] for i in placed.planned}
    caller = Caller(asked.config.window_bytes, placed.check, again, paths)
    return call_update(update, args, structure, caller)


def _check_refs(update: Update, known: Mapping[str, Any]) -> None:
    """Raises if an update reads or writes refs."""
    refs = [x for x in update.program.constants.values() if isinstance(x, jax.Ref)]
    if not refs:
        return
    leaves = trees.leaves_with_paths(known)
    paths = [next((path for path, x in leaves if x is ref), "") for ref in refs]
    given = [path for path in paths if path]
    closed_over = [
        str(jax.typeof(ref)) for ref, path in zip(refs, paths, strict=True) if not path
    ]
    names = [f"the extra argument {trees.listed(given)}"] if given else []
    names += [f"{trees.listed(closed_over)}, closed over"] if closed_over else []
    raise TypeError(
        f"an offloaded update uses a ref ({' and '.join(names)}). It loads and stores "
        "its state as one equation of values, which can neither read a ref nor write "
        "it. Give it the value, update(..., x=ref[...]), and write the ref beside the "
        "update; or chain what uses the ref before what is offloaded: "
        "optax.chain(uses_ref, offload(...))"
        + (
            ". JAX's flags jax_error_checking_behavior_nan, _divide and _oob make such "
            "refs: leave them at 'ignore', and use checkify"
            if closed_over
            else ""
        )
    )


def _refuse_leaves(error: TypeError, name: str, given: Mapping[str, Any]) -> None:
    """Raises if JAX's error is of leaves that are no arrays.

    Args:
      error: JAX's error.
      name: The function that was called.
      given: Its arguments, by name.
    """
    others = [
        f"{path} ({type(x).__name__})"
        for path, x in trees.leaves_with_paths(given)
        if not (hasattr(x, "dtype") or isinstance(x, (int, float, complex)))
    ]
    if others and "abstract array" in str(error):
        raise TypeError(
            f"{name} of an offloaded optimizer takes arrays, and was given "
            f"{trees.listed(others)}. If a model holds functions or text, as with "
            "Equinox, pass its arrays only: eqx.filter(model, eqx.is_inexact_array)"
        ) from None


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation that `offload` can wrap, or an error."""
    if isinstance(inner, Offloaded):
        raise TypeError(
            "the optimizer is offloaded already. Give all rules to one offload(...): "
            "offload(inner, [Rule(...), Rule(...)])"
        )
    return as_transformation(inner, "offload")


def _check_compiled_kinds(config: OffloadConfig) -> None:
    for position, rule in enumerate(config.rules):
        if rule.memory_kind not in memory.COMPILED_KINDS:
            raise ValueError(
                f"rule {position} ({trees.literal(rule.regex)}) has memory_kind "
                f"{rule.memory_kind!r}; a compiled update can keep state in "
                f"{' or '.join(map(repr, memory.COMPILED_KINDS))}. Between steps "
                "optax_offload.offload_states moves whole states"
            )
