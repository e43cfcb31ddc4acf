"""A report as tables of text and HTML, and as a bar chart.

This module decides only how a report looks. `report.py` decides what it says.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from optax_offload._ground.units import MIB, html_paragraph, html_table, size_text
from optax_offload._report.rows import ReportRow

# Shown for the path of a tree that is one leaf.
THE_TREE_ITSELF = "(the tree itself)"


def text(rows: Sequence[ReportRow], totals: Sequence[Sequence[str]], below: str) -> str:
    """The tables of a report, one below the other.

    Args:
      rows: The leaves. Those whose paths differ in numbers only, and that are alike in
        all else, share a line.
      totals: Cells of the second table: subtree, kind, and the size of each column.
      below: What is said below the tables; no text if it is empty.
    """
    tables = [table(lines, right) for lines, right in _tables(rows, totals)]
    return "\n\n".join([*tables, below] if below else tables)


def html(
    headline: str,
    rows: Sequence[ReportRow],
    totals: Sequence[Sequence[str]],
    below: str,
) -> str:
    """The same as HTML, for a notebook.

    Args:
      headline: The line above the tables.
      rows: The leaves, as of `text`; those that are misplaced are bold.
      totals: Cells of the second table.
      below: Lines below the tables.
    """
    (leaves, numbers), sums = _tables(rows, totals)
    wrong = [i for i, alike in enumerate(_alike(rows)) if alike[0].misplaced]
    return "".join(
        [
            html_paragraph(headline),
            html_table(*sums),
            html_table(leaves, numbers, wrong),
            *map(html_paragraph, filter(None, below.splitlines())),
        ]
    )


def _tables(
    rows: Sequence[ReportRow], totals: Sequence[Sequence[str]]
) -> list[tuple[Sequence[Sequence[str]], tuple[int, ...]]]:
    """The lines of both tables, each with its columns of numbers."""
    groups = _alike(rows)
    header = ["path", "shape", "dtype", "size", "size/device"]
    leaves = [[*header, "planned", "actual", "why"], *map(_cells, groups)]
    if len(groups) < len(rows):
        counts = ["leaves", *(str(len(alike)) for alike in groups)]
        leaves = [
            [path, count, *rest]
            for count, (path, *rest) in zip(counts, leaves, strict=True)
        ]
    sums = [["subtree", "kind", "size", "size/device", "size/host"], *totals]
    width = len(leaves[0])
    return [(leaves, (width - 5, width - 4)), (sums, (2, 3, 4))]


def _alike(rows: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """Groups rows whose paths differ only in their numbers."""
    found: dict[object, list[ReportRow]] = {}
    for row in rows:
        words = re.sub(r"\d+", "0", row.path)
        found.setdefault(dataclasses.replace(row, path=words), []).append(row)
    return [*found.values()]


def _path(alike: Sequence[ReportRow]) -> str:
    """The path of rows that are alike, with a range for each number that differs."""
    words = re.split(r"\d+", alike[0].path)
    columns = zip(*(re.findall(r"\d+", row.path) for row in alike), strict=True)
    ranges = ["", *map(_range, columns)]
    return "".join(n + word for n, word in zip(ranges, words, strict=True))


def _range(numbers: Sequence[str]) -> str:
    ordered = sorted(set(numbers), key=int)
    first, last = ordered[0], ordered[-1]
    if len(ordered) == 1:
        return first
    gaps = int(last) - int(first) >= len(ordered)
    shown = ",".join(ordered) if gaps and len(ordered) <= 4 else f"{first}..{last}"
    return f"{{{shown}}}"


def _cells(alike: Sequence[ReportRow]) -> list[str]:
    row = alike[0]
    return [
        _path(alike) or THE_TREE_ITSELF,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype + (f" ({row.codec})" if row.codec else ""),
        size_text(sum(row.nbytes for row in alike)),
        size_text(sum(row.nbytes_per_device for row in alike)),
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
