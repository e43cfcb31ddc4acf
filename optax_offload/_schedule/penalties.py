"""What is computed of parameters alone: evaluated beside the layers that take these.

A loss that has the squares of all parameters in it takes each of them after the forward
pass, and makes an array as large of each before the backward pass: both where there is
no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jax.extend import core as jex

from optax_offload._ground import limits
from optax_offload._places import memory
from optax_offload._program import Step, facts, flops_of, shape
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.rest import Outer
from optax_offload._schedule.segments import nbytes


def beside_layers(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> list[Outer]:
    """Equations in order, but those of parameters and numbers where layers take them.

    What reduces parameters is evaluated before what else takes the first of them, also
    if it was long before, with what that makes of numbers. Arithmetic of parameters and
    of numbers, as their gradient, is evaluated before what takes it, and added to
    another one where that is made.

    Args:
      step: The step.
      nodes: Its equations.
      loaded: What is loaded for variables that an equation takes.
    """
    places = [(k, 1) for k in range(len(nodes))]
    for k, first in _reductions(step, nodes, loaded).items():
        places[k] = (first, 0)
    for k, place in _gradients(step, nodes).items():
        places[k] = place
    made = {v: k for k, node in enumerate(nodes) for v in node.defines}
    for k, node in enumerate(nodes):
        before = [places[made[v]] for v in node.reads if v in made]
        places[k] = max(places[k], *before) if before else places[k]
    return [nodes[k] for k in sorted(range(len(nodes)), key=places.__getitem__)]


def _reductions(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> dict[int, int]:
    """What is reduced of parameters alone, with what else takes the first of them."""
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
        for k in sorted(some):
            for v in takes[k]:
                first.setdefault(v, k)
    found = {k: min(first[v] for v in takes[k]) for k in sorted(reduces)}
    return {k: at for k, at in found.items() if _may_wait(step, nodes, k, at)}


def _may_wait(step: Step, nodes: Sequence[Outer], k: int, at: int) -> bool:
    """Returns whether nothing but numbers is made of a number before a position."""
    waits = {*nodes[k].defines}
    for node in nodes[k + 1 : at]:
        if not waits.isdisjoint(node.reads):
            if not _is_number(step, node):
                return False
            waits.update(node.defines)
    return True


def _is_number(step: Step, node: Outer) -> bool:
    """Returns whether it makes nothing large, and may move."""
    return not any(map(_is_large, node.defines)) and _may_move(step, node)


def _gradients(step: Step, nodes: Sequence[Outer]) -> dict[int, tuple[int, int]]:
    """Arithmetic of what is given and of numbers, with the first that takes it.

    What adds it to something else, as to the gradient of a layer, follows that.
    """
    made = {v: k for k, node in enumerate(nodes) for v in node.defines}
    takers: list[list[int]] = [[] for _ in nodes]
    for k, node in enumerate(nodes):
        for i in {made[v] for v in node.reads if v in made}:
            takers[i].append(k)
    # Those that are arithmetic, and whether parameters are in it.
    light: dict[int, bool] = {}
    # The last number that these wait for.
    known: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for k, node in enumerate(nodes):
        if not _is_light(step, node):
            continue
        large = [v for v in node.reads if _is_large(v)]
        own = {made[v] for v in large if v in made}
        numbers = {made[v] for v in node.reads if v in made} - own
        others = own - light.keys()
        waits = max([*numbers, *(known[i] for i in own - others)], default=-1)
        has_parameters = any(v not in made for v in large) or any(
            light[i] for i in own - others
        )
        if not others:
            light[k], known[k] = has_parameters, waits
        elif len(others) == 1 and has_parameters and _is_sum(step, node):
            (at,) = others
            if waits < at and not nodes[at].left:
                found[k] = (found.get(at, (at, 0))[0], 2)
    for k, has_parameters in reversed(light.items()):
        # What only they take, as a number spread out, is beside them.
        if takers[k] and (has_parameters or all(i in found for i in takers[k])):
            found[k] = min(found.get(i, (i, 0)) for i in takers[k])
    return found


def _is_light(step: Step, node: Outer) -> bool:
    """Returns whether it is arithmetic that makes a large array."""
    e = step.program.equations[node.position]
    cheap = is_arithmetic(e) or facts(e).again or e.primitive.name == "add_any"
    return cheap and any(map(_is_large, e.outvars)) and _may_move(step, node)


def _is_sum(step: Step, node: Outer) -> bool:
    return facts(step.program.equations[node.position]).leads == "adds"


def _may_move(step: Step, node: Outer) -> bool:
    return not (
        node.left
        or node.in_turns
        or step.tokens(node.position)
        or any(memory.on_host(v.aval) for v in (*node.reads, *node.defines))
    )


def _is_large(v: jex.Var) -> bool:
    return bool(shape(v)) and nbytes([v]) > limits.now.small_bytes
