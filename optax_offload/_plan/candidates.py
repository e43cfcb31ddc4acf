"""Compiling a step with one selection of state moved after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from optax_offload import _offload, aot
from optax_offload._plan.fusing import Fused, fused, state_at_once
from optax_offload._plan.movable import MovableState
from optax_offload._plan.search import Selection
from optax_offload._plan.step import Step, StepFactory, compile_step
from optax_offload._units import size_text

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
      fused: Whether its updates are in the backward pass, by `fuse_backward`.
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
