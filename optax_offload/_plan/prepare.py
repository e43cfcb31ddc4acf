"""A step as one variant has it: made, traced and compiled."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax

from optax_offload import _flops, _memory, _offload, _trees, aot
from optax_offload._jit import before_jit, jit
from optax_offload._plan.state import MovableState
from optax_offload._plan.step import Step, StepFactory
from optax_offload._plan.variants import Facts, Variant
from optax_offload._schedule import FusedStep


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step as one variant has it, to be traced or compiled.

    Attributes:
      step: The step, whose arguments rest where the variant says.
      jit: The function that jits it; None for a step that is jitted.
    """

    step: Step
    jit: Callable[..., Any] | None


def prepared(factory: StepFactory, state: MovableState, variant: Variant) -> Prepared:
    """Makes the step of a variant.

    Args:
      factory: Makes the step.
      state: The state that can be selected, with moments as the variant keeps them.
      variant: The variant.
    """
    if state.changes_any(variant.state) or variant.window_bytes:
        config = dataclasses.replace(
            state.config(variant.state),
            **({"window_bytes": variant.window_bytes} if variant.window_bytes else {}),
        )
        step = factory.step(lambda inner: _offload.offload(inner, config))
    else:
        step = factory.plain_step()
    step = unjitted(step)
    if hasattr(step.fn, "trace"):
        return Prepared(step, None)
    paths = [x.argument for x in state.resting(variant.parameters)]
    if paths:
        pattern = "|".join(map(re.escape, paths))
        args = _memory.set_memory_kind(step.args, pattern, "pinned_host")
        step = step._replace(args=args)
    elif variant.is_plain and not state.changes_any(variant.state):
        return Prepared(step, jax.jit)
    return Prepared(step, functools.partial(jit, **variant.options))


def unjitted(step: Step) -> Step:
    """A step of `jit` as if it were not jitted; any other as it is."""
    found = before_jit(step.fn)
    if found is None:
        return step
    fn, options = found
    known = {"donate_argnums", "out_shardings"}
    if not options.keys() <= known:
        return step
    return step._replace(fn=fn, **options)


def measured(
    made: Prepared,
    target: aot.Target,
    link_bytes_per_second: float | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> aot.Measured:
    """Compiles a step, and reads its peak and its modelled time."""
    step = made.step
    return aot.measure(
        step.fn,
        *step.args,
        target=target,
        donate_argnums=step.donate_argnums,
        out_shardings=step.out_shardings,
        jit=made.jit or jax.jit,
        link_bytes_per_second=link_bytes_per_second,
        folder=folder,
    )


def facts(factory: StepFactory, state: MovableState, variant: Variant) -> Facts:
    """Traces a step with all values moved that can move, and returns facts about it.

    Args:
      factory: Makes the step.
      state: The state that can be selected.
      variant: The one that moves most.
    """
    made = prepared(factory, state, variant)
    with jax.sharding.use_abstract_mesh(aot.mesh_of(made.step.args, factory.target)):
        if made.jit is None:
            its_own = getattr(made.step.fn, "schedule", None)
            return _of_jitted(made.step, its_own)
        jitted = jit(
            made.step.fn,
            donate_argnums=made.step.donate_argnums or (),
            **variant.options,
        )
        found = jitted.schedule(*made.step.args)
    late = [f for each in found.scans for f in each.late]
    rest = found.step.at_rest
    leaves = [path for path, _ in _trees.leaves_with_paths(made.step.args)]
    by_rows = {leaves[x.position] for x in rest.arguments if x.scans} if rest else set()
    at_once, joined = _at_once(found)
    return Facts(
        gradient_bytes=found.gradient_bytes,
        late_bytes=sum(f.gradient_bytes for f in late),
        flops=_flops.of_jaxpr(found.step.jaxpr) / factory.target.device_count,
        flops_again=found.flops_again,
        residual_bytes=rest.residual_bytes if rest else 0,
        row_arguments=frozenset(by_rows),
        outside=found.reasons(),
        state_at_once_bytes=at_once,
        joined_by=joined,
        on_gpus=factory.target.platform == "gpu" and factory.target.device_count > 1,
    )


def _of_jitted(step: Step, schedule: Callable[..., FusedStep] | None) -> Facts:
    """Facts about a step that is compiled as it is, such as the state it joins."""
    if schedule is None:
        why = (
            "jax.jit jitted this step, so it is compiled as it is and only its state "
            "is moved. Give oo.Step the function itself, or jit it with oo.jit"
        )
        schedule = jit(step.fn, fuse=False).schedule
    else:
        why = (
            "the step was jitted with options that a plan does not know, so only its "
            "state is moved. Give oo.Step the function itself"
        )
    at_once, joined = _at_once(schedule(*step.args))
    return Facts(
        outside=(why,),
        state_at_once_bytes=at_once,
        joined_by=joined,
        can_stream=False,
    )


def _at_once(found: FusedStep) -> tuple[int, str]:
    """The most state that something joins, in bytes, and what that is."""
    over = [
        o
        for each in found.schedules()
        for straight in each.straights()
        for o in straight.over_window(None)
    ]
    if not over:
        return 0, ""
    most = max(over, key=lambda o: o.nbytes)
    joined = most.reason.partition(" takes the state")[0]
    # Without the files and lines, which a warning has.
    return most.nbytes, re.sub(r" \([^()]*\)", "", joined)
