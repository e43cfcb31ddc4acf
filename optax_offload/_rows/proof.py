"""The proof that what is computed from loads treats every row alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend import core as jex

from optax_offload._program import Atom, Program, shape
from optax_offload._rows.analysis import Analysis, RowCount, RowLocal
from optax_offload._rows.rules.registry import NotRowLocalError


def analyze(
    program: Program,
    positions: Sequence[int],
    loads: Mapping[jex.Var, int],
    outputs: Sequence[Atom],
    beside: Mapping[jex.Var, jex.Var],
) -> RowLocal:
    """Proves that equations are row-local, or raises `NotRowLocalError`.

    Operands of the equations besides the loads are followed back through arithmetic, so
    that they are computed for the slice too rather than whole beforehand. This ends at
    arguments and at the results of the program, which have to be computed anyway.

    Args:
      program: The program that the equations are of.
      positions: The equations that depend on a load, in order.
      loads: The axis along which the rows of each load are counted.
      outputs: The values that are computed from the loads.
      beside: For some inputs, a variable that replaces the input. If rows of the input
        are taken and arithmetic leads to the variable, it becomes an output too.

    Raises:
      NotRowLocalError: The message names the equation that mixes rows.
    """
    analysis = Analysis(_row_count(loads), program.equations, program.producers)
    analysis.whole = program.results
    for v, axis in loads.items():
        analysis.mark(v, axis)
    for i in positions:
        analysis.visit(program.equations[i])
        analysis.positions.add(i)
    _check_apart(analysis)
    found: list[jex.Var] = []
    for a in outputs:
        if isinstance(a, jex.Literal) or a not in analysis.axes:
            raise NotRowLocalError("an output that is the same for every row")
        found.append(a)
    longer, further = analysis, list(found)
    for before in [v for v in analysis.axes if v in beside]:
        more = longer.with_result(beside[before], before)
        if more is not None:
            longer = more
            further.append(beside[before])
    if longer.conflict() is None:
        analysis, found = longer, further
    return analysis.row_local(loads, found)


def analyze_made(program: Program, outputs: Mapping[jex.Var, int]) -> RowLocal:
    """Proves that values that no load leads to can be computed row by row.

    They are followed back through all equations, to arguments and to other results of
    the program.

    Args:
      program: The program.
      outputs: The axis along which the rows of each value are counted.

    Raises:
      NotRowLocalError: The message names the equation that mixes rows.
    """
    analysis = Analysis(_row_count(outputs), program.equations, program.producers)
    analysis.whole = program.results.difference(outputs)
    analysis.follow_all = True
    for v, axis in outputs.items():
        analysis.demand(v, axis)
    _check_apart(analysis)
    return analysis.row_local((), [*outputs])


def _row_count(values: Mapping[jex.Var, int]) -> RowCount:
    counts = {shape(v)[axis] for v, axis in values.items()}
    if len(counts) != 1:
        sizes = ", ".join(str(shape(v)) for v in values)
        raise NotRowLocalError(f"leaves with different numbers of rows: {sizes}")
    return RowCount(counts.pop())


def _check_apart(analysis: Analysis) -> None:
    mixes = analysis.conflict()
    if mixes is not None:
        raise NotRowLocalError(f"{mixes.primitive.name} takes whole what has rows")
