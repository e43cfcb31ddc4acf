"""Arguments of a call before it is one of values: NNX objects, loose arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from optax_offload._ground import commitment, compat, nnx


class GivenObjects(Exception):  # noqa: N818 (it is caught where it belongs)
    """Among the arguments of a function that is being traced there are objects."""


class OfObjects:
    """A jitted function, for calls with objects.

    Attributes:
      expected: Whether a call had objects, so that others may have.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        jit: Callable[..., Any],
    ):
        """Makes the function.

        Args:
          fun: The function.
          options: Those of `jax.jit`.
          jit: Makes the jitted function of values, given the function and options.
        """
        _check_shardings(options)
        donated = _chosen(fun, options, "donate")
        self._static = _chosen(fun, options, "static")
        # Shardings that are given say where all is.
        commits = options.get("in_shardings") is None
        self._pure = nnx.Pure(fun, donated, self._static, commits)
        self._options, self._jit = options, jit
        self.expected = False

    def given(self, args: Any, kwargs: Any) -> bool:
        """Returns whether any argument has objects that are not static."""
        return self._pure.takes(args, kwargs)

    @functools.cached_property
    def of_values(self) -> Any:
        """The jitted function of values."""
        options = dict(self._options)
        before, after = options.get("in_shardings"), options.get("out_shardings")
        if isinstance(before, (tuple, list)):
            left, before = [*before], []
            while left:
                static = self._static(len(before))
                before.append(None if static else left.pop(0))
            before = tuple(before)
        if before is not None or after is not None:
            options["out_shardings"] = before, after
        return self._jit(self._pure.of_values, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled, and changes the objects."""
        self.expected = True
        return self._pure.call(self.of_values, args, kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Describes the updates of a call that are fused."""
        with self._pure.context():
            args, kwargs = self._pure.split(args, kwargs)
            return self.of_values.schedule(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function for a call."""
        with self._pure.context():
            args, kwargs = self._pure.split(args, kwargs)
            return _Stage(self.of_values.trace(*args, **kwargs), self._pure)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a call as structs, and changes nothing."""
        copies = nnx.merged(nnx.splits(lambda: (args, kwargs))())
        return self._pure.call(self.of_values.eval_shape, *copies)

    def clear(self) -> None:
        """Forgets what was traced and compiled."""
        if self.expected:
            self.of_values.clear_cache()

    def cache_size(self) -> int:
        """Returns how many calls are known."""
        return self.of_values._cache_size() if self.expected else 0


class _Stage:
    """A function on its way to be compiled, as of `jax.stages`, for calls with objects.

    Its arguments and results are described as those of the function of values.
    """

    def __init__(self, stage: Any, pure: nnx.Pure):
        self._stage, self._pure = stage, pure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **kwargs: Any) -> _Stage:
        """Lowers what was traced."""
        return _Stage(self._stage.lower(**kwargs), self._pure)

    def compile(self, *args: Any, **kwargs: Any) -> _Stage:
        """Compiles what was lowered."""
        return _Stage(self._stage.compile(*args, **kwargs), self._pure)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what was compiled, and changes the objects."""
        return self._pure.call(self._stage, args, kwargs)


class Commitment:
    """Commits what a step donates, until a call has nothing to commit.

    Such as parameters beside state in host memory: that is always committed.
    """

    def __init__(self, fun: Callable[..., Any], options: Mapping[str, Any]):
        """Reads what is donated. Shardings that are given say where all is."""
        self._donated = _chosen(fun, options, "donate")
        fixed = ("in_shardings", "device", "backend")
        self._expects = not any(options.get(name) is not None for name in fixed)

    def __call__(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call, which no transformation of JAX is tracing."""
        if not self._expects or compat.tracing():
            return args, kwargs
        named = [*enumerate(args), *kwargs.items()]
        donated = {name for name, _ in named if self._donated(name)}
        loose = jax.tree.leaves([x for name, x in named if name in donated])
        loose = any(isinstance(x, jax.Array) and not x.committed for x in loose)
        put = None
        if loose:
            put = commitment.committing(jax.tree.leaves((args, kwargs)))
        if put is None:
            self._expects = False
            return args, kwargs
        made = {k: jax.tree.map(put, x) if k in donated else x for k, x in named}
        return tuple(made[i] for i in range(len(args))), {k: made[k] for k in kwargs}


def _check_shardings(options: Mapping[str, Any]) -> None:
    for name in ("in_shardings", "out_shardings"):
        strangers = [type(x).__name__ for x in jax.tree.leaves(options.get(name))]
        if "StateSharding" in strangers:
            raise TypeError(
                f"{name} has an nnx.StateSharding. A step runs as its arguments are "
                "sharded: leave it out, and shard the objects before the first step: "
                "nnx.update(model, jax.device_put(nnx.state(model), shardings))"
            )


def _chosen(
    fun: Callable[..., Any], options: Mapping[str, Any], what: str
) -> Callable[[int | str], bool]:
    """Tells of an argument, by position or name, whether options name it.

    As `jax.jit` does, where positions or names alone are given, the function's
    signature says the others.
    """
    positions, names = options.get(f"{what}_argnums"), options.get(f"{what}_argnames")
    positions = [positions] if isinstance(positions, int) else positions
    names = [names] if isinstance(names, str) else names
    try:
        known = [*inspect.signature(fun).parameters.values()]
    except (TypeError, ValueError):
        known = []
    either = {
        i: x.name for i, x in enumerate(known) if x.kind == x.POSITIONAL_OR_KEYWORD
    }
    found: set[int | str] = {i % len(known) if i < 0 else i for i in positions or ()}
    found |= {*(names or ())}
    if names is None:
        found |= {name for i, name in either.items() if i in found}
    elif positions is None:
        found |= {i for i, name in either.items() if name in found}
    return found.__contains__
