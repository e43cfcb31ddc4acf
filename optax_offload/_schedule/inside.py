"""Loops and branches whose body is planned as a step of its own.

The user's loop over steps, as `lax.scan`, `lax.fori_loop` or `lax.while_loop`, and a
`lax.cond` that skips a step; and a scan over microbatches, whose turn adds its
gradients, or their rows, to sums. What a turn carries are its arguments, at rest where
they are carried so, and what it hands on are its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from jax.extend import core as jex

from optax_offload._program import (
    AtRest,
    Body,
    Step,
    entered,
    in_equations,
    is_microbatch,
)
from optax_offload._program import scans as has_scans
from optax_offload._schedule.follow import Unfused, holds_update
from optax_offload._schedule.unfused import gradients

# Whose body is evaluated with values as they are, once in each turn.
_NAMES = {
    "scan": "scan of {length} iterations",
    "while": "while loop",
    "cond": "cond, branch {n} of {count}",
}


class StepPlan(Protocol):
    """The plan of a step, as far as it counts here."""

    @property
    def step(self) -> Step:
        """The step."""
        ...

    @property
    def unfused(self) -> Sequence[Unfused]:
        """The gradients that are not fused."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether anything in it is carried out otherwise than it is written."""
        ...

    @property
    def chain(self) -> object:
        """Its turns, if layers in it are run by no scan; else None."""
        ...

    @property
    def is_fused_backward(self) -> bool:
        """Whether gradients of a backward pass in it never exist."""
        ...


T = TypeVar("T", bound=StepPlan)


@dataclasses.dataclass(frozen=True)
class Inside(Generic[T]):
    """The bodies of an equation, planned as steps of their own.

    Attributes:
      equation: The equation.
      plans: The plan of each body.
    """

    equation: jex.JaxprEqn
    plans: tuple[T, ...]

    @property
    def turns(self) -> int:
        """How often each of them is evaluated, as far as that is known."""
        return self.equation.params.get("length", 1)

    @property
    def holds_update(self) -> bool:
        """Whether an offloaded update is in them."""
        return holds_update(self.equation)

    @property
    def is_streamed(self) -> bool:
        """Whether any of them is carried out otherwise than it is written."""
        return any(x.is_streamed for x in self.plans)

    def lines(self) -> Iterator[str]:
        """Lines on its bodies."""
        name, params = self.equation.primitive.name, self.equation.params
        adds = "each adds its gradients to their sums"
        how = "each a step of its own" if self.holds_update else adds
        for n, plan in enumerate(self.plans):
            if not _is_told(plan):
                continue
            yield f"{_NAMES[name].format(n=n, count=len(self.plans), **params)}, {how}:"
            yield from (f"  {line}" for line in str(plan).splitlines())


def inside(step: Step, plan: Callable[[Step], T]) -> Mapping[int, Inside[T]]:
    """The equations with updates whose bodies are steps of their own, by position.

    Those only of which something is fused or streamed, or might have been.

    Args:
      step: The step that they are equations of.
      plan: Plans a step.
    """
    found: dict[int, Inside[T]] = {}
    for i in sorted(step.live):
        e = step.program.equations[i]
        if e.primitive.name in _NAMES and holds_update(e):
            planned = _inside(step, e, plan)
            if any(map(_is_told, planned.plans)):
                found[i] = planned
    return found


def microbatches(
    step: Step, scans: Iterable[int], plan: Callable[[Step], T]
) -> Mapping[int, Inside[T]]:
    """The scans whose turns add their gradients, or rows of these, to sums.

    By position; those whose layers are scanned, or cut into turns.

    Args:
      step: The step that they are equations of.
      scans: The scans that are searched, as positions.
      plan: Plans a step.
    """
    found: dict[int, Inside[T]] = {}
    for i in scans:
        e = step.program.equations[i]
        of_layers = any(map(is_microbatch, entered(e)))
        if (has_scans(e) or of_layers) and not holds_update(e):
            planned = _inside(step, e, plan)
            if any(x.is_fused_backward or x.chain for x in planned.plans):
                found[i] = planned
    return found


def _inside(step: Step, e: jex.JaxprEqn, plan: Callable[[Step], T]) -> Inside[T]:
    return Inside(e, tuple(plan(_step(x, step.at_rest)) for x in entered(e)))


def _is_told(plan: StepPlan) -> bool:
    """Returns whether there is more to say of a body than that an update is in it."""
    return plan.is_streamed or bool(gradients(plan.step, plan.unfused))


def _step(body: Body, around: AtRest | None) -> Step:
    """The body of an equation as a step.

    What is at rest in it is said of the step around it, once.
    """
    at_rest = None
    if around is not None:
        positions = around.positions if _moves(body.jaxpr) else "none"
        at_rest = dataclasses.replace(
            around, arguments=(), residual_bytes=0, made_bytes=0, positions=positions
        )
    return in_equations(body.closed, (), at_rest)


def _moves(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether scans in it move rows of what rests on the host."""
    bodies = [body for e in jaxpr.eqns for body in entered(e)]
    return any(x.loads or x.stores or _moves(x.jaxpr) for x in bodies)
