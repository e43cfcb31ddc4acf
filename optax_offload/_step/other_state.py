"""State that another optimizer made: where it differs, and the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_offload._ground import trees

# What an optimizer raises of a state that it cannot read.
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
# More are counted: a model has hundreds of leaves.
MOST_SHAPES = 5


def refuse_other_state(
    error: Exception, init: Callable[[Any], Any], state: Any, params: Any
) -> None:
    """Raises if an update failed and its state is not what its ``init`` makes.

    Structure and shapes count. Dtypes do not, since a state may be cast.

    Args:
      error: The error of the update.
      init: The ``init`` of its optimizer.
      state: The state that it was given.
      params: Its parameters, or gradients, which are like them.

    Raises:
      ValueError: They differ. The message names the leaves.
    """
    found: list[str] = []
    # An init that looks at values, or takes none of these, says nothing of the state.
    with contextlib.suppress(Exception):
        found = _differences(jax.eval_shape(init, params), state)
    if found:
        # Under jit JAX drops the cause of an error.
        first, *_ = str(error).splitlines() or [""]
        raise ValueError(
            "update was given a state that is not of this optimizer and these "
            "parameters:\n"
            + "\n".join(f"  {line}" for line in found)
            + "\nMake it with this optimizer: state = tx.init(params); or restore it "
            "with the template optax_offload.eval_shape(tx.init, params)\n"
            f"The optimizer's own error is {type(error).__name__}: {first}"
        ) from error


def _differences(expected: Any, given: Any) -> list[str]:
    """What differs between two states, in structure or shapes, a line each."""
    outlines = _outline(expected), _outline(given)
    lines: list[str] = []
    if outlines[0] != outlines[1]:
        lines += [f"expected: {outlines[0]}", f"given: {outlines[1]}"]
    if given is None:
        return lines
    wanted, got = (
        {path: jnp.shape(x) for path, x in trees.leaves_with_paths(tree)}
        for tree in (expected, given)
    )
    for name, paths, rest in (("expected", wanted, got), ("given", got, wanted)):
        only = [path for path in paths if path not in rest]
        lines += [f"only {name}: {trees.listed(only)}"] if only else []
    others = [
        f"{path!r}: expected {shape}, given {got[path]}"
        for path, shape in wanted.items()
        if got.get(path, shape) != shape
    ]
    lines += others[:MOST_SHAPES]
    lines += [f"and {len(others) - MOST_SHAPES} more"] * (len(others) > MOST_SHAPES)
    if not lines and jax.tree.structure(expected) != jax.tree.structure(given):
        lines = ["the leaves have the same paths, and the containers other types"]
    return lines


def _outline(state: Any) -> str:
    """The types that a state is a chain of."""
    if type(state) in (tuple, list):
        return f"({', '.join(map(_outline, state))})"
    if state is None:
        return "None"
    return "array" if hasattr(state, "dtype") else type(state).__name__
