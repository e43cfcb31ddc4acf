"""What is to be computed, as a value: its equations, and making others of them."""

from optax_offload._program.build import Builder, flatten
from optax_offload._program.graph import (
    Atom,
    Components,
    Program,
    ancestors,
    dependents,
    described,
    evaluate,
    live,
    needed,
    nested,
    read,
    shape,
    signature,
    variables,
    within,
)

__all__ = [
    "Atom",
    "Builder",
    "Components",
    "Program",
    "ancestors",
    "dependents",
    "described",
    "evaluate",
    "flatten",
    "live",
    "needed",
    "nested",
    "read",
    "shape",
    "signature",
    "variables",
    "within",
]
