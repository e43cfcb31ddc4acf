"""Objects of Flax NNX that a step changes in place, where nobody would see it.

To JAX an NNX object is a pytree. A function that is traced gets a copy, and what it
does to the copy is lost unless the copy, or what was changed of it, is a result.
`nnx.jit` brings changes back; nothing else does. A step that returns only its loss
would compute the same loss for ever.

Flax is not needed: a tree holds its objects only where it was imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax

from optax_offload import _trees

_OBJECTS = (
    ("flax.nnx.pytreelib", "Pytree"),  # Modules, optimizers, lists, random streams.
    ("flax.nnx.variablelib", "Variable"),
)
# States are values: what is merged of them shares their variables.
_STATES = (("flax.nnx.statelib", "State"), ("flax.nnx.statelib", "FlatState"))


def has_objects(tree: Any) -> bool:
    """Returns whether anything in a tree is an object that a function may change."""
    return next(_objects(tree), None) is not None


def watched(
    step: Callable[..., Any], report: Callable[[list[str]], None]
) -> Callable[..., Any]:
    """A step that reports the changes to its arguments that no result has.

    Args:
      step: The step.
      report: Given the paths of what was changed.
    """

    @functools.wraps(step)
    def watching(*args: Any, **kwargs: Any) -> Any:
        given = [(path, x, *_content(x)) for path, x in _arguments(args, kwargs)]
        results = step(*args, **kwargs)
        report(_lost(given, results))
        return results

    return watching


def refuse(lost: Collection[str]) -> None:
    """Raises if there is anything that a step changed and did not return.

    Args:
      lost: The paths of what it changed.
    """
    if lost:
        raise TypeError(
            "the step changes objects of Flax NNX in place, and optax_offload's jit "
            "and stream lose what is not returned, so that it would train nothing: "
            f"{_trees.listed([*lost])}. {_LINES}. If the step only evaluates, call "
            "model.eval() before it: then statistics and random streams stay as they "
            "are"
        )


def refuse_leaves(error: TypeError, args: Any, kwargs: Any) -> None:
    """Raises if JAX's error is of objects of classes with `pytree=False`.

    Args:
      error: JAX's error.
      args: The positional arguments of a step.
      kwargs: Its other arguments.
    """
    leaves = [path for path, x in _arguments(args, kwargs) if _is_leaf(x)]
    if leaves and "abstract array" in str(error):
        raise TypeError(
            "the step is given objects of Flax NNX that are no pytrees, which jax.jit "
            f"and optax_offload.jit do not take: {_trees.listed(leaves)}. {_LINES}"
        )


_LINES = (
    "Split outside of the step, merge inside, and return the state:\n"
    "    graph, state = nnx.split((model, optimizer))\n\n"
    "    @oo.jit(donate_argnums=0)\n"
    "    def step(state, x):\n"
    "        model, optimizer = nnx.merge(graph, state)\n"
    "        ...\n"
    "        return nnx.state((model, optimizer)), loss\n\n"
    "    state, loss = step(state, x)\n"
    "    nnx.update((model, optimizer), state)\n"
    "Or jit the step with nnx.jit alone, which updates no layer in the backward pass"
)


def _arguments(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The objects among a step's arguments, with what messages call them."""
    found = [*_objects(args), *_objects(kwargs)]
    return [(f"argument {path}", x) for path, x in found]


def _objects(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a tree that are in no other, with their paths."""
    objects, states = _trees.classes(*_OBJECTS), _trees.classes(*_STATES)
    if not objects:
        return
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, (*objects, *states))
    )
    for keys, x in flat:
        if isinstance(x, objects):
            yield _trees.path_string(keys), x


def _is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


def _content(x: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of an object by path, and its structure."""
    if _is_leaf(x):
        return {}, None  # Flax itself refuses to change it in a trace.
    return dict(_trees.leaves_with_paths(x)), jax.tree.structure(x)


def _lost(given: list[tuple[str, Any, dict[str, Any], Any]], results: Any) -> list[str]:
    """The paths of what was changed and is not returned.

    Args:
      given: Path, object, leaves and structure of each argument, before the step.
      results: What the step returned.
    """
    returned = {id(x) for _, x in _objects(results)}
    values = {id(x) for x in jax.tree.leaves(results)}
    lost: list[str] = []
    for path, x, before, structure in given:
        if id(x) in returned:
            continue
        after, now = _content(x)
        changed = [k for k, v in after.items() if v is not before.get(k)]
        gone = [k for k in before if k not in after]
        some = [*(k for k in changed if id(after[k]) not in values), *gone]
        if not (changed or gone) and structure != now:
            some = [""]  # A number or a flag of Python's.
        lost += ["/".join(filter(None, (path, k))) for k in some]
    return lost
