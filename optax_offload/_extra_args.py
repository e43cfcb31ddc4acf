"""Extra arguments of an update: what is traced, and what is known while tracing."""

from __future__ import annotations

from typing import Any

import jax


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
