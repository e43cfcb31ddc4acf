"""Finds the values that have rows, and rewrites equations for some of the rows."""

from optax_offload._rows.analysis import Analysis, RowCount, RowLocal
from optax_offload._rows.kernel import Kernel, kernel_of
from optax_offload._rows.proof import analyze, analyze_made
from optax_offload._rows.rules.registry import (
    NotRowLocalError,
    is_arithmetic,
    is_elementwise,
)
from optax_offload._rows.small_rows import whole_stacks, with_whole_stacks
from optax_offload._rows.stacks import made_by_rows
from optax_offload._rows.sums import Sum, makes_number, summed

__all__ = [
    "Analysis",
    "Kernel",
    "NotRowLocalError",
    "RowCount",
    "RowLocal",
    "Sum",
    "analyze",
    "analyze_made",
    "is_arithmetic",
    "is_elementwise",
    "kernel_of",
    "made_by_rows",
    "makes_number",
    "summed",
    "whole_stacks",
    "with_whole_stacks",
]
