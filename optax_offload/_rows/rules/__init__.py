"""The rules of slicing: one for each primitive, in a registry.

A value has rows along one axis, its batch axis, or it is the same for all rows. A rule
carries batch axes from the operands of an equation to its results, as `jax.vmap` does,
and back; and it says what the equation is for fewer rows. To add a primitive, add a
rule to the file that fits, and an example of it to the table in
`tests/rows/test_slicing_rules.py`. Each primitive of `jax.lax` has a rule, be it one
that refuses, with the reason.
"""

from optax_offload._rows.rules import (
    bodies,
    elementwise,
    indexing,
    matrices,
    products,
    random,
    refused,
    shapes,
    windows,
)
from optax_offload._rows.rules.registry import (
    RULES,
    Axes,
    NotRowLocalError,
    RowRule,
    rule_of,
)

__all__ = [
    "RULES",
    "Axes",
    "NotRowLocalError",
    "RowRule",
    "bodies",
    "elementwise",
    "indexing",
    "matrices",
    "products",
    "random",
    "refused",
    "rule_of",
    "shapes",
    "windows",
]
