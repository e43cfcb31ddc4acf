"""Searches for the fastest way of training that fits, in few compilations. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from optax_offload._plan.budget import Budget
from optax_offload._plan.candidates import FAILURES, CompiledCandidate
from optax_offload._plan.state import MOST_LAST, Selection
from optax_offload._plan.variants import Expectation, Variant, small_windows

# A way that is expected to take less than the best one by no more than this share of
# its time is not compiled.
LEAST_GAIN = 0.02
# A way is compiled unless it is predicted to need this share more than there is.
PEAK_SLACK = 0.03
# A fused way whose gradients wait otherwise may hide so much more of the link. (Llama 3
# 70B on an H100 hides 71 % with two backward passes, 37 % with gradients on the host.)
SHARE_OF_OTHERS = 0.4
# Where nothing is predicted to fit, so many ways that need least are compiled.
LEAST_ATTEMPTS = 3
# All sums of so few are listed: some n^3 / 6 of n patterns, which are a few hundred at
# most. Of four there would be too many.
MOST_STAND_INS = 3
# Each attempt is a compilation. The second knows by how much the first was short.
STAND_IN_ATTEMPTS = 2

# Ways that are not compiled whatever else is found.
_NEVER = ("failed", "same", "host")

Reason = Literal["failed", "same", "host", "peak", "more", "slower"]


@dataclasses.dataclass(frozen=True)
class PassedOver:
    """A way that was not compiled, and why.

    Attributes:
      variant: The way.
      reason: That it failed to compile, that it is the same as another, or what there
        is too much of: host memory, device memory, what moves (less of it fits), time.
      used_bytes: The peak that is predicted for it, on each device.
      host_bytes: The host memory that it needs for each device.
      seconds: The time of a step that is predicted.
      error: The reason why it failed; "" if it was not tried.
    """

    variant: Variant
    reason: Reason
    used_bytes: int
    host_bytes: int
    seconds: float
    error: str = ""


class Search:
    """Searches for the fastest way that fits, by predictions that compilations correct.

    Each compilation corrects the predictions for the ways that are like it: the
    difference between its peak and the expected one is added to theirs.

    Attributes:
      known: The ways that were compiled, with the results.
      failed: The ways that could not be compiled, with the reasons.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        expect: Callable[[Variant], Expectation],
        compile_variant: Callable[[Variant], CompiledCandidate],
        budget: Budget,
        known: dict[Variant, CompiledCandidate],
    ):
        """Compiles nothing yet.

        Args:
          variants: All ways.
          expect: Returns the expectation of a way, which is cheap.
          compile_variant: Compiles a way.
          budget: The memory that a step may take.
          known: The ways that were compiled, with the results; what is compiled is
            added.
        """
        self._variants = list(variants)
        self._expect, self._compile, self._budget = expect, compile_variant, budget
        self.known = known
        self.failed: dict[Variant, str] = {}

    @property
    def best(self) -> CompiledCandidate | None:
        """The fastest that was compiled and fits; of equals what moves less."""
        fitting = [c for c in self.known.values() if c.fits and not c.same_as]
        return min(
            fitting,
            key=lambda c: (c.step_seconds, c.moved_bytes + c.parameter_bytes),
            default=None,
        )

    def ask(self, variant: Variant) -> CompiledCandidate | None:
        """Returns the result of compiling a way, now or before; None if it fails.

        A way may be none of a step that is right as it is, as one that does with its
        parameters what cannot be done by rows: the error says what, and others may do.
        """
        if variant not in self.known and variant not in self.failed:
            try:
                self.known[variant] = self._compile(variant)
            except FAILURES as error:
                text = f"{type(error).__name__}: {error}"
                self.failed[variant] = text.partition("\n")[0]
        return self.known.get(variant)

    def run(self) -> None:
        """Compiles in the order of predicted time, until none can be faster."""
        while ways := self._open():
            self.ask(ways[0])
        compiled = 0
        while self.best is None and compiled < LEAST_ATTEMPTS:
            least = self.least()
            if least is None:
                return
            if self.ask(least) is None:
                continue
            compiled += 1
            for variant in small_windows(least):
                if variant not in self._variants and least.state:
                    self._variants.append(variant)

    def least(self) -> Variant | None:
        """The untried way of the least predicted peak that the host has room for."""
        ways = [
            v
            for v in self._variants
            if v not in self.known and self._reason(v) not in _NEVER
        ]
        order = {v: (self.predicted(v), self._expect(v).link_bytes) for v in ways}
        return min(ways, key=order.__getitem__, default=None)

    def predicted(self, variant: Variant) -> int:
        """The peak of a way: as compiled, or corrected by the nearest that was."""
        if variant in self.known:
            return self.known[variant].used_bytes
        expected = self._expect(variant).device_bytes
        if not self.known:
            return expected
        near = min(self.known, key=lambda other: _distance(variant, other))
        error = self.known[near].used_bytes - self._expect(near).device_bytes
        return max(expected + error, 0)

    def predicted_seconds(self, variant: Variant) -> float:
        """The time of a step, with as little hidden of its transfers as of the nearest.

        The share that is not hidden is that of the nearest way whose gradients are
        treated alike. Without one it is some of the least that was seen, for how
        gradients wait decides how much of the link is waited for; of a way that is not
        fused it is the mean.
        """
        expected = self._expect(variant)
        seen = {v: share for v in self.known if (share := self._exposed(v)) is not None}
        if not seen:
            return expected.seconds
        like = [v for v in seen if _gradients(v) == _gradients(variant)]
        if like:
            share = seen[min(like, key=lambda other: _distance(variant, other))]
        elif variant.options.fuse:
            share = SHARE_OF_OTHERS * min(1.0, *seen.values())
        else:
            share = min(1.0, sum(seen.values()) / len(seen))
        hidden = expected.serial_seconds - expected.seconds
        return expected.seconds + share * hidden

    def _exposed(self, variant: Variant) -> float | None:
        """The share of the transfers that could be hidden which are not.

        None where a way moves next to nothing, or the compiler refused it.
        """
        expected, found = self._expect(variant), self.known[variant]
        hidden = expected.serial_seconds - expected.seconds
        if found.time is None or hidden <= LEAST_GAIN * expected.seconds:
            return None
        return max((found.step_seconds - expected.seconds) / hidden, 0.0)

    def passed_over(self) -> list[PassedOver]:
        """All that was not compiled, each with the reason."""
        found: list[PassedOver] = []
        for variant in self._variants:
            reason = self._reason(variant)
            if variant not in self.known and reason is not None:
                expected = self._expect(variant)
                found.append(
                    PassedOver(
                        variant,
                        reason,
                        self.predicted(variant),
                        expected.host_bytes,
                        self.predicted_seconds(variant),
                        self.failed.get(variant, ""),
                    )
                )
        return found

    def _open(self) -> list[Variant]:
        ways = [
            v for v in self._variants if v not in self.known and self._reason(v) is None
        ]
        order = {
            v: (self.predicted_seconds(v), self._expect(v).link_bytes) for v in ways
        }
        return sorted(ways, key=order.__getitem__)

    def _reason(self, variant: Variant) -> Reason | None:
        """Returns the reason not to compile a way; None if it should be compiled."""
        if variant in self.failed:
            return "failed"
        expected, budget = self._expect(variant), self._budget
        if expected.is_other:
            return "same"
        if budget.host_bytes is not None and expected.host_bytes > budget.host_bytes:
            return "host"
        if self.predicted(variant) > budget.device_bytes * (1 + PEAK_SLACK):
            return "peak"
        if any(c.fits and _moves_more(variant, v) for v, c in self.known.items()):
            return "more"
        least = self.predicted_seconds(variant) / (1 - LEAST_GAIN)
        best = self.best
        return "slower" if best is not None and least >= best.step_seconds else None


def _moves_more(one: Variant, other: Variant) -> bool:
    """Returns whether one way differs from another only in that it moves more."""
    residuals = one.options.residuals, other.options.residuals
    options = dataclasses.replace(one.options, residuals=residuals[1])
    moved = {
        "state": other.state,
        "parameters": other.parameters,
        "frozen": other.frozen,
        "options": options,
    }
    rank = MOST_LAST.index
    return (
        one != other
        and dataclasses.replace(one, **moved) == other
        and one.state >= other.state
        and rank(one.parameters) >= rank(other.parameters)
        and rank(one.frozen) >= rank(other.frozen)
        and (residuals[0] == "host" or residuals[1] == "device")
    )


def _gradients(variant: Variant) -> tuple[bool, str]:
    """The treatment of gradients: whether updates are fused, and how late ones wait."""
    options = variant.options
    return options.fuse, options.late_gradients if options.fuse else ""


def _distance(one: Variant, other: Variant) -> int:
    """The distance of two ways, by the settings that their peaks depend on."""
    return (
        8 * (one.options.fuse != other.options.fuse)
        + 8 * (one.options.latency_hiding != other.options.latency_hiding)
        + 4 * (one.parameters != other.parameters)
        + 4 * (one.frozen != other.frozen)
        + 4 * (bool(one.state) != bool(other.state))
        + 2 * (one.options.late_gradients != other.options.late_gradients)
        + 2 * len({*one.codecs} ^ {*other.codecs})
        + 2 * (one.window_bytes != other.window_bytes)
        + (one.options.residuals != other.options.residuals)
    )


def smallest_that_fits(
    sizes: Sequence[int],
    used_bytes: Callable[[Selection], int],
    budget_bytes: int,
    attempts: int | None = None,
) -> Selection | None:
    """Returns the patterns to move so that a step fits, as few bytes as it finds.

    It takes patterns in order of preference until the step fits: how many are needed is
    found by interpolation and bisection. Then it tries to replace the last of them by
    smaller ones.

    Args:
      sizes: The bytes that each takes from the peak at most, in order of preference.
      used_bytes: Returns the peak with a selection moved, which is expensive. It is
        asked for no selection twice.
      budget_bytes: The bytes that may be used.
      attempts: The most selections to try between nothing and all; then the best one
        found is taken, and no pattern is replaced. None sets no limit.

    Returns:
      The positions in ``sizes`` of the patterns to move: an empty set if the step fits
      with none of them moved, None if it does not fit with all of them moved.
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
    shortest = _shortest_sequence(sizes, ask, budget_bytes, attempts)
    if attempts is not None:
        return _first(shortest)
    return _with_stand_ins(sizes, ask, budget_bytes, shortest) or _first(shortest)


def _first(n: int) -> Selection:
    return frozenset(range(n))


def _shortest_sequence(
    sizes: Sequence[int],
    ask: Callable[[Selection], int],
    budget_bytes: int,
    attempts: int | None,
) -> int:
    """The least number of items, from the first on, with which the step fits.

    With none of them it does not fit, and with all of them it does. If the attempts
    run out, the result is the least number that was found to fit, or all.
    """
    total = [0, *itertools.accumulate(sizes)]
    low, high = 0, len(sizes)
    attempt = 0
    while high - low > 1 and (attempts is None or attempt < attempts):
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
