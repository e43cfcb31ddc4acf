"""What is computed of parameters or layers alone: evaluated beside these layers.

A loss that has the squares of all parameters in it takes each of them after the forward
pass, and makes an array as large of each before the backward pass: both where there is
no layer. So does one with a number of what each layer makes. One that has a gradient in
it has two backward passes, and makes in the first one half of each parameter's
gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._program import Step, facts, flops_of, nbytes, shape, variables
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.rest import Outer


def beside_layers(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> list[Outer]:
    """Equations in order, but those of layers or parameters alone beside these layers.

    Numbers of what layers make are evaluated as soon as that is made; those of
    parameters before what else takes the first of them, also if it was long before,
    with what is made of them. Arithmetic of parameters and of numbers, as their
    gradient, is evaluated before what takes it, and added to another one where that is
    made. So are arithmetic of what layers made long before, and products that are
    larger than what they are made of, before what takes them.

    Args:
      step: The step.
      nodes: Its equations.
      loaded: What is loaded for variables that an equation takes.
    """
    takers, before = _takers(step, nodes), _products_before(step, nodes)
    later = _products(step, nodes, takers, before, loaded)
    later |= _arithmetic(step, nodes, takers, before)
    places = [(later[k], 0) if k in later else (k, 1) for k in range(len(nodes))]
    for k, first in _reductions(step, nodes, loaded, later).items():
        places[k] = (first, 0)
    made = {v: k for k, node in enumerate(nodes) for v in node.defines}
    numbers = _numbers(step, nodes, takers)
    for k in range(len(nodes)):
        own = numbers.get(k, {k})
        reads = (v for i in own for v in nodes[i].reads if v in made)
        known = [places[made[v]] for v in reads if made[v] not in own]
        if k not in numbers:
            known.append(places[k])
        for i in own if known else ():
            places[i] = max(known)
    return [nodes[k] for k in sorted(range(len(nodes)), key=places.__getitem__)]


def _reductions(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
    later: Mapping[int, int],
) -> dict[int, int]:
    """What is reduced of parameters alone, with what else takes the first of them.

    If nothing is made of that earlier, but for what is evaluated later.
    """
    made = {v for node in nodes for v in node.defines}
    takes = [() if node.in_turns else loaded(node.reads) for node in nodes]
    reduces = {
        k
        for k, node in enumerate(nodes)
        if takes[k]
        and made.isdisjoint(node.reads)
        and _is_number(step, node)
        and not flops_of(step.program.equations[node.position])
    }
    first: dict[jex.Var, int] = {}
    for some in ({*range(len(nodes))} - reduces, reduces):
        for k in sorted(some, key=lambda k: later.get(k, k)):
            for v in takes[k]:
                first.setdefault(v, later.get(k, k))
    found = {k: min(first[v] for v in takes[k]) for k in sorted(reduces)}
    return {k: at for k, at in found.items() if _may_wait(step, nodes, k, at, later)}


def _may_wait(
    step: Step, nodes: Sequence[Outer], k: int, at: int, later: Mapping[int, int]
) -> bool:
    """Returns whether nothing but numbers is made of a number before a position."""
    waits = {*nodes[k].defines}
    for i, node in enumerate(nodes[k + 1 : at], k + 1):
        if later.get(i, i) < at and not waits.isdisjoint(node.reads):
            if not _is_number(step, node):
                return False
            waits.update(node.defines)
    return True


def _is_number(step: Step, node: Outer) -> bool:
    """Returns whether it makes nothing large, and may move."""
    return not any(map(_is_large, node.defines)) and _may_move(step, node)


def _products(
    step: Step,
    nodes: Sequence[Outer],
    takers: Mapping[jex.Var, Sequence[int]],
    before: Sequence[int],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> dict[int, int]:
    """Products larger than what they are made of, with what adds them to another array.

    If there are others in between. What lays a product out goes with it.
    """
    made = {v for node in nodes for v in node.defines}
    found: dict[int, int] = {}
    for k, node in enumerate(nodes):
        is_product = before[k] < before[k + 1]
        if not (is_product and _may_move(step, node)) or loaded(node.reads):
            continue
        *some, at = _until_added(step, nodes, takers, k)
        if before[at] <= before[k + 1]:
            continue
        reads = {v for i in some for v in nodes[i].reads if v in made}
        reads.difference_update(v for i in some for v in nodes[i].defines)
        longer = nbytes(v for v in reads if takers[v][-1] < at)
        if longer < nbytes(node.defines) and any(map(_is_large, node.defines)):
            found |= dict.fromkeys(some, at)
    return found


def _products_before(step: Step, nodes: Sequence[Outer]) -> list[int]:
    """How many products there are before each node, and in all."""
    equations = step.program.equations
    are = (bool(flops_of(equations[node.position])) for node in nodes)
    return [0, *itertools.accumulate(are)]


def _numbers(
    step: Step, nodes: Sequence[Outer], takers: Mapping[jex.Var, Sequence[int]]
) -> dict[int, set[int]]:
    """What makes numbers of arrays, each with the arithmetic that it alone takes."""
    found: dict[int, set[int]] = {}
    of: dict[int, int] = {}
    for k in reversed(range(len(nodes))):
        node = nodes[k]
        if not any(map(shape, node.defines)):
            if any(map(_is_large, node.reads)) and _may_move(step, node):
                of[k] = k
        elif _is_light(step, node):
            taken = {of.get(i) for v in node.defines for i in takers.get(v, ())}
            (number,) = taken if len(taken) == 1 else (None,)
            if number is not None:
                of[k] = number
        if k in of:
            found.setdefault(of[k], set()).add(k)
    return found


def _arithmetic(
    step: Step,
    nodes: Sequence[Outer],
    takers: Mapping[jex.Var, Sequence[int]],
    before: Sequence[int],
) -> dict[int, int]:
    """Arithmetic of parameters or of what was made long before, with what takes it.

    If that is long after, and what has to be there longer for it is no larger: as the
    gradient of each layer's mean square, which is written where the last one is known.
    """
    made = {v: k for k, node in enumerate(nodes) for v in node.defines}
    # Where a variable was made, or taken by other than arithmetic, last.
    latest: dict[jex.Var, int] = {}
    # What was made long before of what such arithmetic is computed of.
    old: dict[int, set[jex.Var]] = {}
    of_parameters: set[int] = set()
    for k, node in enumerate(nodes):
        if _is_light(step, node):
            large = [v for v in node.reads if _is_large(v)]
            own = [v for v in large if v in made]
            new = {v for v in own if made[v] not in old}
            if all(before[k] > before[latest[v] + 1] for v in new):
                old[k] = new.union(*(old.get(made[v], ()) for v in own))
                if len(own) < len(large) or any(made[v] in of_parameters for v in own):
                    of_parameters.add(k)
        else:
            latest |= dict.fromkeys(node.reads, k)
        latest |= dict.fromkeys(node.defines, k)
    found: dict[int, int] = {}
    for k in sorted(old, reverse=True):
        taken = {i for v in nodes[k].defines for i in takers.get(v, ())}
        at = min((found.get(i, i) for i in taken), default=k)
        if before[at] == before[k + 1] or len(nodes) in taken:
            continue
        # A product is laid out as it is made.
        laid_out = facts(step.program.equations[nodes[k].position]).layout
        if laid_out and any(takers[v][-1] == k for v in old[k]):
            continue
        longer = nbytes(v for v in old[k] if takers[v][-1] < at)
        # What only such arithmetic takes, as a number spread out, is beside it.
        alone = not old[k] and k not in of_parameters
        if found.keys() >= taken if alone else longer <= nbytes(nodes[k].defines):
            found[k] = at
    return found


def _takers(step: Step, nodes: Sequence[Outer]) -> dict[jex.Var, list[int]]:
    """The nodes that take each variable; what is no node does so after all of them."""
    found: dict[jex.Var, list[int]] = {}
    for k, node in enumerate(nodes):
        for v in node.reads:
            found.setdefault(v, []).append(k)
    others = step.live.difference(node.position for node in nodes)
    taken = (v for i in others for v in step.reads(i))
    for v in (*taken, *variables(step.program.outvars)):
        found.setdefault(v, []).append(len(nodes))
    return found


def _until_added(
    step: Step, nodes: Sequence[Outer], takers: Mapping[jex.Var, Sequence[int]], k: int
) -> list[int]:
    """A product, what alone takes it and so on, up to what takes another array too."""
    found = [k]
    while True:
        taken = [i for v in nodes[found[-1]].defines for i in takers.get(v, ())]
        if len(taken) != 1 or taken[0] == len(nodes):
            return [k]
        node = nodes[taken[0]]
        if not _is_light(step, node):
            return [k]
        found += taken
        if sum(map(_is_large, node.reads)) > 1:
            return found


def _is_light(step: Step, node: Outer) -> bool:
    """Returns whether it is arithmetic that makes a large array."""
    e = step.program.equations[node.position]
    cheap = is_arithmetic(e) or facts(e).again
    return cheap and any(map(_is_large, e.outvars)) and _may_move(step, node)


def _may_move(step: Step, node: Outer) -> bool:
    return not (
        node.left or node.in_turns or step.tokens(node.position) or node.at_rest
    )


def _is_large(v: jex.Var) -> bool:
    return bool(shape(v)) and nbytes([v]) > limits.now.small_bytes
