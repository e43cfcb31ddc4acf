"""Compiling for a TPU or a GPU that is not there."""

from optax_offload.aot.compile import (
    DoesNotFitError,
    Peak,
    compile,
    host_computations,
    mesh_of,
    peak,
)
from optax_offload.aot.targets import Target

__all__ = [
    "DoesNotFitError",
    "Peak",
    "Target",
    "compile",
    "host_computations",
    "mesh_of",
    "peak",
]
