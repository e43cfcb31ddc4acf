"""A step as one variant has it: made, traced, compiled, and what is known then."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from optax_offload import aot
from optax_offload._ground import trees
from optax_offload._ground.errors import OffloadWarning
from optax_offload._ground.units import milliseconds, seconds_text, size_text
from optax_offload._plan.budget import PlanRequest
from optax_offload._plan.frozen import placed_in
from optax_offload._plan.state import MovableState
from optax_offload._plan.step import Step, StepFactory, unjitted
from optax_offload._plan.variants import (
    WITHOUT_OPTIONS,
    Planned,
    Sizes,
    StepFacts,
    Variant,
)
from optax_offload._program import flops_of_jaxpr
from optax_offload._schedule import FusedStep
from optax_offload._step import jit, offload

# The name of the part of a peak that is state in host memory, all of it loaded.
STATE_AT_ONCE = "state loaded at once"
# And of what no other name is known for.
THE_REST = "other temporaries"
# What a way raises that the step, or the library, does not allow.
FAILURES = (ValueError, TypeError, NotImplementedError, RuntimeError)
# And what is neither parameters nor state, with what is not known to be.
OTHERS = "other arguments and results"


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A step that was compiled in one of the ways in which it can be trained.

    Attributes:
      variant: The way.
      what: A description in a few words.
      moved_bytes: The bytes of each device's state that are in host memory.
      used_bytes: The peak on each device; where the compiler refused, what it says.
      peak: The peak in parts; None where the compiler refused.
      fits: Whether the peak and the host memory are within their budgets.
      seconds: The wall time of tracing and compiling, in seconds.
      parts: The bytes that the peak is made of, by name: see `Plan`.
      parameter_bytes: The bytes of each device's parameters that are in host memory.
      host_bytes: The host memory that a step needs for each device.
      time: The modeled time of a step; None where the compiler refused.
      outside: The reasons why gradients are left outside of the backward pass; nothing
        where fusing was not tried.
      was_kept: Whether it was compiled before, and read from disk.
      program: A digest of the program; "" where it is not known.
      same_as: The way that was compiled before and makes the same program; "" for none.
    """

    variant: Variant
    moved_bytes: int
    used_bytes: int
    peak: aot.Peak | None
    fits: bool
    seconds: float
    parts: Mapping[str, int]
    what: str = ""
    parameter_bytes: int = 0
    host_bytes: int = 0
    time: aot.StepTime | None = None
    outside: tuple[str, ...] = ()
    was_kept: bool = False
    program: str = ""
    same_as: str = ""

    @property
    def fused(self) -> bool:
        """True if updates are in the backward pass."""
        return self.variant.options.fuse

    @property
    def step_seconds(self) -> float:
        """The modeled time of a step; endless where the compiler refused."""
        return float("inf") if self.time is None else self.time.seconds

    def as_dict(self) -> dict[str, Any]:
        """The candidate as plain values, ready for `json.dumps`."""
        return {
            "what": self.what,
            "moved_bytes": self.moved_bytes,
            "parameter_bytes": self.parameter_bytes,
            "used_bytes": self.used_bytes,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "seconds": round(self.seconds, 3),
            "time": None if self.time is None else dataclasses.asdict(self.time),
            "parts": dict(self.parts),
            "fused": self.fused,
            "outside": list(self.outside),
        }

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        step = ""
        if self.time is not None:
            step = f", modeled step {milliseconds(self.time.seconds)}"
        how = "cached" if self.was_kept else f"took {seconds_text(self.seconds)}"
        if self.same_as:
            return f"{self.what}: the same program as {self.same_as}"
        return (
            f"{self.what}: peak {size_text(self.used_bytes)}, "
            f"{size_text(self.host_bytes)} on the host{step}, {fits} ({how})"
        )


Progress = Callable[[str | CompiledCandidate], None]


def compiled(
    factory: StepFactory,
    state: MovableState,
    variant: Variant,
    facts: StepFacts,
    asked: PlanRequest,
) -> CompiledCandidate:
    """Compiles a step, unless another way made the same program.

    Args:
      factory: Makes the step.
      state: The state that can be selected, with moments as the variant keeps them.
      variant: The variant.
      facts: What is known of the step, for the parts of its peak.
      asked: The request to `plan`, and the programs that were compiled for it.
    """
    started = time.perf_counter()
    with warnings.catch_warnings():  # A table says what each way takes.
        warnings.simplefilter("ignore", OffloadWarning)
        step, jitted = prepared(factory, state, variant)
        found = aot.measure(
            step.fn,
            *step.args,
            target=factory.target,
            donate_argnums=step.donate_argnums,
            out_shardings=step.out_shardings,
            jit=jitted or jax.jit,
            link_bytes_per_second=asked.link_bytes_per_second,
            folder=asked.folder,
            known=asked.programs,
        )
    on_host = variant.host_bytes(facts)
    if found.peak is not None:
        on_host = found.peak.host_peak_bytes
    return CompiledCandidate(
        variant=variant,
        what=variant.text(facts.sizes),
        moved_bytes=facts.sizes.moved_state(variant),
        parameter_bytes=facts.sizes.parameters[variant.parameters]
        + facts.sizes.moved_frozen(variant),
        used_bytes=found.used_bytes,
        host_bytes=on_host,
        peak=found.peak,
        time=found.time,
        fits=asked.budget.holds(found.used_bytes, on_host),
        seconds=time.perf_counter() - started,
        parts=parts_of(variant, facts, found.peak, found.used_bytes),
        outside=facts.outside if variant.options.fuse else (),
        was_kept=found.was_kept,
        program=found.program,
    )


def parts_of(
    variant: Variant, facts: StepFacts, peak: aot.Peak | None, used_bytes: int
) -> dict[str, int]:
    """The bytes on each device by what they hold, such as parameters; see `Plan`."""
    sizes, at_once = facts.sizes, facts.state_at_once_bytes
    parameters = sizes.all_parameters - sizes.parameters[variant.parameters]
    parameters += sizes.device_frozen(variant)
    state = sizes.device_state(variant)
    beside = max(used_bytes - parameters - state, 0)
    # A compiler that refuses does not say how much of it is temporary: all counts.
    temporary = beside if peak is None else min(peak.temporary_bytes, beside)
    left, found = temporary, {}
    unfused = sizes.all_parameters - facts.gradient_bytes
    joined = f" (by {facts.joined_by})" if facts.joined_by else ""
    for name, nbytes in (
        ("gradients", unfused + variant.late_bytes_left(facts)),
        ("residuals", facts.residual_bytes - variant.residual_bytes(facts)),
        (STATE_AT_ONCE + joined, at_once * (sizes.moved_state(variant) > 0)),
    ):
        size = min(max(nbytes, 0), left)
        if size or name == "gradients":
            found[name] = size
        left -= size
    return {
        "parameters": parameters,
        "state": state,
        **found,
        THE_REST: left,
        OTHERS: beside - temporary,
    }


def prepared(
    factory: StepFactory, state: MovableState, variant: Variant
) -> tuple[Step, Callable[..., Any] | None]:
    """Makes the step of a variant, whose arguments rest where it says.

    Args:
      factory: Makes the step.
      state: The state that can be selected, with moments as the variant keeps them.
      variant: The variant.

    Returns:
      The step, and the function that jits it; None for a step that is jitted.
    """
    if state.changes_any(variant.state) or variant.window_bytes:
        config = variant.config(state)
        step = factory.step(lambda inner: offload(inner, config))
    else:
        step = factory.plain_step()
    step = unjitted(step)
    if hasattr(step.fn, "trace"):
        return step, None
    placed = state.placed(variant.parameters, variant.frozen)
    if placed:
        moved = state.resting(variant.parameters, variant.frozen)
        args = placed_in(step.args, placed, [x.argument for x in moved])
        step = step._replace(args=args)
    elif variant.is_plain and not state.changes_any(variant.state):
        return step, jax.jit
    return step, functools.partial(jit, **variant.options)


def traced(factory: StepFactory, state: MovableState, variant: Variant) -> StepFacts:
    """Traces a step with all values moved that can move, and returns facts about it.

    Args:
      factory: Makes the step.
      state: The state that can be selected.
      variant: The one that moves most.
    """
    step, jitted = prepared(factory, state, variant)
    with _quietly(step, factory):
        if jitted is None:
            return _of_jitted(step, state)
        donated = step.donate_argnums or ()
        streamed = jit(step.fn, donate_argnums=donated, **variant.options)
        found = streamed.schedule(*step.args)
    late = [f for step in found.steps for each in step.scans for f in each.late]
    leaves = [path for path, _ in trees.leaves_with_paths(step.args)]
    at_once, joined = _at_once(found)
    return StepFacts(
        sizes=Sizes.of({(): state}),
        gradient_bytes=found.gradient_bytes,
        late_bytes=sum(f.gradient_bytes for f in late),
        flops=flops_of_jaxpr(found.step.jaxpr) / factory.target.device_count,
        flops_again=found.flops_again,
        residual_bytes=found.residual_bytes,
        row_arguments=frozenset(
            path
            for i in found.in_turns
            for path in (leaves[i], trees.encoded_leaf(leaves[i]) or "")
        ),
        outside=found.reasons(),
        state_at_once_bytes=at_once,
        joined_by=joined,
        on_gpus=factory.target.platform == "gpu" and factory.target.device_count > 1,
        cut=found.chain is not None,
        overlaps=factory.target.chip.overlaps,
    )


def planned(
    factory: StepFactory, state: MovableState, ways: Iterable[Variant]
) -> dict[Variant, Planned]:
    """Plans a step in some ways, and compiles none of them.

    Args:
      factory: Makes the step.
      state: The state that can be selected.
      ways: The ways. Those that differ in their options alone share a trace.

    Returns:
      What becomes of the step in each way, but for those that cannot be planned.
    """
    found: dict[Variant, Planned] = {}
    shared: dict[Variant, list[Variant]] = {}
    for way in ways:
        key = dataclasses.replace(way, options=WITHOUT_OPTIONS)
        shared.setdefault(key, []).append(way)
    for first, *others in shared.values():
        # One that fails is compiled all the same, and says why.
        with contextlib.suppress(*FAILURES):
            step, _ = prepared(factory, state, first)
            for way in (first, *others):
                streamed = jit(
                    step.fn, donate_argnums=step.donate_argnums or (), **way.options
                )
                with _quietly(step, factory):
                    plan = streamed.schedule(*step.args)
                found[way] = Planned(
                    plan.gradient_bytes, plan.residual_bytes, plan.is_streamed
                )
    return found


@contextlib.contextmanager
def _quietly(step: Step, factory: StepFactory) -> Iterator[None]:
    """On the mesh of a target, without warnings of what is planned only."""
    mesh = aot.mesh_of(step.args, factory.target)
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.simplefilter("ignore", OffloadWarning)
        yield


def _of_jitted(step: Step, state: MovableState) -> StepFacts:
    """StepFacts about a step that is compiled as it is, such as the state it joins."""
    schedule = getattr(step.fn, "schedule", None)
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
    return StepFacts(
        sizes=Sizes.of({(): state}),
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
