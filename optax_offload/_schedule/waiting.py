"""Gradients that wait: the passes over their rows, and the cheaper way to have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._program import Step
from optax_offload._rows import Sum
from optax_offload._schedule.follow import Scan, candidates
from optax_offload._schedule.fused import Fused, FusedScan
from optax_offload._schedule.order import flops


class Passes(NamedTuple):
    """The passes over the rows of gradients that wait.

    A norm of what a norm has scaled needs a pass of its own: clipping before LAMB, or
    clipping twice.

    Attributes:
      of: The pass of each equation that is summed up over rows. Pass 0 is the scan that
        computes the gradients.
      last: The pass in which the updates that wait are made.
    """

    of: Mapping[int, int]
    last: int

    def sums(self, late: Sequence[Fused], number: int) -> list[Sum]:
        """Sums that a pass takes over these."""
        return [
            s for f in late for s in f.component.sums if self.of[s.position] == number
        ]

    def twice(self, late: Sequence[Fused]) -> int:
        """The number of further runs of their scan, the last of which updates them."""
        return len(self._late(late) | {self.last})

    def stored(self, late: Sequence[Fused]) -> int:
        """The number of times that they are loaded, the last of which updates them."""
        return len(self._late(late)) + 1

    def _late(self, late: Sequence[Fused]) -> set[int]:
        return {self.of[s.position] for f in late for s in f.component.sums} - {0}


def passes(step: Step, scans: Sequence[FusedScan]) -> Passes:
    """Assigns each sum to a pass, as early as its operands are known.

    Args:
      step: The step.
      scans: The scans that updates are moved into. A pass takes them in this order.
    """
    every = candidates(step)
    fused = [(each.scan.position, f) for each in scans for f in each.fused]
    gradients = {g for _, f in fused for g in f.component.gradients}
    at = {s.position: scan for scan, f in fused for s in f.component.sums}
    # The pass, and in it the scan, after which a variable is known.
    known: dict[jex.Var, tuple[int, int]] = {}
    of: dict[int, int] = {}

    def number(taken: Sequence[jex.Var], scan: int) -> int:
        """The first pass in which a scan can take these."""
        last, after = max((known[v] for v in taken if v in known), default=(0, -1))
        return last + (after >= scan)

    for i in range(len(step.program.equations)):
        if i in at:
            of[i] = number(step.reads(i), at[i])
            known.update((v, (of[i], at[i])) for v in step.defines(i))
            continue
        before = [known[v] for v in step.reads(i) if v in known]
        if i in every:
            before.append((0, i))
        if before:
            after = (v for v in step.defines(i) if v not in gradients)
            known.update((v, max(before)) for v in after)
    results = (number(f.component.results, scan) for scan, f in fused)
    return Passes(of, max([1, *of.values(), *results]))


def cheaper(
    scan: Scan, late: Sequence[Fused], passes: Passes
) -> Literal["host", "recompute"]:
    """Returns whether gradients had better be stored, or computed again.

    Stored, they cross the link beside the backward pass, and with their state in every
    pass after it, when nothing is computed. Computed again, the state crosses it beside
    a further backward pass.

    Args:
      scan: The backward pass.
      late: The updates that have to wait.
      passes: The passes that sum up over the rows first.
    """
    backward = flops(scan) / limits.now.flops_per_byte
    gradients = sum(f.gradient_bytes for f in late)
    state = sum(f.loaded_bytes for f in late)
    stored = max(backward, gradients) + passes.stored(late) * (gradients + state)
    again = backward + passes.twice(late) * max(backward, state)
    return "host" if stored < again else "recompute"
