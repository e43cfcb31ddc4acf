"""What is evaluated beside the rows of scans that have updates, as a chain takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._program import Step
from optax_offload._schedule.fused import FusedScan
from optax_offload._schedule.late import Reduced
from optax_offload._schedule.rest import Outer, rest
from optax_offload._schedule.waiting import Passes


class Beside(NamedTuple):
    """What a step evaluates beside the rows of its scans.

    Attributes:
      nodes: Equations and what is left of updates, each after what it takes. A scan
        takes and defines what the updates in it do too.
      after: Those that wait for passes over rows, in order.
      taken: What updates in scans take of the nodes, and what those passes and what
        waits for them do.
      reduced: What is reduced over gradients that turns use up, if they may.
    """

    nodes: Sequence[Outer]
    after: Sequence[Outer]
    taken: set[jex.Var]
    reduced: Reduced | None


def beside(
    step: Step,
    scans: Sequence[FusedScan],
    streaming: Sequence[FusedScan],
    passes: Passes,
    reduced: Reduced | None,
) -> Beside:
    """What a step evaluates beside the rows of its scans.

    Args:
      step: The step.
      scans: The scans that updates are moved into.
      streaming: Other scans that have turns of their own.
      passes: The passes over the rows of gradients that wait.
      reduced: What is reduced over gradients that may wait on the host.
    """
    at = {each.scan.position: each for each in (*scans, *streaming)}

    def node(x: Outer) -> Outer:
        each = at.get(x.position)
        return _in_turns(step, x, each, passes) if each and not x.left else x

    taken = _taken(scans, passes).intersection(step.program.producers)
    found = [node(x) for x in rest(step, scans, reduced, taken)]
    nodes, after = apart(step, _in_order(found) if scans else found, scans, passes)
    again = (x.scan.position for x in scans if x.late and x.way == "recompute")
    taken.update(v for i in again for v in step.reads(i))
    taken.update(v for x in after for v in x.reads)
    return Beside(nodes, after, taken, reduced)


def _taken(scans: Iterable[FusedScan], passes: Passes) -> set[jex.Var]:
    """What updates in scans take, and those of the passes after them."""
    found: set[jex.Var] = set()
    for each in scans:
        sums = passes.sums(each.fused, 0)
        found.update(each.given((*each.first_pass(sums), *each.late)))
    return found


def in_rows(*scans: Iterable[FusedScan]) -> set[jex.Var]:
    """The variables of which scans take rows."""
    some = [each for of in scans for each in of]
    rows = {v for each in some for f in each.fused for v in f.rows.inputs}
    return rows.union(v for each in some for v in each.scan.loaded)


def apart(
    step: Step, some: Iterable[Outer], scans: Iterable[FusedScan], passes: Passes
) -> tuple[list[Outer], list[Outer]]:
    """Nodes that wait for no later pass than that of their scans, and those that do.

    Args:
      step: The step.
      some: Nodes, each after what it takes.
      scans: The scans that updates are moved into.
      passes: The passes over the rows of gradients that wait.
    """
    late: set[jex.Var] = set()
    for each in scans:
        late.update(v for f in each.late for v in f.component.results)
        sums = (s.position for f in each.fused for s in f.component.sums)
        late.update(v for i in sums if passes.of[i] for v in step.defines(i))
    before: list[Outer] = []
    after: list[Outer] = []
    for node in some:
        waits = not late.isdisjoint(node.reads)
        (after if waits else before).append(node)
        late.update(node.defines * waits)
    return before, after


def _in_turns(step: Step, node: Outer, each: FusedScan, passes: Passes) -> Outer:
    gradients = {g for f in each.fused for g in f.component.gradients}
    sums = passes.sums(each.fused, 0)
    made = [v for f in each.now for v in f.component.results]
    made += (v for s in sums for v in step.defines(s.position))
    own = (v for v in node.defines if v not in gradients)
    reads = dict.fromkeys((*node.reads, *each.given(each.first_pass(sums))))
    return Outer(node.position, tuple(reads), (*own, *made), in_turns=True)


def _in_order(some: Sequence[Outer]) -> list[Outer]:
    """Nodes in order, but each after all that it takes."""
    makers = {v: k for k, node in enumerate(some) for v in node.defines}
    found: dict[int, None] = {}
    waiting = [*range(len(some))[::-1]]
    while waiting:
        k = waiting[-1]
        left = {makers[v] for v in some[k].reads if v in makers}.difference(found, {k})
        if left and k not in found:
            waiting += sorted(left, reverse=True)
        else:
            found[waiting.pop()] = None
    return [some[k] for k in found]
