"""Extra arguments of a wrapped update: those that are traced, and static ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import optax

# In a message: an object of Flax NNX has its arrays in its own.
MOST_OF_A_REPR = 100


class Transformation(Protocol):
    """An optax transformation, or `optax.MultiSteps`: what has ``init`` and ``update``.

    A factory such as ``optax.adamw`` and a name such as ``"adam"`` have neither, so a
    type checker finds them where a transformation is expected.
    """

    @property
    def init(self) -> Callable[..., Any]:
        """Makes the state for parameters."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """Makes updates of parameters, and new state, from gradients and state."""
        ...


def as_transformation(
    inner: Any, wrapper: str
) -> optax.GradientTransformationExtraArgs:
    """A transformation that takes extra arguments, or an error.

    Args:
      inner: The transformation that a user gave.
      wrapper: The name of the function that it was given to.

    Raises:
      TypeError: It is no transformation.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its own gradient_transformation() is typed as one without extra arguments, and
        # optax then drops them.
        update: Any = inner.update
        inner = optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        hint = ""
        if isinstance(inner, tuple) and hasattr(inner, "partition"):
            hint = (
                ". AXLearn gives its parameters other types than arrays: wrap the "
                "optax transformation that with_partition_fn is given, as in "
                f"with_partition_fn({wrapper}(optax.adam(3e-4)), partition_fn)"
            )
        elif callable(inner):
            hint = f". Call it first, as in {wrapper}(optax.adamw(3e-4))"
        elif isinstance(inner, str):
            hint = f". Pass the transformation, as in {wrapper}(optax.adamw(3e-4))"
        elif hasattr(inner, "tx"):  # Flax NNX's, or a TrainState.
            hint = f". Wrap what that is made of: tx={wrapper}(optax.adamw(3e-4))"
        got = repr(inner)
        if len(got) > MOST_OF_A_REPR:
            got = str(type(inner))
        raise TypeError(
            f"{wrapper} wraps an optax.GradientTransformation or optax.MultiSteps, got "
            f"{got}{hint}"
        )
    return optax.with_extra_args_support(inner)


class Static:
    """Extra arguments that are no arrays, compared by identity: jit's cache key."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __hash__(self) -> int:
        return hash(frozenset((k, id(v)) for k, v in self.values.items()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self.values.keys() == other.values.keys()
            and all(v is other.values[k] for k, v in self.values.items())
        )


def split(
    extra_args: dict[str, Any], dynamic_types: tuple[type, ...]
) -> tuple[dict[str, Any], Static]:
    """Separates what is traced from functions, flags and the like."""

    def is_dynamic(value: Any) -> bool:
        leaves = jax.tree.leaves(value)
        return bool(leaves) and all(
            isinstance(x, dynamic_types) and not isinstance(x, bool) for x in leaves
        )

    dynamic = {k: v for k, v in extra_args.items() if is_dynamic(v)}
    static = {k: v for k, v in extra_args.items() if k not in dynamic}
    return dynamic, Static(static)
