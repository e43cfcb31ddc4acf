"""`offload`: an optax transformation whose state lives in host memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_offload import _jaxpr, _memory, _rules, _templates, _trees
from optax_offload._errors import OffloadWarning
from optax_offload._update import branches as _choices
from optax_offload._update import schedule as _schedule
from optax_offload._update import stream as _stream

logger = logging.getLogger("optax_offload")


class Offloaded(optax.GradientTransformationExtraArgs):
    """What `offload` returns: a transformation that can tell how it updates."""

    _schedule: Callable[..., str]

    def schedule(self, params: optax.Params, **extra_args: Any) -> str:
        """Tells what was chosen for an update, and why: window, loops, slices.

        Nothing is computed. The logger ``optax_offload`` has the same at level DEBUG.

        Args:
          params: a pytree of arrays or `jax.ShapeDtypeStruct`. Their shardings count:
            bytes are those on each device.
          **extra_args: what ``update`` takes beside.

        Returns:
          A few lines to read. An update that can also keep its state has some for each
          version. Groups that are updated whole are counted by the equation that keeps
          them from being sliced.

        Example:
          >>> import jax.numpy as jnp, optax, optax_offload as oo
          >>> tx = oo.offload(optax.adam(1e-3), window_bytes=2**20)
          >>> print(tx.schedule({"w": jnp.ones((512, 1024))}))  # doctest: +ELLIPSIS
          1 group of 4194304 bytes in all, the largest of 4194304
          window of 1048576 bytes: as asked
          loop of 4 turns over 1 group, ... to an iteration, slices of 1048576 bytes
        """
        return self._schedule(params, **extra_args)


def offload(
    inner: Any, rules: _rules.Rules = ".*", *, window_bytes: int | None = None
) -> Offloaded:
    """Keeps chosen state of an optimizer in host memory.

    The state has the structure, shapes and dtypes of ``inner``'s own, and the updates
    are ``inner``'s; only where leaves live between two updates differs. During an
    update state is loaded to the device, updated and stored back group by group
    (a group is the state leaves and outputs that need each other, usually those of one
    parameter), a bounded window at a time.

    ``init`` and ``update`` work under `jax.jit` and without it; without it each runs
    in a jit of its own.

    Args:
      inner: any optax transformation that can be jitted. `optax.MultiSteps` goes
        inside: around an offloaded optimizer its ``where`` over the state would
        compute on the host.
      rules: which leaves go: a regex that matches the whole path of a leaf of
        ``inner``'s state, such as ``0/mu/dense/kernel``; or a `Rule`, a sequence of
        them, or an `OffloadConfig`. By default all leaves of at least 64 KiB.
      window_bytes: how many bytes of state may be loaded or being stored at once, on
        each device. None takes a sixteenth of the state, at least 16 and at most
        64 MiB: state in transfers of 4 to 8 MiB and several of them in flight fill a
        link, and more costs memory and gains little. What cannot be cut that small is
        on the device by itself.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its ``schedule(params)`` tells what
      was chosen for an update, and why.

    Raises:
      TypeError: ``inner`` is no transformation, or is offloaded already, or the rules
        are of no known form.
      ValueError: a rule is wrong; or, from ``init``, a rule matches no leaf.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> state = tx.init({"w": jnp.ones((256, 128))})
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    config = _rules.as_config(rules, window_bytes)
    _check_compiled_kinds(config)
    inner = check_inner(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        if _memory.is_traced(params):
            return traced_init(params)
        shardings = _init_shardings(traced_init, params)
        return jax.jit(traced_init, out_shardings=shardings)(params)

    def traced_init(params: optax.Params) -> optax.OptState:
        _, state = _streamed(lambda p: ((), inner.init(p)), config, (params,), ())
        return state

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        args = (updates, state, params, extra_args)
        if _memory.is_traced(args):
            dynamic, static = _split(extra_args, (jax.Array, np.ndarray, np.generic))
            return traced_update(updates, state, params, dynamic, static)
        # A number may be another in every step: traced, it costs no compilation.
        numbers = (int, float, complex)
        dynamic, static = _split(
            extra_args, (jax.Array, np.ndarray, np.generic, *numbers)
        )
        return jitted_update(updates, state, params, dynamic, static)

    def traced_update(
        updates: Any, state: Any, params: Any, dynamic: Any, static: _Static
    ) -> tuple[optax.Updates, optax.OptState]:
        def fn(updates: Any, state: Any, params: Any, dynamic: Any) -> Any:
            return inner.update(updates, state, params, **dynamic, **static.values)

        return _streamed(fn, config, (updates, state, params, dynamic), state)

    jitted_update = jax.jit(traced_update, static_argnums=4)

    def schedule(params: optax.Params, **extra_args: Any) -> str:
        told: list[str] = []

        def fn(updates: Any, state: Any, params: Any, extra_args: Any) -> Any:
            return inner.update(updates, state, params, **extra_args)

        def update(*args: Any) -> Any:
            return _streamed(fn, config, args, args[1], tell=told.append)

        state = _templates.eval_shape(init_fn, params)
        jax.eval_shape(update, params, state, params, extra_args)
        return "\n".join(told)

    offloaded = Offloaded(init_fn, update_fn)
    offloaded._schedule = schedule
    return offloaded


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation that `offload` can wrap, or an error."""
    if isinstance(inner, Offloaded):
        raise TypeError(
            "the optimizer is offloaded already. Give all rules to one offload(...): "
            "offload(inner, [Rule(...), Rule(...)])"
        )
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        hint = ". Call it first, as in offload(optax.adamw(3e-4))"
        raise TypeError(
            "offload wraps an optax.GradientTransformation or optax.MultiSteps, got "
            f"{inner!r}" + (hint if callable(inner) else "")
        )
    return optax.with_extra_args_support(inner)


def _check_compiled_kinds(config: _rules.OffloadConfig) -> None:
    for position, rule in enumerate(config.rules):
        if rule.memory_kind not in _memory.COMPILED_KINDS:
            raise ValueError(
                f"rule {position} ({rule.regex!r}) has memory_kind "
                f"{rule.memory_kind!r}; a compiled update can keep state in "
                f"{' or '.join(map(repr, _memory.COMPILED_KINDS))}"
            )


class _Static:
    """Extra arguments that are no arrays, compared by identity: jit's cache key."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __hash__(self) -> int:
        return hash(frozenset((k, id(v)) for k, v in self.values.items()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Static)
            and self.values.keys() == other.values.keys()
            and all(v is other.values[k] for k, v in self.values.items())
        )


def _split(
    extra_args: dict[str, Any], dynamic_types: tuple[type, ...]
) -> tuple[dict[str, Any], _Static]:
    """Separates what is traced from functions, flags and the like."""

    def is_dynamic(value: Any) -> bool:
        leaves = jax.tree.leaves(value)
        return bool(leaves) and all(
            isinstance(x, dynamic_types) and not isinstance(x, bool) for x in leaves
        )

    dynamic = {k: v for k, v in extra_args.items() if is_dynamic(v)}
    static = {k: v for k, v in extra_args.items() if k not in dynamic}
    return dynamic, _Static(static)


def _streamed(
    fn: Callable[..., tuple[Any, Any]],
    config: _rules.OffloadConfig,
    args: tuple[Any, ...],
    state: Any,
    tell: Callable[[str], None] = logger.debug,
) -> tuple[Any, Any]:
    """Evaluates ``fn(*args)``, which returns (updates, state), in a streamed way."""
    leaves, structure = jax.tree.flatten(args)
    types = jax.tree.unflatten(structure, [_memory.device_type(x) for x in leaves])
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*types)
    with_paths, out_structure = jax.tree_util.tree_flatten_with_path(out)
    paths = [_trees.path_string(keys[1:]) for keys, _ in with_paths]
    updates = range(len(jax.tree.leaves(out[0])))
    flat = _jaxpr.flatten(closed)
    types_of_state = [a.aval for a in flat.outvars[len(updates) :]]
    planned = _state_kinds(config, paths[len(updates) :], types_of_state)
    kinds = ["device"] * len(updates) + planned
    _warn_of_strays(state, dict(zip(paths[len(updates) :], planned, strict=True)))
    loads = [i for i, x in enumerate(leaves) if _memory.on_host(x)]
    if not loads and set(kinds) == {"device"}:
        return fn(*args)  # Nothing moves: the program is the plain one.
    stores = [k for k, kind in enumerate(kinds) if kind != "device"]
    homes = _homes(args, updates, len(planned), state)
    slice_axes = _slice_axes(config, args, state, loads, leaves)

    def evaluate(flat: _jaxpr.Flat, leaves: Sequence[Any]) -> list[Any]:
        choice = _choices.choice(
            flat, loads=loads, stores=stores, updates=updates, homes=homes
        )
        if choice is not None:
            return _stream.choose(choice, flat, leaves, kinds, evaluate)
        schedule = _schedule.plan(
            flat,
            loads=loads,
            stores=stores,
            updates=updates,
            homes=homes,
            paths=paths,
            slice_axes=slice_axes,
            nbytes=_memory.nbytes_on_each_device,
            window_bytes=config.window_bytes,
        )
        tell(str(schedule))
        _warn_of_groups(schedule, config, paths)
        return _stream.run(flat, schedule, leaves, kinds)

    return jax.tree.unflatten(out_structure, evaluate(flat, leaves))


def _homes(
    args: tuple[Any, ...], updates: range, outputs_of_state: int, state: Any
) -> list[int | None]:
    """The argument that each output replaces: its gradient, or the state before.

    Arguments are (updates, state, ...), outputs (updates, state).
    """
    gradients = len(jax.tree.leaves(args[0]))
    before = len(jax.tree.leaves(state))
    of_updates = list(updates) if len(updates) == gradients else [None] * len(updates)
    of_state = [gradients + i for i in range(before)]
    if before != outputs_of_state:
        of_state = [None] * outputs_of_state
    return [*of_updates, *of_state]


def _slice_axes(
    config: _rules.OffloadConfig,
    args: tuple[Any, ...],
    state: Any,
    loads: list[int],
    leaves: list[Any],
) -> dict[int, int | None]:
    """For each load the axis along which it is sliced: the rule's, or its type's."""
    gradients = len(jax.tree.leaves(args[0]))
    axes: dict[int, int | None] = {}
    for i, (path, _) in enumerate(_trees.leaves_with_paths(state), start=gradients):
        rule = next((r for r in config.rules if r.matches(path)), None)
        axis = "auto" if rule is None else rule.slice_axis
        if axis == "auto":
            axis = _memory.slice_axis(leaves[i])
            if axis is not None:
                axes[i] = axis
        else:
            axes[i] = axis
    return {i: axes[i] for i in loads if i in axes}


def _state_kinds(
    config: _rules.OffloadConfig, paths: list[str], leaves: list[Any]
) -> list[str]:
    elsewhere = [p for p, x in zip(paths, leaves, strict=True) if _memory.on_host(x)]
    if elsewhere:
        raise TypeError(
            "a part of the wrapped optimizer is offloaded already: it puts "
            f"{', '.join(map(repr, elsewhere))} into host memory. Use one "
            "offload(...), around the whole or around parts that do not overlap"
        )
    sizes = [_memory.movable_nbytes(x) for x in leaves]
    placements = _rules.place(config, list(zip(paths, sizes, strict=True)))
    return [placement.memory_kind for placement in placements]


def _warn_of_strays(state: Any, planned: dict[str, str]) -> None:
    """Warns of state that should have come from the host and did not."""
    strays = [
        path
        for path, x in _trees.leaves_with_paths(state)
        if planned.get(path) == "pinned_host" and not _memory.on_host(x)
    ]
    if strays:
        warnings.warn(
            f"state planned for pinned_host came to update on the device: "
            f"{_trees.listed(strays)}. It is there whole during this update, and only "
            "then goes to the host. Make templates with "
            "optax_offload.eval_shape(tx.init, params), or move the state with "
            "optax_offload.set_memory_kind",
            OffloadWarning,
            stacklevel=2,
        )


def _warn_of_groups(
    schedule: _schedule.Schedule,
    config: _rules.OffloadConfig,
    paths: list[str],
) -> None:
    """Warns of what is on the device together, and over the window."""
    asked = config.window_bytes
    for group in schedule.whole:
        if not group.loads:
            continue
        if group.tied_by and group.nbytes > (asked or _schedule.MOST_WINDOW_BYTES):
            why = (
                f"{', '.join(map(repr, group.tied_by))} computes on the state of "
                "several parameters at once, so that it has to be on the device "
                "together"
            )
        elif asked is not None and group.nbytes > asked:
            why = f"it cannot be updated in slices ({group.whole_because})"
        else:
            continue
        _warn_of_window(group.nbytes, schedule, [paths[k] for k in group.outputs], why)
    for loop in schedule.loops:
        for group, nbytes in zip(loop.groups, loop.slice_bytes, strict=True):
            if asked is not None and nbytes > asked and group.rows is not None:
                outputs = [paths[k] for k in group.outputs]
                why = "there are no smaller slices"
                _warn_of_window(nbytes, schedule, outputs, why)


def _warn_of_window(
    nbytes: int, schedule: _schedule.Schedule, paths: list[str], why: str
) -> None:
    warnings.warn(
        f"{nbytes} bytes of state are on the device at once, over the window of "
        f"{schedule.window_bytes}: {_trees.listed(paths)}: {why}",
        OffloadWarning,
        stacklevel=2,
    )


def _init_shardings(init: Callable[..., Any], params: optax.Params) -> Any:
    """Where each leaf of the state goes, if the parameters are on several devices.

    Under jit ``zeros_like`` knows nothing of its argument's sharding, so what it makes
    would be on every device whole.
    """
    shardings = [x.sharding for x in jax.tree.leaves(params) if hasattr(x, "sharding")]
    if all(s.num_devices == 1 for s in shardings):
        return None
    closed, out = jax.make_jaxpr(init, return_shape=True)(params)
    paths = [path for path, _ in _trees.leaves_with_paths(out)]
    like = _templates.shardings_like(
        list(zip(paths, closed.out_avals, strict=True)), [params]
    )
    chosen = [
        s and s.with_memory_kind(_memory.kind_of_type(x))
        for s, x in zip(like, closed.out_avals, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(out), chosen)
