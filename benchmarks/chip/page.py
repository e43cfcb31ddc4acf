"""The page `docs/on-a-chip.md`, made of all JSONs: predicted beside measured.

Its words and the rows of its tables stand in `page.md`. A figure in braces there is
"{key:format*unit|text}", with the text that stands for it where there is none.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chip.record import done
from benchmarks.common.alone import ROOT
from optax_offload._ground.units import GIB

PAGE = ROOT / "docs" / "on-a-chip.md"
TOP, PARTS = Path(__file__).with_suffix(".md").read_text().split("\n## Parts\n")
NOT_RUN = "not run yet"
# In these units a figure is so many times as large; without one it is as it is.
UNITS = {"": 1, "MiB": 2**-20, "giga": 1e-9, "ms": 1e3, "us": 1e6}
Table = dict[str, Any]


class Fill(string.Formatter):
    """Fills in a row of `page.md` from the parts of a case's name and its figures."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A figure, which may be one of several: "profile[hidden_share]"."""
        try:
            return super().get_field(field_name, args, kwargs)
        except (LookupError, TypeError):
            return NOT_RUN, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """The text of a figure."""
        form, has_text, text = format_spec.partition("|")
        form, _, unit = form.partition("*")
        if value is None or value == NOT_RUN:
            return text if has_text else value or "not counted"
        if isinstance(value, bool):
            return "yes" if value else "**no**"
        return value if isinstance(value, str) else format(value * UNITS[unit], form)


fill = Fill()


def read(folder: Path) -> list[Table]:
    """All JSONs, by device and date."""
    tables = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if any(table["dry"] for table in tables):
        raise ValueError(f"{folder} has figures of toys, which are for no page")
    return sorted(tables, key=lambda t: (t["device"], t["date"]))


def text(tables: Iterable[Table]) -> str:
    """The page."""
    devices: dict[str, list[Table]] = {}
    for table in tables:
        devices.setdefault(table["device"], []).append(table)
    sections = [section(*of) for of in devices.items()]
    return "\n".join([TOP, *(sections or [f"No chip: {NOT_RUN}.\n"])])


def section(device: str, tables: Sequence[Table]) -> str:
    """A chip: each part as the newest of its tables has it."""
    newest = {name: t for t in tables for name, cases in t["parts"].items() if cases}
    used = [t for t in tables if not t["parts"] or t in newest.values()]
    lines = [f"## {device}", ""]
    for before, table in zip([{}, *used], used, strict=False):
        lines += [origin(table, before), ""]
    missing: list[str] = []
    for part in PARTS.split("\n### ")[1:]:
        heading, _, shown = part.strip().partition("\n\n")
        name, title = heading.split(": ")
        if name not in newest:
            missing.append(title)
            continue
        table = newest[name]
        cases = table["parts"][name]
        lines += [f"### {title} on {device}", ""]
        if table is not used[0]:
            lines += [f"At commit `{table['commit'][:7]}`.", ""]
        above, _, pattern = shown.rpartition("\n")
        lines.append(above)
        for case, figures in done(cases).items():
            lines.append(fill.format(pattern, *case.split("/"), **figures))
        out = left_out(cases)
        lines += ["", *out, *[""] * bool(out)]
    if missing:
        lines += [f"{NOT_RUN.capitalize()}: {', '.join(missing)}."]
    return "\n".join(lines).rstrip() + "\n"


def origin(table: Table, before: Table) -> str:
    """How the figures were made; versions only if the run before had others."""
    made = f"{table['date']}, commit `{table['commit'][:7]}`"
    if table["dry"]:
        made = f"Toys, on the CPU: these figures mean nothing. {made}"
    versions = ", ".join(f"{k} {v}" for k, v in table["versions"].items())
    driver = table.get("driver", {}).get("driver_version")
    versions += f", driver {driver}" if driver else ""
    if all(table.get(k) == before.get(k) for k in ("versions", "driver")):
        versions = "the same versions"
    host = table["host"]
    return (
        f"{made}, {versions}; {table['devices']} device(s) of "
        f"{gib(table['memory_bytes'])}, the first of which was used; host: "
        f"{host['processor']}, {host['cores']} cores, {gib(host['total_bytes'])}, "
        f"{max(1, len(host['numa_nodes']))} NUMA node(s)."
    )


def left_out(cases: Mapping[str, Table]) -> list[str]:
    """What did not end well, and why."""
    return [
        f"- {name}: {entry['outcome']}: {short(entry.get('reason', NOT_RUN))}"
        for name, entry in cases.items()
        if entry["outcome"] != "done"
    ]


def short(reason: str) -> str:
    """On one line, without what Markdown would take for its own."""
    words = " ".join(reason.split())
    words = words if len(words) < 200 else words[:200] + "..."
    return "`" + words.replace("`", "'") + "`"


def gib(value: int) -> str:
    """Bytes in GiB, with the unit."""
    return f"{value / GIB:.1f} GiB"
