"""A report for people: tables of text, and bars.

Only what is shown is decided here; what it means is in `report.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from optax_offload._report.rows import Row
from optax_offload._units import MIB

# Shown for the path of a tree that is one leaf.
THE_TREE_ITSELF = "(the tree itself)"


def text(rows: Sequence[Row], totals: Sequence[Sequence[str]], host: str) -> str:
    """The tables of a report, one below the other.

    Args:
      rows: The leaves, each of which gets a line.
      totals: Cells of the second table: subtree, kind, and the bytes of each column.
      host: What is said about the host's memory; nothing if it is empty.
    """
    leaves = [["path", "shape", "dtype", "bytes", "bytes/device"]]
    leaves[0] += ["planned", "actual", "why"]
    leaves += [_cells(row) for row in rows]
    sums = [["subtree", "kind", "bytes", "bytes/device", "bytes/host"], *totals]
    tables = [table(leaves, right=(3, 4)), table(sums, right=(2, 3, 4))]
    return "\n\n".join([*tables, host] if host else tables)


def _cells(row: Row) -> list[str]:
    return [
        row.path or THE_TREE_ITSELF,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype + (f" ({row.codec})" if row.codec else ""),
        f"{row.nbytes:,}",
        f"{row.nbytes_per_device:,}",
        row.planned or "-",
        (row.actual or "-") + (" (!)" if row.misplaced else ""),
        row.why,
    ]


def table(lines: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> str:
    """Lines of cells as text, in columns.

    Args:
      lines: The cells of each line; the first line is the header.
      right: The columns of numbers, which are set to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    header, *body = map(line, lines)
    return "\n".join([header, "-" * len(header), *body])


def plot(
    totals: Sequence[tuple[str, Mapping[str, int]]], path: str | os.PathLike[str]
) -> None:
    """Writes a bar for each subtree, in which each memory kind has a color.

    Args:
      totals: The name of each subtree, with its bytes in each memory kind. The last
        one is the whole tree, which has all kinds.
      path: The picture; its ending says the format, such as ``.png`` or ``.svg``.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError(
            "MemoryReport.plot draws with matplotlib: pip install 'optax-offload[plot]'"
        ) from e
    figure = Figure(figsize=(7, 1.5 + 0.4 * len(totals)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(totals))
    _, kinds = totals[-1]
    for kind in kinds:
        mib = np.array([part.get(kind, 0) / MIB for _, part in totals])
        axes.barh(range(len(totals)), mib, left=left, label=kind)
        left = left + mib
    axes.set_yticks(range(len(totals)), [name or THE_TREE_ITSELF for name, _ in totals])
    axes.set(xlabel="MiB, over all devices")
    axes.invert_yaxis()
    if kinds:
        axes.legend()
    figure.savefig(os.fspath(path), dpi=150)
