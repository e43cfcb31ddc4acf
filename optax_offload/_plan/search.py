"""The least that has to move for a step to fit: what is compiled, and which next."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optax_offload import _offload, aot
from optax_offload._plan.state import MovableState, Selection
from optax_offload._plan.step import (
    Fused,
    Step,
    StepFactory,
    compile_step,
    fused,
    state_at_once,
)
from optax_offload._units import size_text

"""Positions in a list of sizes."""

# All sums of so few are listed: some n^3 / 6 of n patterns, which are a few hundred at
# most. Of four there would be too many.
MOST_STAND_INS = 3
# Each attempt is a compilation. The second knows by how much the first was short.
STAND_IN_ATTEMPTS = 2


def smallest_that_fits(
    sizes: Sequence[int], used_bytes: Callable[[Selection], int], budget_bytes: int
) -> Selection | None:
    """The selection that moves least such that what is used fits the budget.

    It is the shortest sequence of the first, second, ... that fits, found by
    interpolation and bisection; then, if some smaller ones can stand in for the last of
    them, those are taken.

    Args:
      sizes: The bytes that each takes from the peak at most, in order of preference.
      used_bytes: Returns the peak with a selection moved, which is expensive. It is
        asked for no selection twice.
      budget_bytes: The bytes that there are.

    Returns:
      Positions in ``sizes``; None if not even all of them suffice.
    """
    known: dict[Selection, int] = {}

    def ask(selection: Selection) -> int:
        if selection not in known:
            known[selection] = used_bytes(selection)
        return known[selection]

    if ask(_first(0)) <= budget_bytes:
        return _first(0)
    if ask(_first(len(sizes))) > budget_bytes:
        return None
    shortest = _shortest_sequence(sizes, ask, budget_bytes)
    return _with_stand_ins(sizes, ask, budget_bytes, shortest) or _first(shortest)


def _first(n: int) -> Selection:
    return frozenset(range(n))


def _shortest_sequence(
    sizes: Sequence[int], ask: Callable[[Selection], int], budget_bytes: int
) -> int:
    """How many of the first fit, where none do not and all do."""
    total = [0, *itertools.accumulate(sizes)]
    low, high = 0, len(sizes)
    attempt = 0
    while high - low > 1:
        attempt += 1
        guess = (low + high) // 2
        # Every third guess bisects: a peak that is no straight line cannot hold it up.
        if attempt % 3:
            # Where the straight line between the two would meet the budget.
            over, under = ask(_first(low)), ask(_first(high))
            share = (over - budget_bytes) / max(over - under, 1)
            wanted = total[low] + share * (total[high] - total[low])
            guess = next(n for n in range(high + 1) if total[n] >= wanted)
        guess = min(max(guess, low + 1), high - 1)
        if ask(_first(guess)) <= budget_bytes:
            high = guess
        else:
            low = guess
    return high


def _with_stand_ins(
    sizes: Sequence[int],
    ask: Callable[[Selection], int],
    budget_bytes: int,
    shortest: int,
) -> Selection | None:
    """All but the last of a sequence, with smaller ones for it; None if none do.

    The last one may be much larger than what is missing without it.
    """
    others = range(shortest, len(sizes))
    short = ask(_first(shortest - 1)) - budget_bytes
    for _ in range(STAND_IN_ATTEMPTS):
        stand_ins = least_sum(sizes, others, short, sizes[shortest - 1])
        if stand_ins is None:
            return None
        selection = _first(shortest - 1) | stand_ins
        over = ask(selection) - budget_bytes
        if over <= 0:
            return selection
        short = sum(sizes[i] for i in stand_ins) + over
    return None


def least_sum(
    sizes: Sequence[int], positions: Sequence[int], least: int, below: int
) -> Selection | None:
    """The few positions whose sizes have the smallest sum that is in a range."""
    selections = (
        frozenset(selection)
        for count in range(1, MOST_STAND_INS + 1)
        for selection in itertools.combinations(positions, count)
    )
    sums = ((sum(sizes[i] for i in selection), selection) for selection in selections)
    enough = (x for x in sums if least <= x[0] < below)
    return min(
        enough, key=lambda x: (x[0], len(x[1]), sorted(x[1])), default=(0, None)
    )[1]


# The name of the part of a peak that is state in host memory, all of it loaded.
STATE_AT_ONCE = "state loaded at once"


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A step that was compiled with some of its state moved.

    Attributes:
      moved_bytes: The bytes of each device's state that are in host memory.
      used_bytes: The peak on each device; where the compiler refused, what it says.
      peak: The peak in parts; None where the compiler refused.
      fits: Whether the peak is within the budget.
      seconds: The wall time of tracing and compiling, in seconds.
      parts: The bytes that the peak is made of, by name: see `Plan`.
      fused: Whether its updates are in the backward pass, by `stream`.
      stored_bytes: The bytes of each device's gradients that wait in host memory.
      flops_again: The operations of backward passes that run a second time.
      outside: Why gradients are left outside of the backward pass; nothing where that
        was not tried.
    """

    moved_bytes: int
    used_bytes: int
    peak: aot.Peak | None
    fits: bool
    seconds: float
    parts: Mapping[str, int]
    fused: bool = False
    stored_bytes: int = 0
    flops_again: float = 0.0
    outside: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The candidate as plain values, ready for `json.dumps`."""
        return {
            "moved_bytes": self.moved_bytes,
            "used_bytes": self.used_bytes,
            "fits": self.fits,
            "seconds": round(self.seconds, 3),
            "parts": dict(self.parts),
            "fused": self.fused,
            "stored_bytes": self.stored_bytes,
            "flops_again": self.flops_again,
            "outside": list(self.outside),
        }

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{_what(self.moved_bytes, self.fused)}: peak "
            f"{size_text(self.used_bytes)}, {fits} ({self.seconds:.0f} s)"
        )


def _what(moved_bytes: int, is_fused: bool) -> str:
    updates = ", updates in the backward pass" if is_fused else ""
    return f"{size_text(moved_bytes)} of state moved{updates}"


Progress = Callable[[str | CompiledCandidate], None]


class CandidateCompiler:
    """Compiles a step with selections of its state moved, and keeps what came of each.

    Attributes:
      compiled: What has been compiled, in that order.
    """

    compiled: list[CompiledCandidate]

    def __init__(
        self,
        factory: StepFactory,
        state: MovableState,
        budget_bytes: int,
        progress: Progress,
    ):
        """Compiles nothing yet.

        Args:
          factory: Makes the step.
          state: What can be selected.
          budget_bytes: What a step may take on each device.
          progress: Is told what is being compiled, and then what came of it.
        """
        self._factory, self._state = factory, state
        self._budget_bytes = budget_bytes
        self._progress = progress
        self.compiled = []
        self._known: dict[tuple[Selection, bool], CompiledCandidate] = {}

    def candidate(self, selection: Selection, fuse: bool = False) -> CompiledCandidate:
        """The step with a selection moved, compiled unless it has been.

        Args:
          selection: What is moved.
          fuse: Whether its updates are in the backward pass. Where none can be there,
            it is the step without.
        """
        key = selection, fuse
        if key not in self._known:
            step = self._step(selection)
            found = fused(step, self._factory.target) if fuse else None
            if fuse and (found is None or found.step is None):
                outside = () if found is None else found.outside
                whole = self.candidate(selection)
                self._known[key] = dataclasses.replace(whole, outside=outside)
            else:
                self._known[key] = self._compile(selection, step, found)
        return self._known[key]

    def fusing_lowers_the_peak(self, selection: Selection) -> bool:
        """Whether the step takes less with its updates in the backward pass."""
        found = self.candidate(selection, fuse=True)
        return found.fused and found.used_bytes < self.candidate(selection).used_bytes

    def _step(self, selection: Selection) -> Step:
        if not self._state.changes_any(selection):
            return self._factory.plain_step()
        config = self._state.config(selection)
        return self._factory.step(lambda inner: _offload.offload(inner, config))

    def _compile(
        self, selection: Selection, step: Step, found: Fused | None
    ) -> CompiledCandidate:
        moved_bytes = self._state.moved_bytes(selection)
        self._progress(f"compiling with {_what(moved_bytes, found is not None)}")
        started = time.perf_counter()
        try:
            given = step if found is None or found.step is None else found.step
            peak = aot.peak(compile_step(given, self._factory.target))
            used_bytes = peak.peak_bytes
        except aot.DoesNotFitError as error:
            peak, used_bytes = error.peak, error.used_bytes
        gone = 0 if found is None else found.gradient_bytes
        at_once = 0
        if moved_bytes:
            at_once = (
                state_at_once(step, self._factory.target)
                if found is None
                else found.state_at_once_bytes
            )
        candidate = CompiledCandidate(
            moved_bytes=moved_bytes,
            used_bytes=used_bytes,
            peak=peak,
            fits=used_bytes <= self._budget_bytes,
            seconds=time.perf_counter() - started,
            parts=self._parts(peak, used_bytes, moved_bytes, gone, at_once),
            fused=found is not None,
            stored_bytes=0 if found is None else found.stored_bytes,
            flops_again=0.0 if found is None else found.flops_again,
            outside=() if found is None else found.outside,
        )
        self.compiled.append(candidate)
        self._progress(candidate)
        return candidate

    def _parts(
        self,
        peak: aot.Peak | None,
        used_bytes: int,
        moved_bytes: int,
        gone_bytes: int,
        at_once_bytes: int,
    ) -> dict[str, int]:
        parameters = self._state.parameter_bytes
        state = self._state.state_bytes - moved_bytes
        beside = max(used_bytes - parameters - state, 0)
        # A compiler that refuses does not say how much of it is temporary: all counts.
        temporaries = beside if peak is None else peak.temporary_bytes
        gradients = min(max(parameters - gone_bytes, 0), temporaries)
        at_once = min(at_once_bytes, temporaries - gradients)
        return {
            "parameters": parameters,
            "gradients": gradients,
            "activations": temporaries - gradients - at_once,
            "state": state,
            **({STATE_AT_ONCE: at_once} if at_once else {}),
            "other": max(beside - temporaries, 0),
        }
