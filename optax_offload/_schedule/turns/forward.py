"""The forward passes of a step, and what each leaves for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import Step
from optax_offload._schedule import follow
from optax_offload._schedule.rest import Outer
from optax_offload._schedule.turns import liveness


class Pass(NamedTuple):
    """A forward pass and the backward pass after it.

    Attributes:
      begin: Its first node.
      backward: The first node of the backward pass: until something is transposed. What
        the backward pass computes again has no such name, and comes after that.
      most: The node before which the most is alive.
    """

    begin: int
    backward: int
    most: int


def passes(
    step: Step, nodes: Sequence[Outer], gradients: Set[jex.Var], live: Sequence[int]
) -> list[Pass]:
    """The passes of a step that end in a backward one: one for each microbatch.

    Args:
      step: The step.
      nodes: What it evaluates, in order.
      gradients: What is computed for updates.
      live: The bytes that are alive before each node.
    """
    found: list[Pass] = []
    begin, backward = 0, None
    for k, node in enumerate(nodes):
        e = step.program.equations[node.position]
        if backward is not None and follow.is_derived_first(e):
            found.append(_pass(begin, backward, k, live))
            begin, backward = k, None
        made = node.defines
        if not gradients.isdisjoint(made) or follow.is_transposed_last(e):
            backward = k if backward is None else backward
    if backward is not None:
        found.append(_pass(begin, backward, len(nodes), live))
    return found


def _pass(begin: int, backward: int, end: int, live: Sequence[int]) -> Pass:
    most = max(range(begin, end), key=live.__getitem__)
    return Pass(begin, backward, most)


def residuals(
    spans: Iterable[liveness.Span], some: Sequence[Pass]
) -> Iterator[jex.Var]:
    """Yields what forward passes leave in memory where the most is alive.

    And their backward passes take: what one layer makes for the next is no residual.

    Args:
      spans: How long each variable is there that is in memory.
      some: The passes.
    """
    of = {k: x for x in some for k in range(x.begin, min(x.most, x.backward))}
    for v, made, last, over in spans:
        large = (memory.movable_nbytes(v.aval) or 0) >= limits.now.least_residual_bytes
        after = last - over
        if large and made in of and max(of[made].most + 1, of[made].backward) <= after:
            yield v


def near_layers(
    spans: Iterable[liveness.Span],
    nodes: Sequence[Outer],
    some: Sequence[Pass],
    resting: Set[jex.Var],
) -> Iterator[liveness.Span]:
    """Yields spans, but of what rests only those near the layers that take it.

    Args:
      spans: How long each variable is there.
      nodes: What the step evaluates, in order.
      some: The passes.
      resting: The residuals of these that rest.
    """
    taken: dict[jex.Var, list[int]] = {}
    for k, node in enumerate(nodes):
        for v in (x for x in node.reads if x in resting):
            taken.setdefault(v, []).append(k)
    for span in spans:
        if span.var not in resting:
            yield span
            continue
        full = next(x.most for x in some if x.most >= span.made)
        before = [span.made, *(k for k in taken[span.var] if k <= full)]
        after = [*(k for k in taken[span.var] if k > full), span.last]
        yield span._replace(last=max(before), over=False)
        yield span._replace(made=min(after))
