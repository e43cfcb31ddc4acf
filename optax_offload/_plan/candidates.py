"""Compiling a step with one selection of state moved after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from optax_offload import _offload, aot
from optax_offload._plan.movable import MovableState
from optax_offload._plan.search import Selection
from optax_offload._plan.step import StepFactory, compile_step
from optax_offload._units import size_text


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
    """

    moved_bytes: int
    used_bytes: int
    peak: aot.Peak | None
    fits: bool
    seconds: float
    parts: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The candidate as plain values, ready for `json.dumps`."""
        return {
            "moved_bytes": self.moved_bytes,
            "used_bytes": self.used_bytes,
            "fits": self.fits,
            "seconds": round(self.seconds, 3),
            "parts": dict(self.parts),
        }

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{size_text(self.moved_bytes)} of state moved: peak "
            f"{size_text(self.used_bytes)}, {fits} ({self.seconds:.0f} s)"
        )


Progress = Callable[[str | CompiledCandidate], None]


class CandidateCompiler:
    """Compiles a step with selections of its state moved, and keeps what came of each.

    Attributes:
      compiled: What has been compiled, in that order.
    """

    compiled: dict[Selection, CompiledCandidate]

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
        self.compiled = {}

    def used_bytes(self, selection: Selection) -> int:
        """Compiles the step with a selection moved, and returns its peak."""
        moved_bytes = self._state.moved_bytes(selection)
        self._progress(f"compiling with {size_text(moved_bytes)} of state moved")
        started = time.perf_counter()
        peak, used_bytes = self._compile(selection)
        self.compiled[selection] = CompiledCandidate(
            moved_bytes=moved_bytes,
            used_bytes=used_bytes,
            peak=peak,
            fits=used_bytes <= self._budget_bytes,
            seconds=time.perf_counter() - started,
            parts=self._parts(peak, used_bytes, moved_bytes),
        )
        self._progress(self.compiled[selection])
        return used_bytes

    def _compile(self, selection: Selection) -> tuple[aot.Peak | None, int]:
        if self._state.moves_any(selection):
            config = self._state.config(selection)
            step = self._factory.step(lambda inner: _offload.offload(inner, config))
        else:
            step = self._factory.plain_step()
        try:
            peak = aot.peak(compile_step(step, self._factory.target))
        except aot.DoesNotFitError as error:
            return error.peak, error.used_bytes
        return peak, peak.peak_bytes

    def _parts(
        self, peak: aot.Peak | None, used_bytes: int, moved_bytes: int
    ) -> dict[str, int]:
        parameters = self._state.parameter_bytes
        state = self._state.state_bytes - moved_bytes
        beside = max(used_bytes - parameters - state, 0)
        # A compiler that refuses does not say how much of it is temporary: all counts.
        temporaries = beside if peak is None else peak.temporary_bytes
        gradients = min(parameters, temporaries)
        return {
            "parameters": parameters,
            "gradients": gradients,
            "activations": temporaries - gradients,
            "state": state,
            "other": max(beside - temporaries, 0),
        }
