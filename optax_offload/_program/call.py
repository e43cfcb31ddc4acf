"""An offloaded update as one equation of a step: a call whose body says what it means.

The body loads, computes what the optimizer does, and stores. In what order, and how
much at a time, is decided when the equation is lowered: only then it is known where
arguments are and how they are sharded. Until then whoever reads the jaxpr of a step
finds its updates there.

JAX's transformations treat the update as a whole. Taken apart, as JAX would, it would
have slices of host buffers at positions that differ by member of a population, and
tangents that are written into buffers that are none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._program.build import Builder
from optax_offload._program.equations import batched_as, jvp_as, plain, primitive
from optax_offload._program.graph import Atom, bound, evaluate, read
from optax_offload._program.keys import Places, key_data
from optax_offload._program.lowered import Argument
from optax_offload._program.update import Input, Update

Function: TypeAlias = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Caller:
    """The caller of an update.

    Attributes:
      window_bytes: The window that was asked for.
      check: Told what the program says of the arguments, by position, when the call is
        lowered, and which of them have types of host memory: raises or warns of what is
        not as it should be.
      again: Calls another function in the same way, given its arguments: the update of
        a whole population. None where JAX may transform the equations as they are.
      planned: Paths of the state that rules put in host memory, by position.
    """

    window_bytes: int | None
    check: Callable[[Mapping[int, Argument], Collection[int]], None]
    again: Callable[[Function, tuple[Any, ...]], tuple[Any, Any]] | None
    planned: Mapping[int, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """An update that is called.

    Attributes:
      update: The update, which closes over no traced value.
      caller: The caller.
      arguments: The structure of its arguments.
      results: The structure of its results.
      given: The arguments that are random keys, of which the equation has the data.
      made: The results that are random keys.
    """

    update: Update
    caller: Caller
    arguments: Any
    results: Any
    given: Places
    made: Places

    def __repr__(self) -> str:
        return f"<{len(self.update.outputs)} outputs>"

    def plain(self, args: Sequence[Any]) -> list[Any]:
        """The values of the outputs, given those of the inputs, all on the device."""
        program = self.update.program
        env = bound(program.invars, args) | program.constants
        env |= evaluate(program, range(len(program.equations)), env.__getitem__)
        return [read(a, env.__getitem__) for a in program.outvars]


def call_update(
    update: Update, args: tuple[Any, ...], results: Any, caller: Caller
) -> tuple[Any, Any]:
    """Updates and new state, each leaf in its memory kind, as one equation.

    Args:
      update: The update.
      args: Its arguments: a tuple of pytrees.
      results: The structure of its results.
      caller: The caller.
    """
    update, traced = _closed(update)
    leaves, structure = jax.tree.flatten((*args, traced))
    given = Places.of(leaves)
    made = Places.of_types(update.program.outvars)
    what = Call(update, caller, structure, results, given, made)
    values = _bind(what, key_data(leaves))
    return jax.tree.unflatten(results, made.keys(values))


def called_where_it_rests(what: Call, data: Sequence[Any]) -> list[Any]:
    """The results of a call that was traced as if all were on the device.

    Args:
      what: The call.
      data: Its arguments, where they rest.
    """
    typed = {i for i, x in enumerate(data) if memory.on_host(x)}
    planned = set(what.update.loads)
    if not compat.tracing_for_jit_alone():
        # In a loop or in a branch nothing but the type says where it is.
        what.caller.check({}, typed)
        planned &= typed
    update = what.update.with_inputs_on_host(typed | planned)
    return _bind(dataclasses.replace(what, update=update), data)


def _bind(what: Call, data: Sequence[Any]) -> list[Any]:
    """The results of a call, whose body says what it means."""
    return offloaded_update.bind(*data, jaxpr=_meaning(what, data), what=what)


def _meaning(what: Call, data: Sequence[Any]) -> jex.ClosedJaxpr:
    """The plain equations of a call, by which JAX learns whether anything is moved.

    They are the update's own, between what loads and what stores: traced once more,
    they would take as long as the update did, and be kept beside it.

    Args:
      what: The call.
      data: Its arguments, or their types.
    """
    program = what.update.program
    on_device = memory.as_on_device.value
    kinds = ["device" if on_device else o.memory_kind for o in what.update.outputs]
    builder = Builder(program.constants)
    types = map(memory.type_of, data)
    invars = [
        v if v.aval == aval else jex.Var(aval)
        for v, aval in zip(program.invars, types, strict=True)
    ]
    given: Sequence[Atom] = invars
    if what.given.impls:
        given = builder.trace(lambda *x: what.given.keys(list(x)), *given)
    builder.rename(program.invars, [builder.move(a, "device") for a in given])
    for e in program.equations:
        builder.add(e)
    moved = zip(builder.read_all(program.outvars), kinds, strict=True)
    outvars = [builder.move(a, kind) for a, kind in moved]
    if any(memory.movable_nbytes(a.aval) is None for a in outvars):
        outvars = builder.trace(lambda *x: key_data(x), *outvars)
    jaxpr = jex.Jaxpr(
        constvars=list(builder.constants),
        invars=invars,
        outvars=outvars,
        eqns=builder.equations,
        effects=frozenset(x for e in builder.equations for x in e.effects),
        debug_info=program.debug_info,
    )
    return jex.ClosedJaxpr(jaxpr, list(builder.constants.values()))


def equation_of(
    what: Call, like: jex.JaxprEqn, operands: list[Atom], results: list[jex.Var]
) -> jex.JaxprEqn:
    """The equation of a call, in a step that was traced as if all were on the device.

    Args:
      what: The call.
      like: An equation in whose place it is.
      operands: The operands.
      results: The results.
    """
    with memory.as_on_device(True):
        body = _meaning(what, [a.aval for a in operands])
    return like.replace(
        invars=operands,
        outvars=results,
        primitive=offloaded_update,
        params={"jaxpr": body, "what": what},
        effects=body.jaxpr.effects,
    )


def called(e: jex.JaxprEqn) -> Call | None:
    """Returns the call of an equation, if it is an update."""
    return e.params["what"] if e.primitive is offloaded_update else None


def _closed(update: Update) -> tuple[Update, list[Any]]:
    """An update that closes over no traced value, and those that it did."""
    constants = update.program.constants
    traced = {v: x for v, x in constants.items() if isinstance(x, jax.core.Tracer)}
    program = dataclasses.replace(
        update.program,
        invars=[*update.program.invars, *traced],
        constants={v: x for v, x in constants.items() if v not in traced},
    )
    inputs = (*update.inputs, *(Input(memory.on_host(x)) for x in traced.values()))
    update = dataclasses.replace(update, program=program, inputs=inputs)
    return update, [*traced.values()]


def _batched(data: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """The update of a population is one whose batch axis leads in every leaf.

    Its rules apply to such leaves.
    """
    what: Call = params["what"]
    if what.caller.again is None:
        return batched_as(plain, data, dims, **params)
    size = next(x.shape[d] for x, d in zip(data, dims, strict=True) if d is not None)
    data = [
        x if d in (None, 0) else jnp.moveaxis(x, d, 0)
        for x, d in zip(data, dims, strict=True)
    ]
    args = jax.tree.unflatten(what.arguments, what.given.keys(data))

    def member(*args: Any) -> Any:
        return jax.tree.unflatten(what.results, what.plain(jax.tree.leaves(args)))

    axes = [None if d is None else 0 for d in dims]
    in_axes = tuple(jax.tree.unflatten(what.arguments, axes))
    population = jax.vmap(member, in_axes=in_axes, axis_size=size)
    values = key_data(jax.tree.leaves(what.caller.again(population, args)))
    return values, [0] * len(values)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Streamed, with tangents beside it, on the device as a whole."""
    what: Call = params["what"]
    if what.caller.again is None:
        return jvp_as(plain, primals, tangents, **params)
    values = offloaded_update.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    on_device = [memory.transfer(x, "device") for x in primals]

    def of(*some: Any) -> list[Any]:
        given = bound(moving, some)
        data = [given.get(i, x) for i, x in enumerate(on_device)]
        return key_data(what.plain(what.given.keys(data)))

    _, out = jax.jvp(
        of,
        [on_device[i] for i in moving],
        [memory.transfer(tangents[i], "device") for i in moving],
    )
    return values, [_beside(t, x) for t, x in zip(out, values, strict=True)]


def _beside(tangent: Any, primal: Any) -> Any:
    """A tangent in the memory of what it is of, in a way that forbids transposition."""
    aval: Any = jax.typeof(primal)
    if tangent.dtype == jax.dtypes.float0:
        return ad.Zero(aval.to_tangent_aval())

    def refuse(residuals: Any, cotangent: Any) -> Any:
        raise TypeError(
            "an offloaded update is differentiated in reverse mode (jax.grad, "
            "jax.vjp), for which all of its state would have to stay on the device. "
            "Differentiate through the inner optimizer, before it is given to "
            "offload(...), or in forward mode (jax.jvp, jax.jacfwd)"
        )

    forward = jax.custom_derivatives.linear_call(lambda _, t: t, refuse, (), tangent)
    return memory.transfer(forward, memory.kind_of_type(aval))


offloaded_update = primitive("offloaded_update")
batching.primitive_batchers[offloaded_update] = _batched
ad.primitive_jvps[offloaded_update] = _jvp
