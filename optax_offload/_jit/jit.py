"""`jax.jit`, for steps that hold state in host memory."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from optax_offload import _compat, _trees
from optax_offload._errors import OffloadWarning
from optax_offload._jit import donation, shardings

# What `jax.jit` is told to trace a function, and to say which leaves are donated.
_OF_TRACING = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_SHARDINGS = ("in_shardings", "out_shardings")


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    **jit_kwargs: Any,
) -> Any:
    """`jax.jit`, for train steps that hold state in host memory.

    It is `jax.jit`, with all of its arguments, methods and errors, and two things more.

    **Donation stays within a memory.** JAX pairs donated arguments with results by
    shape and dtype alone, in their order, unless the sharding of every argument and
    result is given (`_set_up_aliases` in `jax/_src/interpreters/mlir.py`, JAX 0.10.2 to
    0.12.0.1). A step that donates only its state, takes the state before the
    parameters, or returns an array of a parameter's shape ahead of the parameters then
    has a host buffer for a device result: on the CPU the process is aborted, and on a
    GPU the parameters silently are in host memory. Here an argument is paired with a
    result of its own memory kind. Where there is none it is not donated, and a warning
    says so: JAX's "Some donated buffers were not usable".

    **Results are where the function left them**, whatever `in_shardings` and
    `out_shardings` say of memory. A sharding that names no kind means the device to
    JAX, which raises for host arguments and moves host results; it cannot be told from
    one that names the device. So shardings say how values are sharded, and the
    arguments and the function say in which memory they are. An `out_shardings` that
    names a host memory for a result that the function left on the device warns: move it
    in the function, with `jax.device_put`.

    A call goes straight to the jitted function's C++ path: it costs what `jax.jit`
    costs, whatever the number of leaves (`benchmarks/time/call_cost.py`). Arguments
    that come in other memories than before (a checkpoint that was restored to the
    device) are one more compilation. Within another `jax.jit`, or under `jax.grad` or
    `jax.vmap`, nothing is donated: jit the outermost function with this.

    Args:
      fun: the function. Without it, a decorator is returned.
      donate_argnums: as of `jax.jit`.
      donate_argnames: as of `jax.jit`.
      **jit_kwargs: the other arguments of `jax.jit`.

    Returns:
      The jitted function, with the methods that `jax.jit` gives: `lower`, `trace`,
      `eval_shape`, `clear_cache`.

    Raises:
      ValueError: when called, `device` or `backend` is given and a value is in host
        memory: JAX would move it to the device.

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
    options = dict(jit_kwargs)
    if isinstance(donate_argnums, int) or donate_argnums:  # The first one is number 0.
        options["donate_argnums"] = donate_argnums
    if donate_argnames:
        options["donate_argnames"] = donate_argnames
    if fun is None:
        return functools.partial(jit, **options)
    return _Jitted(fun, options)


class _Jitted:
    """A function jitted by `jit`."""

    def __init__(self, fun: Callable[..., Any], options: Mapping[str, Any]):
        functools.update_wrapper(self, fun)
        self._fun, self._options = fun, dict(options)
        # What is called at top level, and what while something is being traced: there
        # donation means nothing, but for an eager `jax.vmap` or `jax.grad`, whose
        # programs the function's own trace would know nothing of.
        self._outermost = _Variants(fun, options, donates=True)
        nested = {k: v for k, v in options.items() if not k.startswith("donate")}
        self._nested = _Variants(fun, nested, donates=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled."""
        variants = self._nested if _compat.tracing() else self._outermost
        try:
            return variants.current(*args, **kwargs)
        except _OtherKinds as other:
            found = other.found
        return variants.switch(found)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return _Jitted, (self._fun, self._options)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for arguments, as the method that `jax.jit` gives."""
        variants = self._nested if _compat.tracing() else self._outermost
        try:
            return variants.current.trace(*args, **kwargs)
        except _OtherKinds as other:
            found = other.found
        return variants.switch(found).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments, as the method that `jax.jit` gives."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, as the method that `jax.jit` gives."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled, as the method that `jax.jit` gives."""
        for variants in (self._outermost, self._nested):
            variants.clear()

    def _cache_size(self) -> int:
        return self._outermost.cache_size() + self._nested.cache_size()


class _Variants:
    """A function jitted with given shardings, in all memory kinds that calls had.

    Attributes:
      current: The one that was called last.
    """

    def __init__(
        self, fun: Callable[..., Any], options: Mapping[str, Any], *, donates: bool
    ):
        self._fun, self._options, self._donates = fun, dict(options), donates
        # Traces the function once for each signature, and is inlined when called.
        of_tracing = {k: v for k, v in options.items() if k in _OF_TRACING}
        self._tracer: Any = jax.jit(fun, inline=True, **of_tracing)
        self._given = {k: options[k] for k in _SHARDINGS if options.get(k) is not None}
        self._jitted: dict[Hashable, Any] = {}
        self.current = self._variant(self._given, None)

    def switch(self, found: _Kinds) -> Any:
        """Makes the variant for such memory kinds the one to be called."""
        _compat.forget_only_call(self.current)
        given = {
            k: shardings.with_kinds(v, found.of[k]) for k, v in self._given.items()
        }
        self.current = self._variant(given, found)
        return self.current

    def clear(self) -> None:
        for jitted in (self._tracer, *self._jitted.values()):
            jitted.clear_cache()

    def cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _variant(self, given: Mapping[str, Any], found: _Kinds | None) -> Any:
        leaves, treedef = jax.tree.flatten(given, is_leaf=lambda x: x is None)
        # Specs mean a mesh only when they are used, other entries bring their own.
        specs = any(map(shardings.names_partition_specs, self._given.values()))
        mesh = found.mesh if found is not None and specs else None
        key = (tuple(leaves), treedef, mesh)
        if key not in self._jitted:
            if found is not None and "out_shardings" in self._given:
                _warn_of_host(self._given["out_shardings"], found.of["out_shardings"])
            options = {**self._options, **given}
            self._jitted[key] = jax.jit(self._staged(given, mesh), **options)
        return self._jitted[key]

    def _staged(self, given: Mapping[str, Any], mesh: Any) -> Callable[..., Any]:
        """The function as it is traced for one variant."""
        on_one_device = any(self._options.get(k) for k in ("device", "backend"))

        # A pass over the whole step is one over `fun`, before it is traced here.
        @functools.wraps(self._fun)
        def staged(*args: Any, **kwargs: Any) -> Any:
            if _compat.jit_is_disabled():
                return self._fun(*args, **kwargs)
            traced = self._tracer.trace(*args, **kwargs)
            if on_one_device:
                _check_on_device(traced)
            if given:
                found = _Kinds.of_call(traced)
                if not found.fit(given) or mesh not in (None, found.mesh):
                    raise _OtherKinds(found)
            results = self._tracer(*args, **kwargs)
            if not self._donates:
                return results
            return donation.pair(
                results, donation.donated_leaves((args, kwargs), traced)
            )

        staged.__name__ = _name_of(self._fun)
        return staged


@dataclasses.dataclass(frozen=True)
class _Kinds:
    """The memory kinds of a call.

    Attributes:
      of: A tree of kinds for each of `in_shardings` and `out_shardings`.
      mesh: The mesh that the call was made with.
    """

    of: Mapping[str, Any]
    mesh: Any

    @classmethod
    def of_call(cls, traced: jax.stages.Traced) -> _Kinds:
        args, _ = jax.tree.unflatten(traced.in_tree, _kinds(_argument_types(traced)))
        results = jax.tree.unflatten(traced.out_tree, _kinds(traced.jaxpr.out_avals))
        of = {"in_shardings": args, "out_shardings": results}
        return cls(of, jax.sharding.get_abstract_mesh())

    def fit(self, given: Mapping[str, Any]) -> bool:
        """Whether shardings name these kinds, or are wrong in what JAX says better."""
        try:
            return all(shardings.fit(v, self.of[k]) for k, v in given.items())
        except ValueError:
            return True


class _OtherKinds(Exception):  # noqa: N818 (it is caught where it belongs)
    """A call has values in other memories than its shardings say."""

    def __init__(self, found: _Kinds):
        super().__init__(found)
        self.found = found


def _argument_types(traced: jax.stages.Traced) -> list[Any]:
    # Values of an outer trace that the function closes over come first.
    count = traced.in_tree.num_leaves
    return traced.jaxpr.in_avals[len(traced.jaxpr.in_avals) - count :]


def _kinds(avals: Iterable[Any]) -> list[str]:
    host = jax.memory.Space.Host
    return [
        "pinned_host" if getattr(a, "memory_space", None) == host else "device"
        for a in avals
    ]


def _check_on_device(traced: jax.stages.Traced) -> None:
    args, kwargs = jax.tree.unflatten(traced.in_tree, _kinds(_argument_types(traced)))
    results = jax.tree.unflatten(traced.out_tree, _kinds(traced.jaxpr.out_avals))
    strays = [
        f"{what} {path}"
        for what, tree in [
            ("argument", args),
            ("argument", kwargs),
            ("result", results),
        ]
        for path, kind in _trees.leaves_with_paths(tree)
        if kind != "device"
    ]
    if strays:
        raise ValueError(
            f"device= and backend= put all that a function takes and returns onto the "
            f"device, and these are in host memory: {_trees.listed(strays)}. Leave "
            "both out: a step runs where its arguments are (jax.device_put)"
        )


def _warn_of_host(given: Any, kinds: Any) -> None:
    paths = shardings.asked_for_host(given, kinds)
    if paths:
        warnings.warn(
            "out_shardings name a host memory for results that the function left on "
            f"the device, where they stay: {_trees.listed(paths)}. Move them in the "
            "function: jax.device_put(x, jax.memory.Space.Host)",
            OffloadWarning,
            stacklevel=5,
        )


def _name_of(fun: Any) -> str:
    """The name under which JAX shows a function in its programs."""
    if isinstance(fun, functools.partial):
        return _name_of(fun.func)
    return getattr(fun, "__name__", "<unnamed function>")
