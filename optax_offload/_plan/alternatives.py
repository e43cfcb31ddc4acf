"""The ways that were tried: a table of them, and the error where none fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from optax_offload._ground.units import (
    Printed,
    html_paragraph,
    html_table,
    milliseconds,
    size_text,
)
from optax_offload._plan.allowed import REMAINDER, Codecs, of_parameters
from optax_offload._plan.budget import Budget
from optax_offload._plan.candidates import (
    OTHERS,
    STATE_AT_ONCE,
    THE_REST,
    CompiledCandidate,
)
from optax_offload._plan.search import PassedOver
from optax_offload.aot import Assumption, DoesNotFitError, Target

CHOSEN = "chosen"


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way that was compiled.

    Attributes:
      what: A description in a few words.
      used_bytes: The peak on each device.
      host_bytes: The host memory that it needs of each host.
      link_bytes: The bytes that cross each device's link in a step, both ways together.
      step_seconds: The modeled time of a step; None where the compiler refused.
      over_plain: That over the time of the step as given; None where one is not known.
      fits: Whether it is within both budgets.
      why: ``"chosen"``, or why it is not.
      same: The other ways that were found to make the same program.
    """

    what: str
    used_bytes: int
    host_bytes: int
    link_bytes: int
    step_seconds: float | None
    over_plain: float | None
    fits: bool
    why: str
    same: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The description, with the other ways that make the same program."""
        if not self.same:
            return self.what
        return f"{self.what} ({', '.join(map(repr, self.same))}: the same program)"

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
      assumptions: The assumptions of modeled times, each with its source.
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
                row.text,
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

    def _headline(self) -> str:
        lines = str(self).splitlines()
        chosen = (line for line in lines if line.startswith("-> "))
        return next(chosen, "no way fits")

    def _repr_html_(self) -> str:
        header = [name.strip() for name in (*HEADERS, "why")]
        lines = [[*numbers, what, why] for what, *numbers, why in self.cells()]
        chosen = [i for i, row in enumerate(self.rows) if row.chosen]
        return "".join(
            [
                html_table([header, *lines], right=range(5), bold=chosen),
                *map(html_paragraph, self.not_compiled),
            ]
        )

    def __str__(self) -> str:
        lines = [
            ("-> " if row.chosen else "   ")
            + f"{peak} on each device, {host} on each host, {link} over the link, "
            f"modeled step {step}, {ratio} times plain: {what}"
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
    "modeled step ",
    "times plain ",
    "what is moved",
)


def alternatives(
    compiled: Sequence[CompiledCandidate],
    passed_over: Sequence[PassedOver],
    budget: Budget,
    target: Target,
    best: CompiledCandidate | None,
) -> Alternatives:
    """The table of compiled ways, and lines on those that were not compiled.

    Args:
      compiled: The candidates that were compiled; first the step as given. Those that
        were then found to be the program of another have no row of their own.
      passed_over: The ways that were not compiled.
      budget: The memory that a step may take.
      target: The chips.
      best: The chosen one; None where nothing fits.
    """
    nearest = _nearest(compiled, budget)
    plain = compiled[0].time

    def why(found: CompiledCandidate) -> str:
        if best is not None and found.variant == best.variant:
            return CHOSEN
        short = _shortages(found, budget, target)
        if short:
            near = best is None and found is nearest
            return ("nearest: " if near else "") + "; ".join(short)
        assert best is not None
        if found.step_seconds > best.step_seconds:
            return (
                f"fits; {found.step_seconds / best.step_seconds:.2f} times the chosen"
            )
        return "fits; moves more for the same time"

    def row(found: CompiledCandidate) -> Alternative:
        time = found.time
        over = None
        if time is not None and plain is not None and plain.seconds:
            over = time.seconds / plain.seconds
        return Alternative(
            what=found.what,
            used_bytes=found.used_bytes,
            host_bytes=found.host_bytes * target.devices_per_host,
            link_bytes=0 if time is None else time.load_bytes + time.store_bytes,
            step_seconds=None if time is None else time.seconds,
            over_plain=over,
            fits=found.fits,
            why=why(found),
            same=tuple(
                c.what for c in compiled if c.same_as and c.program == found.program
            ),
        )

    timed = [c.time for c in compiled if c.time is not None]
    own = (c for c in compiled if not c.same_as)
    rows = sorted(map(row, own), key=lambda r: (-r.used_bytes, r.link_bytes))
    return Alternatives(
        rows=tuple(rows),
        not_compiled=tuple(_not_compiled(passed_over, budget, target)),
        assumptions=timed[0].assumptions if timed else (),
    )


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
    passed_over: Sequence[PassedOver], budget: Budget, target: Target
) -> Iterator[str]:
    """A line for each reason, with the one of them that comes nearest."""
    for reason in ("failed", "same", "host", "peak", "more", "slower"):
        some = [p for p in passed_over if p.reason == reason]
        if not some:
            continue
        count = f"not compiled: {len(some)} {'ways' if len(some) > 1 else 'way'}"
        if reason == "failed":
            near = some[0]
            line = f"that failed: {near.error}"
        elif reason == "same":
            near = some[0]
            line = "that make the program of a way above"
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
        such = "such as: " if len(some) > 1 else ""
        yield f"{count} {line} ({such}{near.variant.text()})"


class NothingFitsError(DoesNotFitError):
    """No way of training fits.

    Attributes:
      alternatives: The table of what was tried, the nearest of them marked.
    """

    def __init__(
        self,
        target: Target,
        budget: Budget,
        compiled: Sequence[CompiledCandidate],
        table: Alternatives,
        codecs: Codecs = (),
    ):
        """Says by how much, what takes the memory and what would help.

        Args:
          target: The chips that the step was compiled for.
          budget: The memory that the step may take.
          compiled: All candidates that were compiled.
          table: The table of these.
          codecs: The codecs to allow for the least state; nothing if they are allowed.
        """
        on_device = [c for c in compiled if c.used_bytes <= budget.device_bytes]
        if on_device:
            found = min(on_device, key=lambda c: c.host_bytes)
            message = _host_is_short(target, budget, found, codecs)
        else:
            found = min(compiled, key=lambda c: c.used_bytes)
            message = _device_is_short(target, budget, found, codecs, table.outside)
        super().__init__(
            message,
            used_bytes=found.used_bytes,
            limit_bytes=budget.device_bytes,
            peak=found.peak,
        )
        self.alternatives = table


def _host_is_short(
    target: Target, budget: Budget, least: CompiledCandidate, codecs: Codecs
) -> str:
    devices = target.devices_per_host
    have, need = (n * devices for n in (budget.host_bytes or 0, least.host_bytes))
    return (
        f"host memory is too small: a step that fits {target.name!r} needs at least "
        f"{size_text(need)} on each host ({least.what}), which has {size_text(have)}. "
        "What would help:\n"
        + "\n".join(
            [
                *_fewer_bits(codecs),
                "- a host with more memory, or more hosts that share the state",
                *[_BFLOAT16] * (REMAINDER not in codecs),
            ]
        )
    )


_BFLOAT16 = (
    "- bfloat16 parameters, if they are float32, with oo.master_weights around the "
    "optimizer"
)


def _fewer_bits(codecs: Codecs) -> Iterator[str]:
    """A line that names the codecs to allow, if there are any."""
    what = {
        REMAINDER: "master weights as the half that their bfloat16 parameters lack, "
        "which is exact"
    }
    names = ",".join(codecs)
    base = of_parameters(codecs)
    means = "; ".join(
        what.get(c, f"{'frozen parameters' if c in base else 'moments'} as {c}")
        for c in codecs
    )
    if codecs:
        yield f"- fewer bits: --allow {names} (allow={names!r}): {means}"


def _device_is_short(
    target: Target,
    budget: Budget,
    least: CompiledCandidate,
    codecs: Codecs,
    outside: Sequence[str],
) -> str:
    budget_bytes = budget.device_bytes
    short = least.used_bytes - budget_bytes
    parts = {name: n for name, n in least.parts.items() if n}
    needs = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
    text = (
        f"the step does not fit on {target.name!r}, whatever is moved. The smallest "
        f"way ({least.what}) needs {size_text(least.used_bytes)} on each device, "
        f"{size_text(short)} more than the budget of {size_text(budget_bytes)}: "
        f"{needs}."
    )
    if budget.host_bytes is not None:
        text += (
            " Ways that need more than the "
            f"{size_text(budget.host_bytes * target.devices_per_host)} of each host "
            "were not tried."
        )
    lines = [*_what_helps(target, budget_bytes, least, short)]
    if budget.host_bytes is not None:
        lines = [*_fewer_bits(codecs), *lines]
    gradients = least.parts.get("gradients", 0)
    saves = f", for up to {size_text(gradients)} less" if gradients else ""
    lines = [*(f"- to fuse what is not{saves}: {x}" for x in outside), *lines]
    return text + " What would help:\n" + "\n".join(lines)


def _what_helps(
    target: Target, budget_bytes: int, least: CompiledCandidate, short: int
) -> Iterator[str]:
    """A line for each part of the peak that is more than what is missing."""
    parts = least.parts
    if parts.get("state", 0) > short:
        yield (
            f"- rules that also move the {size_text(parts['state'])} of state that "
            "stays on the device"
        )
    at_once = sum(n for name, n in parts.items() if name.startswith(STATE_AT_ONCE))
    if at_once > short:
        yield (
            "- an optimizer that does not join all of its state: "
            f"{size_text(at_once)} of it is loaded at once, as for a norm of "
            "accumulated gradients (a warning names the equation, and what to write "
            "instead)"
        )
    others = parts.get(OTHERS, 0)
    if others > short:
        yield (
            f"- --frozen REGEX (frozen=...), if parameters that are not trained are "
            f"among the {size_text(others)} of {OTHERS}"
        )
    temporary = parts.get("residuals", 0) + parts.get(THE_REST, 0)
    if temporary > short:
        yield (
            "- a smaller batch, or remat (jax.checkpoint, nn.remat): residuals and "
            f"other temporaries would have to shrink to {size_text(temporary - short)}"
        )
    if (parts.get("parameters", 0) + parts.get("gradients", 0)) // 2 > short:
        yield "- bfloat16 parameters, if they are float32: that halves gradients too"
    more = math.ceil(target.device_count * least.used_bytes / budget_bytes)
    yield (
        f"- at least {more} devices (now {target.device_count}), with parameters, "
        "gradients and batch sharded over them, or bigger ones"
    )
