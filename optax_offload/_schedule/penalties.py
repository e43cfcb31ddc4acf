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
from optax_offload._program import Step, facts, shape
from optax_offload._rows import is_arithmetic
from optax_offload._schedule.rest import Outer
from optax_offload._schedule.segments import nbytes


def beside_layers(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> list[Outer]:
    """Equations in order, but those of parameters and numbers where layers take them.

    What reduces parameters is evaluated before what takes the first of them, and
    arithmetic of parameters and of numbers, as their gradient, before what takes it.

    Args:
      step: The step.
      nodes: Its equations.
      loaded: What is loaded for variables that an equation takes.
    """
    places = [(k, 1) for k in range(len(nodes))]
    for k, first in _reductions(step, nodes, loaded).items():
        places[k] = (first, 0)
    for k, first in _gradients(step, nodes).items():
        places[k] = (first, 0)
    return [nodes[k] for k in sorted(range(len(nodes)), key=places.__getitem__)]


def _reductions(
    step: Step,
    nodes: Sequence[Outer],
    loaded: Callable[[Sequence[jex.Var]], Collection[jex.Var]],
) -> dict[int, int]:
    """What is reduced of parameters alone, with the first that takes some of them."""
    made = {v for node in nodes for v in node.defines}
    first: dict[jex.Var, int] = {}
    found: dict[int, int] = {}
    for k, node in enumerate(nodes):
        taken = () if node.in_turns else loaded(node.reads)
        reduces = made.isdisjoint(node.reads) and not any(map(_is_large, node.defines))
        if taken and reduces and _may_move(step, node):
            at = min(first.get(v, k) for v in taken)
            if at < k:
                found[k] = at
        for v in taken:
            first.setdefault(v, k)
    return found


def _gradients(step: Step, nodes: Sequence[Outer]) -> dict[int, int]:
    """Arithmetic of what is given and of numbers, with the first that takes it."""
    made = {v: k for k, node in enumerate(nodes) for v in node.defines}
    takers: list[list[int]] = [[] for _ in nodes]
    for k, node in enumerate(nodes):
        for i in {made[v] for v in node.reads if v in made}:
            takers[i].append(k)
    # Those that are arithmetic, and whether parameters are in it.
    light: dict[int, bool] = {}
    for k, node in enumerate(nodes):
        large = [v for v in node.reads if _is_large(v)]
        own = {made[v] for v in large if v in made}
        if _is_light(step, node) and own <= light.keys():
            light[k] = any(v not in made for v in large) or any(light[i] for i in own)
    found: dict[int, int] = {}
    for k, has_parameters in reversed(light.items()):
        # What only they take, as a number spread out, is beside them.
        if takers[k] and (has_parameters or all(i in found for i in takers[k])):
            found[k] = min(found.get(i, i) for i in takers[k])
    return found


def _is_light(step: Step, node: Outer) -> bool:
    """Returns whether it is arithmetic that makes a large array."""
    e = step.program.equations[node.position]
    cheap = is_arithmetic(e) or facts(e).again or e.primitive.name == "add_any"
    return cheap and any(map(_is_large, e.outvars)) and _may_move(step, node)


def _may_move(step: Step, node: Outer) -> bool:
    return not (
        node.left
        or node.in_turns
        or step.tokens(node.position)
        or any(memory.on_host(v.aval) for v in (*node.reads, *node.defines))
    )


def _is_large(v: jex.Var) -> bool:
    return bool(shape(v)) and nbytes([v]) > limits.now.small_bytes
