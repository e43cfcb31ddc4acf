"""The memory kinds of a call's arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from optax_offload._ground import compat, trees
from optax_offload._ground.errors import warn
from optax_offload._places import memory
from optax_offload._schedule import FusedStep
from optax_offload._step import shardings
from optax_offload._step.streaming import rests


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The memory kinds of a call.

    Attributes:
      of: A tree of kinds for each of `in_shardings` and `out_shardings`.
      mesh: The mesh that the call was made with.
    """

    of: Mapping[str, Any]
    mesh: Any

    @classmethod
    def of_call(cls, traced: jax.stages.Traced, plan: FusedStep) -> Kinds:
        """The kinds of a call, and of what its step is planned to give."""
        (args, _), results = _trees_of(traced, plan)
        of = {"in_shardings": args, "out_shardings": results}
        return cls(of, jax.sharding.get_abstract_mesh())

    def fit(self, given: Mapping[str, Any]) -> bool:
        """Returns whether shardings name these kinds, or JAX has a better error."""
        try:
            fits = [shardings.fit(v, self.of[k]) for k, v in given.items()]
        except ValueError:
            return True
        return all(fits)


class MadeFor(NamedTuple):
    """What a variant of a function is made for.

    Attributes:
      kinds: The memory kinds of arguments and results.
      told: What a GPU's compiler is told.
    """

    kinds: Kinds
    told: Mapping[str, Any]


class OtherVariant(Exception):  # noqa: N818 (it is caught where it belongs)
    """A call has other memories than its variant, or a compiler to be told more.

    Who catches it makes that variant. A user sees it only where JAX takes other memory
    kinds than it was given: on devices of `aot.Target`, of which it has none.
    """

    def __init__(self, wanted: MadeFor):
        super().__init__(
            "JAX traces the step with other memory kinds than `in_shardings` have, as "
            "on devices that are only compiled for. Give shardings on the mesh of "
            "optax_offload.aot.Target(...).mesh(...), which has no devices"
        )
        self.wanted = wanted


def argument_types(traced: jax.stages.Traced) -> list[Any]:
    """The types of the leaves that a call gives."""
    # Values of an outer trace that the function closes over come first.
    count = traced.in_tree.num_leaves
    return traced.jaxpr.in_avals[len(traced.jaxpr.in_avals) - count :]


def _trees_of(traced: jax.stages.Traced, plan: FusedStep) -> tuple[Any, Any]:
    """The memory kinds of arguments and of results, as their trees."""
    jaxpr = plan.step.jaxpr
    given, made = traced.in_tree.num_leaves, traced.out_tree.num_leaves
    # Values of an outer trace come first, and the values of refs last.
    first = len(traced.jaxpr.in_avals) - given
    invars, outvars = jaxpr.invars[first : first + given], jaxpr.outvars[:made]
    arguments = [memory.kind_of_type(v.aval) for v in invars]
    results = [memory.kind_of_type(a.aval) for a in outvars]
    return (
        jax.tree.unflatten(traced.in_tree, arguments),
        jax.tree.unflatten(traced.out_tree, results),
    )


def check_on_device(traced: jax.stages.Traced, plan: FusedStep) -> None:
    """Raises if anything is in host memory, for which there must be no device."""
    misplaced = _on_host(traced, plan)
    if misplaced:
        raise ValueError(
            f"device= and backend= put all that a function takes and returns onto the "
            f"device, and these are in host memory: {trees.listed(misplaced)}. Leave "
            "both out: a step runs where its arguments are (jax.device_put)"
        )


def check_effects(traced: jax.stages.Traced, plan: FusedStep) -> None:
    """Raises if effects are ordered beside host memory, where JAX's error is a riddle.

    See `tests/system/upstream.md`, U07.
    """
    if not compat.has_ordered_effects(traced.jaxpr):
        return
    found = _on_host(traced, plan)
    if found:
        raise ValueError(
            "JAX compiles no function that has an ordered effect (ordered=True, as in "
            "jax.debug.print or io_callback) and takes or returns values in host "
            f"memory (jax-ml/jax#40108), as these: {trees.listed(found)}. Leave "
            "ordered=True out"
        )


def _on_host(traced: jax.stages.Traced, plan: FusedStep) -> list[str]:
    """The arguments and results in host memory, by path."""
    (args, kwargs), results = _trees_of(traced, plan)
    return [
        f"{what} {path}"
        for what, tree in [
            ("argument", args),
            ("argument", kwargs),
            ("result", results),
        ]
        for path, kind in trees.leaves_with_paths(tree)
        if kind != "device"
    ]


def warn_of_types(call: Any, planned: Collection[str]) -> None:
    """Warns of arguments in host memory that JAX types as on the device (F28).

    Args:
      call: The arguments.
      planned: The paths of state, which is taken from where it is, whatever its type.
    """
    found = [
        path
        for path, x in trees.leaves_with_paths(call)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if x.sharding.memory_kind == "pinned_host" and not memory.on_host(x)
        # Of random keys JAX's own warning tells.
        if memory.movable_nbytes(x) is not None and not path.endswith(tuple(planned))
    ]
    if found:
        warn(
            f"arguments {trees.listed(found)} are in host memory, and JAX types them "
            "as on the device, as it does arrays with a SingleDeviceSharding that "
            "jit(..., out_shardings=...) or make_array_from_callback made. The step "
            "loads them whole, and returns on the device what replaces them. "
            "oo.place(tree, tree) types them as they are"
        )


def types_at_rest(types: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The types of a call's arguments, where they rest.

    Args:
      types: Their types on the device.
      leaves: The leaves that are arrays; others are numbers.
    """
    found = list(types)
    position = 0
    for x in leaves:
        aval = jax.typeof(x)
        while found[position].shape != aval.shape:
            position += 1
        if rests(x):
            found[position] = memory.host_type(found[position])
        position += 1
    return found
