"""`offload`: an optax transformation whose state lives in host memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax

from optax_offload import _compat, _memory, _rules, _templates, _trees
from optax_offload._errors import CAUSES, MemoryKindError, OffloadWarning, warn
from optax_offload._extra_args import Static, as_transformation, split
from optax_offload._low_bit import as_rules_say, warn_of_blocks
from optax_offload._update import (
    Deferred,
    Schedule,
    Update,
    closed,
    compare,
    defer,
    expect_on_host,
    note_arguments,
    schedule,
    trace,
    transformable,
)

logger = logging.getLogger("optax_offload")


class Offloaded(optax.GradientTransformationExtraArgs):
    """What `offload` returns: a transformation that can tell how it updates."""

    def schedule(self, params: optax.Params, **extra_args: Any) -> Schedule:
        """Tells what was chosen for an update, and why: window, loops, slices.

        Nothing is computed. The logger ``optax_offload`` has the same at level DEBUG.

        Args:
          params: a pytree of arrays or `jax.ShapeDtypeStruct`. Their shardings count:
            bytes are those on each device.
          **extra_args: what ``update`` takes beside.

        Returns:
          The schedule. Its text is a few lines to read: an update that can also keep
          its state has some for each version, and groups that are updated whole are
          counted by the equation that keeps them from being sliced.

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
                f"{self.update!r}, of which nothing is known. Ask the one that "
                "offload(...) returned"
            )
        return core.schedule(params, **extra_args)


def offload(
    inner: Any,
    rules: _rules.Rules = ".*",
    *,
    window_bytes: int | None = None,
    on_misplaced: Literal["raise", "move"] = "raise",
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
        them, or an `OffloadConfig`. By default all leaves of at least 64 KiB. What a
        rule names a ``codec`` for is kept encoded, as by `low_bit`.
      window_bytes: how many bytes of state may be loaded or being stored at once, on
        each device. None takes a sixteenth of the state, at least 16 and at most
        64 MiB: state in transfers of 4 to 8 MiB and several of them in flight fill a
        link, and more costs memory and gains little. What cannot be cut that small is
        on the device by itself.

      on_misplaced: what ``update`` does with state that the rules have in host memory
        and that comes to it on the device, since something moved it there and undid
        offloading; and with state in another form than its rule's ``codec``, as of an
        older checkpoint. ``"raise"`` says so; ``"move"``, for the first step after a
        restore, warns and moves or converts it in that step.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its ``schedule(params)`` tells what
      was chosen for an update, and why.

    Raises:
      TypeError: ``inner`` is no transformation, or is offloaded already, or the rules
        are of no known form.
      ValueError: a rule or ``on_misplaced`` is wrong; or, from ``init``, a rule matches
        no leaf.
      MemoryKindError: from ``update``, state is not where the rules have it.
      CodecError: from ``update``, state is not in the form that the rules name.

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
    if on_misplaced not in ("raise", "move"):
        raise ValueError(
            f"on_misplaced is {on_misplaced!r}; it must be 'raise' or 'move'"
        )
    inner = as_rules_say(inner, config, on_misplaced)
    core = _Offloading(inner, config, on_misplaced)
    return Offloaded(core.init, core.update)


class _Offloading:
    """An optimizer and its rules: what the two functions of a transformation share."""

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        config: _rules.OffloadConfig,
        on_misplaced: str,
    ):
        self._inner, self._config, self._on_misplaced = inner, config, on_misplaced
        self._jitted_update = jax.jit(self._traced_update, static_argnums=4)

    def init(self, params: optax.Params) -> optax.OptState:
        """As of `optax.GradientTransformation`."""
        if not (jax.tree.leaves(params) or self._config.lenient):
            # Rules may match nothing then: optax.tree.map_params has a placeholder.
            lenient = self._config.made_lenient()
            return _Offloading(self._inner, lenient, self._on_misplaced).init(params)
        if _memory.is_traced(params):
            return self._traced_init(params)
        init, args = self._traced_init, params
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            # No arguments for jit; as in optax an init may ask for their shapes only.
            inner = self._inner._replace(init=lambda _: self._inner.init(params))
            init, args = _Offloading(inner, self._config, "raise")._traced_init, ()
        shardings = _templates.init_shardings(init, params)
        state = jax.jit(init, out_shardings=shardings)(args)
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
        if _memory.is_traced(args):
            dynamic, static = split(extra_args, (jax.Array, np.ndarray, np.generic))
            return self._traced_update(updates, state, params, dynamic, static)
        # A number may be another in every step: traced, it costs no compilation.
        numbers = (int, float, complex)
        dynamic, static = split(
            extra_args, (jax.Array, np.ndarray, np.generic, *numbers)
        )
        return self._jitted_update(updates, state, params, dynamic, static)

    def schedule(self, params: optax.Params, **extra_args: Any) -> Schedule:
        """The schedule of an update."""
        dynamic, static = split(
            extra_args, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
        )
        found: list[Schedule] = []

        def update(*args: Any) -> None:
            traced, _ = trace(self._fn(static), self._config, args, args[1])
            found.append(schedule(traced, self._config.window_bytes))

        state = _templates.eval_shape(self.init, params)
        jax.eval_shape(update, params, state, params, dynamic)
        return found[0]

    def _traced_init(self, params: optax.Params) -> optax.OptState:
        def fn(params: optax.Params) -> tuple[Any, Any]:
            return (), self._inner.init(params)

        def stream(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
            return self._streamed(fn, args, (), cells)

        # State is sharded as its parameters, of which the program alone may say how.
        args, cells = note_arguments((params,), on_device=True)
        _, state = transformable(fn, stream, args)
        return state

    def _traced_update(
        self, updates: Any, state: Any, params: Any, dynamic: Any, static: Static
    ) -> tuple[optax.Updates, optax.OptState]:
        def stream(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
            return self._streamed(fn, args, args[1], cells, static.values)

        fn = self._fn(static)
        args = (updates, state, params, dynamic)
        placed = _placed(self._config, state)
        misplaced: dict[int, str] = {}
        if any(kind != came == "device" for _, kind, came in placed) and (
            _compat.tracing_for_jit_alone()
        ):
            # Types may be wrong (F28): the program says where these are.
            update, _ = trace(fn, self._config, args, state)
            misplaced = _misplaced(update, self._config, state)
            args = (updates, self._expected(state, misplaced), params, dynamic)
        told: list[str] = []
        first = len(jax.tree.leaves(updates))

        def tell(argument: int) -> None:
            leaf = argument - first
            if told or leaf in misplaced or not 0 <= leaf < len(placed):
                return
            path, kind, _ = placed[leaf]
            if kind == "pinned_host":
                _tell_of_misplaced([path], self._on_misplaced)
                told.append(path)

        args = _compared(args)
        args, cells = note_arguments(args, tell)
        return transformable(fn, stream, args)

    def _expected(self, state: Any, misplaced: Mapping[int, str]) -> Any:
        """The state, with leaves as host values that by their type are none."""
        if not misplaced:
            return state
        leaves, structure = jax.tree.flatten(state)
        paths = list(misplaced.values())

        def tell(found: list[int]) -> None:
            _tell_of_misplaced([paths[i] for i in found], self._on_misplaced)

        there = expect_on_host([leaves[i] for i in misplaced], tell)
        for i, x in zip(misplaced, there, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(structure, leaves)

    def _fn(self, static: Static) -> Callable[..., tuple[Any, Any]]:
        """The plain update of these extra arguments."""

        def fn(updates: Any, state: Any, params: Any, dynamic: Any) -> Any:
            return self._inner.update(
                updates, state, params, **dynamic, **static.values
            )

        return fn

    def _streamed(
        self,
        fn: Callable[..., tuple[Any, Any]],
        args: tuple[Any, ...],
        state: Any,
        cells: Mapping[int, Any],
        known: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Evaluates a function that returns (updates, state) as its schedule says.

        Args:
          fn: The function.
          args: Its arguments.
          state: The state among them; () where there is none.
          cells: See `Deferred`.
          known: The extra arguments that it closes over.
        """
        update, structure = trace(fn, self._config, args, state)
        misplaced = _misplaced(update, self._config, state)
        if misplaced:  # In a loop, in a branch, or of a population of small members.
            _tell_of_misplaced(list(misplaced.values()), self._on_misplaced)
        if not (update.loads or update.stores):
            return fn(*args)  # Nothing moves: the program is the plain one.
        _check_refs(update, known or {})
        update, leaves = closed(update, jax.tree.leaves(args))
        planned = schedule(update, self._config.window_bytes)
        logger.debug("%s", planned)
        what = Deferred(update, self._config.window_bytes, cells)
        results = defer(what, planned, leaves)
        return jax.tree.unflatten(structure, results)


def _check_refs(update: Update, known: Mapping[str, Any]) -> None:
    """Raises if an update reads or writes refs."""
    refs = [x for x in update.program.constants.values() if isinstance(x, jax.Ref)]
    if not refs:
        return
    leaves = _trees.leaves_with_paths(known)
    paths = [next((path for path, x in leaves if x is ref), "") for ref in refs]
    given = [path for path in paths if path]
    closed_over = [
        str(jax.typeof(ref)) for ref, path in zip(refs, paths, strict=True) if not path
    ]
    names = [f"the extra argument {_trees.listed(given)}"] if given else []
    names += [f"{_trees.listed(closed_over)}, closed over"] if closed_over else []
    raise TypeError(
        f"an offloaded update uses a ref ({' and '.join(names)}). It loads and stores "
        "its state as one equation of values, which can neither read a ref nor write "
        "it. Give it the value, update(..., x=ref[...]), and write the ref beside the "
        "update; or chain what uses the ref before what is offloaded: "
        "optax.chain(uses_ref, offload(...))"
    )


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation that `offload` can wrap, or an error."""
    if isinstance(inner, Offloaded):
        raise TypeError(
            "the optimizer is offloaded already. Give all rules to one offload(...): "
            "offload(inner, [Rule(...), Rule(...)])"
        )
    return as_transformation(inner, "offload")


def _check_compiled_kinds(config: _rules.OffloadConfig) -> None:
    for position, rule in enumerate(config.rules):
        if rule.memory_kind not in _memory.COMPILED_KINDS:
            raise ValueError(
                f"rule {position} ({rule.regex!r}) has memory_kind "
                f"{rule.memory_kind!r}; a compiled update can keep state in "
                f"{' or '.join(map(repr, _memory.COMPILED_KINDS))}"
            )


def _placed(config: _rules.OffloadConfig, state: Any) -> list[tuple[str, str, str]]:
    """Of each leaf of the state its path, where rules have it, and where its type."""
    leaves = _trees.leaves_with_paths(state)
    sizes = [(path, _memory.movable_nbytes(x)) for path, x in leaves]
    placements = _rules.place(config.made_lenient(), sizes)
    return [
        (path, placement.memory_kind, _memory.kind_of_type(jax.typeof(x)))
        for (path, x), placement in zip(leaves, placements, strict=True)
    ]


def _misplaced(
    update: Update, config: _rules.OffloadConfig, state: Any
) -> dict[int, str]:
    """State that by its type is not on the host and should be: paths by position."""
    planned = {o.path: o.memory_kind for o in update.outputs if not o.is_update}
    # State whose first update widens its dtype may have been too small to go before.
    return {
        i: path
        for i, (path, kind, came) in enumerate(_placed(config, state))
        if planned.get(path) == kind == "pinned_host" and came == "device"
    }


def _compared(args: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The arguments of an update, which warns of state that is not sharded as they are.

    A jit that makes parameters and state shards what ``out_shardings`` name, and
    replicates the rest.
    """
    updates, state, params, dynamic = args
    leaves, structure = jax.tree.flatten(state)
    of, structure_of_params = jax.tree.flatten(params)
    paths = [path for path, _ in _trees.leaves_with_paths(state)]
    there = [i for i, x in enumerate(leaves) if _memory.on_host(x)]
    typed = [(paths[i], jax.typeof(leaves[i])) for i in there]
    like = zip(there, _templates.arguments_like(typed, [params]), strict=True)
    pairs = [(i, j) for i, j in like if j is not None and _memory.is_traced(of[j])]
    if not pairs:
        return args
    told: list[str] = []

    def tell(found: list[int]) -> None:
        if not told:
            told.extend(paths[pairs[n][0]] for n in found)
            warn(
                "state in host memory is replicated, a copy for each device, while the "
                f"parameters that it follows are sharded: {_trees.listed(told)}. A jit "
                "that makes parameters and state shards only what its out_shardings "
                "name. Put the state where it belongs, once, before the first step: "
                "state = optax_offload.place(state, "
                "optax_offload.eval_shape(tx.init, params)). If copies are wanted, "
                "ignore this warning: nothing tells the two apart"
            )

    values = compare([leaves[i] for i, _ in pairs], [of[j] for _, j in pairs], tell)
    for (i, j), x, y in zip(pairs, values, values[len(pairs) :], strict=False):
        leaves[i], of[j] = x, y
    state = jax.tree.unflatten(structure, leaves)
    return updates, state, jax.tree.unflatten(structure_of_params, of), dynamic


def _tell_of_misplaced(misplaced: list[str], on_misplaced: str) -> None:
    """Raises or warns of state that should have come from the host and did not."""
    came = (
        f"state planned for pinned_host came to update on the device: "
        f"{_trees.listed(misplaced)}"
    )
    if on_misplaced == "raise":
        raise MemoryKindError(f"{came}. {CAUSES}")
    warnings.warn(
        f"{came}. It is on the device whole during this step, which returns it in host "
        "memory (unless the out_shardings of a jit around move it again) and is "
        "compiled once more when it comes from there",
        OffloadWarning,
        stacklevel=2,
    )
