"""`offload`: an optax transformation whose state lives in host memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from optax_offload import _memory, _rules, _templates, _trees
from optax_offload._errors import OffloadWarning
from optax_offload._update import Schedule, Update, run, schedule, trace

logger = logging.getLogger("optax_offload")


class Offloaded(optax.GradientTransformationExtraArgs):
    """What `offload` returns: a transformation that can tell how it updates."""

    _schedule: Callable[..., Schedule]

    def schedule(self, params: optax.Params, **extra_args: Any) -> Schedule:
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

    def scheduled(params: optax.Params, **extra_args: Any) -> Schedule:
        found: list[Schedule] = []

        def update(updates: Any, state: Any, params: Any, extra_args: Any) -> None:
            def fn(updates: Any, state: Any, params: Any, extra_args: Any) -> Any:
                return inner.update(updates, state, params, **extra_args)

            args = (updates, state, params, extra_args)
            traced, _ = trace(fn, config, args, state)
            found.append(schedule(traced, config.window_bytes))

        state = _templates.eval_shape(init_fn, params)
        jax.eval_shape(update, params, state, params, extra_args)
        return found[0]

    offloaded = Offloaded(init_fn, update_fn)
    offloaded._schedule = scheduled
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
) -> tuple[Any, Any]:
    """Evaluates ``fn(*args)``, which returns (updates, state), in a streamed way."""
    update, structure = trace(fn, config, args, state)
    _warn_of_strays(update, state)
    if not (update.loads or update.stores):
        return fn(*args)  # Nothing moves: the program is the plain one.
    planned = schedule(update, config.window_bytes)
    logger.debug("%s", planned)
    _warn_of_groups(planned, config, update.paths)
    return jax.tree.unflatten(structure, run(update, planned, jax.tree.leaves(args)))


def _warn_of_strays(update: Update, state: Any) -> None:
    """Warns of state that should have come from the host and did not."""
    planned = {o.path: o.memory_kind for o in update.outputs if not o.is_update}
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
    planned: Schedule, config: _rules.OffloadConfig, paths: list[str]
) -> None:
    """Warns of what is on the device together, and over the window."""
    for straight in planned.straights():
        for over in straight.over_window(config.window_bytes):
            warnings.warn(
                f"{over.nbytes} bytes of state are on the device at once, over the "
                f"window of {straight.window.nbytes}: "
                f"{_trees.listed([paths[k] for k in over.outputs])}: {over.because}",
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
