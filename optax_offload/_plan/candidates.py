"""Compiling a step in the ways that are asked for, and what is known of each then."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from optax_offload import aot
from optax_offload._errors import OffloadWarning
from optax_offload._plan.prepare import measured, prepared
from optax_offload._plan.state import Codecs, MovableState
from optax_offload._plan.step import StepFactory
from optax_offload._plan.variants import (
    Facts,
    Sizes,
    Variant,
    host_bytes,
    late_bytes_left,
)
from optax_offload._units import milliseconds, seconds_text, size_text

# The name of the part of a peak that is state in host memory, all of it loaded.
STATE_AT_ONCE = "state loaded at once"
# And of what no other name is known for.
THE_REST = "other temporaries"


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A step that was compiled in one of the ways in which it can be trained.

    Attributes:
      what: A description in a few words.
      moved_bytes: The bytes of each device's state that are in host memory.
      used_bytes: The peak on each device; where the compiler refused, what it says.
      peak: The peak in parts; None where the compiler refused.
      fits: Whether the peak and the host memory are within their budgets.
      seconds: The wall time of tracing and compiling, in seconds.
      parts: The bytes that the peak is made of, by name: see `Plan`.
      fused: Whether updates are in the backward pass.
      parameter_bytes: The bytes of each device's parameters that are in host memory.
      host_bytes: The host memory that a step needs for each device.
      time: The modelled time of a step; None where the compiler refused.
      variant: The way; None for one that was compiled by hand.
      outside: The reasons why gradients are left outside of the backward pass; nothing
        where fusing was not tried.
      was_kept: Whether it was compiled before, and read from disk.
    """

    moved_bytes: int
    used_bytes: int
    peak: aot.Peak | None
    fits: bool
    seconds: float
    parts: Mapping[str, int]
    fused: bool = False
    what: str = ""
    parameter_bytes: int = 0
    host_bytes: int = 0
    time: aot.StepTime | None = None
    variant: Variant | None = None
    outside: tuple[str, ...] = ()
    was_kept: bool = False

    @property
    def step_seconds(self) -> float:
        """The modelled time of a step; endless where the compiler refused."""
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
            step = f", modelled step {milliseconds(self.time.seconds)}"
        how = "cached" if self.was_kept else seconds_text(self.seconds)
        return (
            f"{self.what}: peak {size_text(self.used_bytes)}, "
            f"{size_text(self.host_bytes)} on the host{step}, {fits} ({how})"
        )


Progress = Callable[[str | CompiledCandidate], None]


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory that a step may take.

    Attributes:
      device_bytes: Device memory, on each device.
      host_bytes: Host memory, for each device; None where it is not bounded.
    """

    device_bytes: int
    host_bytes: int | None = None

    def holds(self, used_bytes: int, host_bytes: int) -> bool:
        """Returns whether device and host memory are both within the budget."""
        on_host = self.host_bytes is None or host_bytes <= self.host_bytes
        return used_bytes <= self.device_bytes and on_host


@dataclasses.dataclass(frozen=True)
class Asked:
    """The request to `plan`, beside the step.

    Attributes:
      budget: The memory that a step may take.
      allow: The codecs that state may be kept in; see `allowed`.
      link_bytes_per_second: Bandwidth of the link; None takes the documented one.
      folder: The folder that keeps figures of compiled programs; None keeps nothing.
    """

    budget: Budget
    allow: Codecs = ()
    link_bytes_per_second: float | None = None
    folder: str | os.PathLike[str] | None = None


class CandidateCompiler:
    """Compiles a step in ways that are asked for, and keeps the results.

    Attributes:
      compiled: The candidates that have been compiled, in that order.
    """

    compiled: list[CompiledCandidate]

    def __init__(
        self,
        factory: StepFactory,
        states: Mapping[Codecs, MovableState],
        asked: Asked,
        progress: Progress,
    ):
        """Compiles nothing yet.

        Args:
          factory: Makes the step.
          states: The state that can be selected, by the codecs that it is kept in.
          asked: The request to `plan`: budgets, codecs and link.
          progress: A function that is called with what is being compiled, and then with
            the result.
        """
        self._factory, self._states, self._asked = factory, states, asked
        self._progress = progress
        self._started = time.perf_counter()
        self.compiled = []
        self._known: dict[Variant, CompiledCandidate] = {}

    def __call__(
        self, variant: Variant, facts: Facts, sizes: Sizes, left: int = 0
    ) -> CompiledCandidate:
        """Compiles a variant, unless it has been compiled.

        Args:
          variant: The variant.
          facts: Facts from tracing, for the parts of the peak.
          sizes: The sizes of the values that the step holds.
          left: The largest number of variants that may be compiled after it.
        """
        if variant not in self._known:
            self._known[variant] = self._compile(variant, facts, sizes, left)
            self.compiled.append(self._known[variant])
            self._progress(self._known[variant])
        return self._known[variant]

    def with_parts(self, facts: Facts, sizes: Sizes) -> None:
        """Says anew what fills the device, once more is known of the step."""
        for variant, found in self._known.items():
            parts = _parts(variant, facts, sizes, found.peak, found.used_bytes)
            anew = dataclasses.replace(found, parts=parts)
            self._known[variant] = anew
            self.compiled[self.compiled.index(found)] = anew

    def _compile(
        self, variant: Variant, facts: Facts, sizes: Sizes, left: int
    ) -> CompiledCandidate:
        what = variant.text(sizes)
        so_far = time.perf_counter() - self._started
        self._progress(
            f"compiling: {what} ({len(self.compiled)} compiled, at most {left} more, "
            f"{so_far:.0f} s so far)"
        )
        started = time.perf_counter()
        state = self._states[variant.codecs]
        with warnings.catch_warnings():  # A table says what each way takes.
            warnings.simplefilter("ignore", OffloadWarning)
            found = measured(
                prepared(self._factory, state, variant),
                self._factory.target,
                self._asked.link_bytes_per_second,
                self._asked.folder,
            )
        on_host = (
            host_bytes(variant, facts, sizes)
            if found.peak is None
            else found.peak.host_peak_bytes
        )
        return CompiledCandidate(
            what=what,
            variant=variant,
            moved_bytes=sizes.moved_state(variant),
            parameter_bytes=sizes.parameters[variant.parameters],
            used_bytes=found.used_bytes,
            host_bytes=on_host,
            peak=found.peak,
            time=found.time,
            fits=self._asked.budget.holds(found.used_bytes, on_host),
            seconds=time.perf_counter() - started,
            parts=_parts(variant, facts, sizes, found.peak, found.used_bytes),
            fused=variant.options.fuse,
            outside=facts.outside if variant.options.fuse else (),
            was_kept=found.was_kept,
        )


def _parts(
    variant: Variant,
    facts: Facts,
    sizes: Sizes,
    peak: aot.Peak | None,
    used_bytes: int,
) -> dict[str, int]:
    """The bytes on each device by what they hold, such as parameters; see `Plan`."""
    parameters = sizes.all_parameters - sizes.parameters[variant.parameters]
    state = sizes.device_state(variant)
    beside = max(used_bytes - parameters - state, 0)
    # A compiler that refuses does not say how much of it is temporary: all counts.
    temporary = beside if peak is None else min(peak.temporary_bytes, beside)
    left, found = temporary, {}
    unfused = sizes.all_parameters - facts.gradient_bytes
    for name, nbytes in (
        ("gradients", unfused + late_bytes_left(variant, facts)),
        (
            "residuals",
            facts.residual_bytes * (variant.options.residuals == "device"),
        ),
        (
            _at_once(facts),
            facts.state_at_once_bytes * (sizes.moved_state(variant) > 0),
        ),
    ):
        found[name] = min(max(nbytes, 0), left)
        left -= found[name]
    if not found[_at_once(facts)]:
        del found[_at_once(facts)]
    return {
        "parameters": parameters,
        "state": state,
        **found,
        THE_REST: left,
        "other arguments and results": beside - temporary,
    }


def _at_once(facts: Facts) -> str:
    joined = f" (by {facts.joined_by})" if facts.joined_by else ""
    return STATE_AT_ONCE + joined
