"""The table of the ways in which a step can be trained, and why each is not chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from optax_offload._plan.candidates import Asked, Budget, CompiledCandidate
from optax_offload._plan.search import PassedOver
from optax_offload._units import Printed, milliseconds, size_text
from optax_offload.aot import Assumption, Target

CHOSEN = "chosen"


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way that was compiled.

    Attributes:
      what: A description in a few words.
      used_bytes: The peak on each device.
      host_bytes: The host memory that it needs of each host.
      link_bytes: The bytes that cross each device's link in a step, both ways together.
      step_seconds: The modelled time of a step; None where the compiler refused.
      over_plain: That over the time of the step as given; None where one is not known.
      fits: Whether it is within both budgets.
      why: ``"chosen"``, or why it is not.
    """

    what: str
    used_bytes: int
    host_bytes: int
    link_bytes: int
    step_seconds: float | None
    over_plain: float | None
    fits: bool
    why: str

    @property
    def chosen(self) -> bool:
        """True if this is the way that the plan has chosen."""
        return self.why == CHOSEN


@dataclasses.dataclass(frozen=True, repr=False)
class Alternatives(Printed):
    """The ways that were considered, from the one that needs most of the device down.

    Attributes:
      rows: The ways that were compiled.
      not_compiled: Lines on the others, and why they were not compiled.
      assumptions: The assumptions of modelled times, each with its source.
      outside: The reasons why gradients are left outside of the backward pass.
    """

    rows: tuple[Alternative, ...]
    not_compiled: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    outside: tuple[str, ...] = ()

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text: what, peak, host, link, step, over plain, why."""
        return [
            (
                row.what,
                size_text(row.used_bytes),
                size_text(row.host_bytes),
                size_text(row.link_bytes),
                "?" if row.step_seconds is None else milliseconds(row.step_seconds),
                "?" if row.over_plain is None else f"{row.over_plain:.2f}",
                row.why,
            )
            for row in self.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """The table as plain values, ready for `json.dumps`."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "not_compiled": list(self.not_compiled),
            "assumptions": [a._asdict() for a in self.assumptions],
        }

    def __str__(self) -> str:
        lines = [
            ("-> " if row.chosen else "   ")
            + f"{peak} on each device, {host} on each host, {link} over the link, "
            f"modelled step {step}, {ratio} times plain: {what}"
            + ("" if row.chosen else f" ({why})")
            for row, (what, peak, host, link, step, ratio, why) in zip(
                self.rows, self.cells(), strict=True
            )
        ]
        return "\n".join([*lines, *self.not_compiled])


# Those that end in a space are of numbers.
HEADERS = (
    "peak ",
    "each host ",
    "over the link ",
    "modelled step ",
    "times plain ",
    "what is moved",
)


def alternatives(
    compiled: Sequence[CompiledCandidate],
    passed_over: Sequence[PassedOver],
    asked: Asked,
    target: Target,
    best: CompiledCandidate | None,
) -> Alternatives:
    """The table of compiled ways, and lines on those that were not compiled.

    Args:
      compiled: The candidates that were compiled; first the step as given.
      passed_over: The ways that were not compiled.
      asked: Budgets.
      target: The chips.
      best: The chosen one; None where nothing fits.
    """
    chosen = None if best is None else best.variant
    nearest = _nearest(compiled, asked.budget) if best is None else None
    plain = _plain_seconds(compiled)
    rows = [
        _row(c, _why(c, best, chosen, nearest, asked.budget, target), plain, target)
        for c in compiled
    ]
    rows.sort(key=lambda row: (-row.used_bytes, row.link_bytes))
    timed = [c.time for c in compiled if c.time is not None]
    return Alternatives(
        rows=tuple(rows),
        not_compiled=tuple(_not_compiled(passed_over, asked, target)),
        assumptions=timed[0].assumptions if timed else (),
    )


def _row(
    found: CompiledCandidate, why: str, plain: float | None, target: Target
) -> Alternative:
    time = found.time
    return Alternative(
        what=found.what,
        used_bytes=found.used_bytes,
        host_bytes=found.host_bytes * target.devices_per_host,
        link_bytes=0 if time is None else time.load_bytes + time.store_bytes,
        step_seconds=None if time is None else time.seconds,
        over_plain=None if time is None or not plain else time.seconds / plain,
        fits=found.fits,
        why=why,
    )


def _plain_seconds(compiled: Sequence[CompiledCandidate]) -> float | None:
    """The time of the step as given; None where the compiler refused it."""
    time = compiled[0].time
    return None if time is None else time.seconds


def _why(  # noqa: PLR0913 - what a line is decided by
    found: CompiledCandidate,
    best: CompiledCandidate | None,
    chosen: Any,
    nearest: CompiledCandidate | None,
    budget: Budget,
    target: Target,
) -> str:
    if best is not None and found.variant == chosen:
        return CHOSEN
    short = _shortages(found, budget, target)
    if short:
        return ("nearest: " if found is nearest else "") + "; ".join(short)
    assert best is not None
    if found.step_seconds > best.step_seconds:
        return f"fits; {found.step_seconds / best.step_seconds:.2f} times the chosen"
    return "fits; moves more for the same time"


def _shortages(found: CompiledCandidate, budget: Budget, target: Target) -> list[str]:
    """By how much a way is over its budgets."""
    lines: list[str] = []
    over = found.used_bytes - budget.device_bytes
    if over > 0:
        lines.append(f"{size_text(over)} more than each device has")
    if budget.host_bytes is not None and found.host_bytes > budget.host_bytes:
        over = (found.host_bytes - budget.host_bytes) * target.devices_per_host
        lines.append(f"{size_text(over)} more than each host has")
    return lines


def _nearest(
    compiled: Sequence[CompiledCandidate], budget: Budget
) -> CompiledCandidate:
    """The candidate that is over its budgets by the smallest factor."""

    def over(found: CompiledCandidate) -> float:
        device = found.used_bytes / budget.device_bytes
        if budget.host_bytes is None:
            return device
        return max(device, found.host_bytes / max(budget.host_bytes, 1))

    return min(compiled, key=over)


def _not_compiled(
    passed_over: Sequence[PassedOver], asked: Asked, target: Target
) -> Iterator[str]:
    """A line for each reason, with the one of them that comes nearest."""
    budget = asked.budget
    for reason in ("failed", "host", "peak", "more", "slower"):
        some = [p for p in passed_over if p.reason == reason]
        if not some:
            continue
        count = f"not compiled: {len(some)} {'ways' if len(some) > 1 else 'way'}"
        if reason == "failed":
            near = some[0]
            line = f"that failed: {near.error}"
        elif reason == "host":
            near = min(some, key=lambda p: p.host_bytes)
            need = size_text(near.host_bytes * target.devices_per_host)
            have = size_text((budget.host_bytes or 0) * target.devices_per_host)
            line = f"that need more than the {have} of each host, at least {need}"
        elif reason == "peak":
            near = min(some, key=lambda p: p.used_bytes)
            line = (
                f"predicted to need at least {size_text(near.used_bytes)} on each "
                "device"
            )
        elif reason == "more":
            near = min(some, key=lambda p: p.seconds)
            line = "that would move more than one that fits"
        else:
            near = min(some, key=lambda p: p.seconds)
            line = (
                "predicted to be no faster than the chosen, at best "
                f"{milliseconds(near.seconds)}"
            )
        yield f"{count} {line} ({near.variant.text()})"
