"""The tables and lines that `optax-offload` prints for a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from optax_offload import _plan
from optax_offload._ground.units import leaves_text, size_text
from optax_offload.aot import CHIPS, Target
from optax_offload.cli.checkpoint import SavedLeaf
from optax_offload.cli.explanation import Explanation, PlacedLeaf
from optax_offload.cli.text import Breakable, paste, say


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Makes a table. Columns whose names end in a space are numbers, set to the right.

    Numbers are never broken.

    Args:
      title: The line above it; no line if it is empty.
      columns: The headers.
      rows: The cells, each of which is printed as its `str`.
    """
    made = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    numbers = [column.endswith(" ") for column in columns]
    for column, is_number in zip(columns, numbers, strict=True):
        justify = "right" if is_number else "left"
        made.add_column(column.strip(), justify=justify, no_wrap=is_number)
    for row in rows:
        cells = zip(row, numbers, strict=True)
        # No markup: a path may look like it.
        made.add_row(
            *(
                Text(str(cell)) if is_number else Breakable(str(cell))
                for cell, is_number in cells
            )
        )
    return made


def print_plan(console: Console, plan: _plan.Plan) -> None:
    """Prints a plan: what it chose, what fills the device, and the alternatives."""
    room = size_text(plan.budget_bytes)
    if plan.budget_bytes < plan.target.memory_bytes:
        room += f" of {size_text(plan.target.memory_bytes)}"
    head = f"{plan.target.name}, {room} on each device: {plan.verdict}"
    for line in (*plan.undonated(), *plan.unfused()):
        say(console, line, "bold")
    say(console, head, "bold")
    about = *plan.host(), *plan.timing(), *plan.advice(), *plan.numerics()
    for line in about:
        say(console, line)
    if plan.moved:
        leaves = leaves_text(sum(len(p.leaves) for p in plan.moved))
        size = size_text(sum(p.nbytes_per_device for p in plan.moved))
        say(console, f"state moved to host memory, {leaves}, {size} of each device:")
    for p in plan.moved:
        paste(console, p.pattern)
    given = [rule for rule in plan.given if rule.memory_kind != "device"]
    if given:
        say(console, "state moved to host memory by the given rules:")
    for rule in given:
        paste(console, rule.regex)
    told = ""
    for rule in plan.config.parameters:
        where = " moved to host memory" * (rule.memory_kind != "device")
        kept = f" as {rule.codec}" if rule.codec else ""
        if told != (told := f"parameters{where}{kept}:"):
            say(console, told)
        paste(console, rule.regex)
    before, after = plan.before, plan.after
    peaks = ("peak", size_text(before.used_bytes), size_text(after.used_bytes))
    columns = ("each device", "as given ", "with the plan ")
    console.print(table("", columns, [*_plan.filling(plan), peaks]))
    if not plan.before.fits:
        print_alternatives(console, plan.alternatives)
    for line in plan.settings():
        say(console, line, "bold")


def print_alternatives(console: Console, found: _plan.Alternatives) -> None:
    """Prints the ways that were compiled, and what modeled times assume."""
    # What is moved takes a line of its own: beside five numbers it has no room.
    *numbers, what = _plan.HEADERS
    rows = [[n.strip() for n in numbers], *(cells[1:-1] for cells in found.cells())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *figures = (
        "  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True))
        for row in rows
    )
    for line in ("", f"{what}, and why it is not chosen", header, "-" * len(header)):
        console.print(f"   {line}".rstrip(), highlight=False)
    for row, line in zip(found.rows, figures, strict=True):
        why = "" if row.chosen else f" ({row.why})"
        say(console, f"{row.text}{why}", mark="-> " if row.chosen else "   ")
        console.print(f"   {line}", highlight=False)
    console.print()
    if any("fused" in row.text for row in found.rows):
        say(console, "fused: each layer is updated inside the backward pass (oo.jit)")
    for line in found.not_compiled:
        say(console, line)
    if found.assumptions:
        say(console, "times are modeled, not measured, and assume:")
    for assumption in found.assumptions:
        say(console, f"- {assumption}")


def print_training(console: Console, plan: _plan.Plan, file: Any) -> None:
    """Prints the lines that a train script needs to use a plan."""
    if plan.empty and not plan.config.parameters and plan.before.fits:
        return
    say(console, f"{'' if file else 'with --out FILE, '}in the training script:")
    for line in plan.training(str(file or "FILE")):
        paste(console, line)


def print_explanation(console: Console, title: str, found: Explanation) -> None:
    """Prints where leaves go, and the bytes in each memory kind."""
    rows = [
        (path, size_text(x.bytes or 0), x.codec, x.memory_kind, x.why)
        for path, x in collapsed(found.leaves)
    ]
    columns = ["path", "size of each ", "codec", "goes to", "why"]
    if not any(x.codec for x in found.leaves):
        columns.remove("codec")
        rows = [(path, size, *rest) for path, size, _, *rest in rows]
    console.print(table(title, columns, rows))
    for kind in ("pinned_host", "device"):
        total = size_text(found.bytes_in(kind))
        console.print(f"{kind}: {total}", highlight=False)


_L = TypeVar("_L", PlacedLeaf, SavedLeaf)


def collapsed(leaves: Sequence[_L]) -> list[tuple[str, _L]]:
    """Leaves whose paths differ in their numbers alone, as one line.

    Args:
      leaves: The leaves, of which the path comes first.

    Returns:
      For each line its path, in which ``*`` stands for a number that differs, with how
      many there are; and one of the leaves.
    """
    alike: dict[Any, list[_L]] = {}
    for x in leaves:
        alike.setdefault((re.sub(r"\d+", "*", x.path), *x[1:]), []).append(x)
    found: list[tuple[str, _L]] = []
    for some in alike.values():
        pieces = [re.split(r"(\d+)", x.path) for x in some]
        path = "".join(
            p[0] if len({*p}) == 1 else "*" for p in zip(*pieces, strict=True)
        )
        count = f" ({len(some)} leaves)" if len(some) > 1 else ""
        found.append((path + count, some[0]))
    return found


def print_leaves(console: Console, title: str, leaves: Sequence[SavedLeaf]) -> None:
    """Prints the leaves of a checkpoint."""
    rows = [
        (path, _shape(x.shape), x.dtype, size_text(x.nbytes), x.sharding)
        for path, x in collapsed(leaves)
    ]
    columns = ("path", "shape", "dtype", "size of each ", "sharding")
    console.print(table(title, columns, rows))
    total = size_text(sum(x.nbytes for x in leaves))
    say(
        console,
        f"{leaves_text(len(leaves))}, {total}. Orbax records no memory kinds: it "
        "restores a leaf to where your template says (optax_offload.eval_shape).",
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def target_rows() -> list[dict[str, Any]]:
    """The chips that can be compiled for, one device of each, as plain values."""
    found = []
    for name, chip in CHIPS.items():
        found.append(
            {
                "name": name,
                "platform": chip.platform,
                "memory_bytes": chip.memory_bytes,
                "budget_bytes": _plan.default_budget_bytes(Target(name)),
                "link_bytes_per_second": chip.link.bytes_per_second,
                "link_source": chip.link_source,
                "flops_per_second": chip.flops_per_second,
                "flops_source": chip.flops_source,
            }
        )
    return found


def print_targets(console: Console) -> None:
    """Prints what can be compiled for."""
    found = target_rows()
    rows = [
        (
            row["name"],
            size_text(row["memory_bytes"]),
            size_text(row["budget_bytes"]),
            f"{row['link_bytes_per_second'] / 1e9:.0f} GB/s",
            f"{row['flops_per_second'] / 1e12:.0f}",
        )
        for row in found
    ]
    columns = ("chip", "memory ", "default budget ", "link each way ")
    console.print(table("", (*columns, "bf16 TFLOP/s "), rows))
    sources: dict[str, list[str]] = {}
    for row in found:
        sources.setdefault(row["link_source"], []).append(row["name"])
    for source, names in sources.items():
        say(console, f"link of {', '.join(names)}: {source}")
    say(
        console,
        "For several chips, name a TPU's grid (v5e:4x4, v5p:2x2x2) or a number of GPUs "
        "(h100:8).",
    )
