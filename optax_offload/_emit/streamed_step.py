"""A streamed step as one equation, whose body is the step as it was.

The order of work is written down when the equation is lowered, since only then the
platform and the program's facts about its arguments are known. JAX transforms the body,
for a population's step or for tangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import mlir

from optax_offload._emit import step as emit
from optax_offload._emit.moves import as_typed, with_transfer
from optax_offload._ground import compat
from optax_offload._ground.errors import (
    UNPINNED,
    Evidence,
    MemoryKindError,
    causes,
    warn,
)
from optax_offload._places import memory
from optax_offload._program import (
    Argument,
    Atom,
    Sharded,
    Step,
    arguments,
    bound,
    check_pairs,
    entered,
    lower,
    primitive,
    shardings,
    variables,
    with_bodies,
)
from optax_offload._schedule import FusedStep, Inside, for_tpu


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A step that is called.

    Attributes:
      plan: The plan of the step. It closes over no traced value.
      operands: The value that stands for each operand of the equation in the step.
      known: The operands that are no arguments and whose values are known.
      sharded: The shardings of arguments that their types do not say, of a step that is
        a body in another one; else None.
    """

    plan: FusedStep
    operands: tuple[jex.Var, ...]
    known: Mapping[jex.Var, Any]
    sharded: Mapping[jex.Var, Sharded] | None

    def __repr__(self) -> str:
        return f"<{len(self.plan.scans)} scans>"


def streamed(plan: FusedStep, args: Sequence[Any]) -> list[Any]:
    """The results of a step, given its arguments.

    Refs are read before it, and written after it.

    Args:
      plan: The plan of the step.
      args: The values of its arguments.
    """
    for message in _over_window(plan):
        warn(message)
    step, program = plan.step, plan.step.program
    args = [*args, *step.refs]
    results = _called(plan, [x[...] if isinstance(x, jax.Ref) else x for x in args])
    refs = [
        (v, x)
        for v, x in zip(program.invars, args, strict=True)
        if isinstance(x, jax.Ref)
    ]
    first = len(results) - len(refs)
    after = zip(refs, program.outvars[first:], results[first:], strict=True)
    for (before, ref), a, value in after:
        if a is not before:
            ref[...] = value
    return results[:first]


def _called(
    plan: FusedStep,
    values: Sequence[Any],
    sharded: Mapping[jex.Var, Sharded] | None = None,
) -> list[Any]:
    """The results of a step of values, as one equation."""
    step = plan.step
    program = step.program
    constants = program.constants
    own = dict.fromkeys(step.jaxpr.constvars)
    traced = [v for v, x in constants.items() if isinstance(x, jax.core.Tracer)]
    given = {v: constants[v] for v in (*own, *traced)}
    if given:
        rest = {v: x for v, x in constants.items() if v not in given}
        program = dataclasses.replace(program, constants=rest)
        step = dataclasses.replace(step, program=program)
        plan = dataclasses.replace(plan, step=step)
    known = {v: x for v, x in given.items() if v not in traced}
    what = _Call(plan, (*program.invars, *given), known, sharded)
    jaxpr, operands = step.jaxpr, (*values, *given.values())
    if not (plan.is_streamed or step.moves_rows):
        return jax.core.eval_jaxpr(jaxpr, [*given.values()], *values)
    if plan.stores:
        jaxpr = with_transfer(jaxpr)
    jaxpr = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.invars, *jaxpr.constvars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return _step.bind(*operands, jaxpr=jex.ClosedJaxpr(jaxpr, []), what=what)


def _with_steps_inside(
    plan: FusedStep, sharded: Mapping[jex.Var, Sharded]
) -> FusedStep:
    """The plan of a step, in whose bodies that are steps of their own these are."""
    if not plan.inside:
        return plan
    program = plan.step.program
    equations = list(program.equations)
    for i, each in plan.inside.items():
        equations[i] = _with_steps(equations[i], each, sharded)
    program = dataclasses.replace(program, equations=equations)
    step = dataclasses.replace(plan.step, program=program)
    return dataclasses.replace(plan, step=step)


def _with_steps(
    e: jex.JaxprEqn, each: Inside, sharded: Mapping[jex.Var, Sharded]
) -> jex.JaxprEqn:
    bodies = zip(entered(e), each.plans, strict=True)

    def rewritten(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        body, plan = next(bodies)
        if not plan.is_streamed:
            return closed
        rows = len(body.xs)
        taken = list(zip(body.jaxpr.invars, body.operands, strict=True))
        same = taken[: len(taken) - rows]
        like = {
            v: sharded[a]
            for v, i in same
            for a in variables([e.invars[i]])
            if a in sharded
        }
        found = jax.make_jaxpr(lambda *values: _called(plan, values, like))
        return found(*closed.in_avals)

    return with_bodies(e, rewritten)


def _over_window(plan: FusedStep) -> Iterator[str]:
    """Yields warnings; updates that wait on the host give their own."""
    for each in (scan for step in plan.steps for scan in step.scans):
        stored = [f for f in each.late if f.component.late_sums]
        some = [*each.now, *stored] if each.way == "host" else each.fused
        for over in each.over_window(some):
            yield f"fused into the backward pass over the window: {over}"


def _check(step: Step, found: Mapping[Atom, Argument]) -> None:
    """Raises or warns of arguments that are not where they should be."""
    of_updates: set[Atom] = set()
    for inlined in step.inlined_updates:
        given = list(enumerate(inlined.operands))
        # A literal, which is on the device, has no hash.
        given = [(i, a) for i, a in given if isinstance(a, jex.Var)]
        known = {i: found[a] for i, a in given if a in found}
        inlined.what.caller.check(
            known, {i for i, a in given if memory.on_host(a.aval)}
        )
        of_updates.update(a for _, a in given)
    for i, v in enumerate(step.program.invars):
        if v in found and found[v].memory_kind == "unpinned_host":
            aval: Any = v.aval
            raise MemoryKindError(
                f"argument {i} of the step, {aval.str_short()}, is in unpinned_host. "
                f"{UNPINNED}"
            )
        here = v in found and not found[v].on_host
        if here and v not in of_updates and memory.on_host(v.aval):
            aval = v.aval
            raise MemoryKindError(
                f"argument {i} of the step, {aval.str_short()}, should come from host "
                f"memory and is on the device. {causes(Evidence(made='traced'))}"
            )


def _check_positions(ctx: mlir.LoweringRuleContext) -> None:
    """Refuses what a compiler would get wrong (U10)."""
    on_gpu = {"cuda", "rocm", "gpu"}.intersection(ctx.module_context.platforms)
    if on_gpu and not compat.COPIES_AT_POSITIONS:
        raise NotImplementedError(
            "a step takes rows of what rests on the host (parameters, or residuals), "
            f"and with JAX {jax.__version__} a GPU's compiler copies other rows. Use "
            "JAX 0.11.1 or newer, which needs Python 3.12; or leave parameters and "
            "residuals on the device"
        )


def _lower(ctx: mlir.LoweringRuleContext, *given: Any, what: _Call, **_: Any) -> Any:
    plan, operands = what.plan, what.operands
    found = arguments(ctx, given)
    _check(plan.step, {operands[i]: argument for i, argument in found.items()})
    check_pairs(ctx)
    if plan.step.at_rest is not None and plan.step.at_rest.positions == "others":
        _check_positions(ctx)
    here = shardings(found, ctx.avals_in)
    sharded = {**(what.sharded or {}), **{operands[i]: s for i, s in here.items()}}
    # A TPU's compiler spreads transfers over an iteration by itself: there no row is
    # stored late, so that none is on the device longer.
    on_tpu = tuple(ctx.module_context.platforms) == ("tpu",)
    if on_tpu:
        plan = for_tpu(plan, operands, what.known)
    plan = _with_steps_inside(plan, sharded)

    def fn(*given: Any) -> list[Any]:
        values = {v: as_typed(x, v.aval) for v, x in bound(operands, given).items()}
        return emit.results(plan, values, sharded, on_tpu=on_tpu)

    return lower(ctx, fn, found, given)


_step = primitive("streamed_step")
# Not as a function of its own, in which nothing would be an argument of the program.
mlir.register_lowering(_step, _lower, cacheable=False)
