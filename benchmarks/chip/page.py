"""The page `docs/on-a-chip.md`, made of all JSONs: predicted beside measured.

Its words and the rows of its tables stand in `page.md`, with a figure's key, format and
unit in braces.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.chip.record import done
from benchmarks.common.alone import ROOT

PAGE = ROOT / "docs" / "on-a-chip.md"
TOP, PARTS = Path(__file__).with_suffix(".md").read_text().split("\n## Parts\n")
NOT_RUN = "not run yet"
# What takes a few KiB of the device for a layer has no end there.
MOST_LAYERS = 10_000
# In these units a figure is so many times as large; without one it is as it is.
UNITS = {"": 1, "MiB": 2**-20, "giga": 1e-9, "ms": 1e3, "us": 1e6}
Table = dict[str, Any]
Figures = Mapping[str, Table]


class Fill(string.Formatter):
    """Fills in a row: "{seconds:.0f*ms}" is a figure, its format and its unit.

    What is missing was not run, or is left empty where the format begins with "?".
    """

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        """A part of the case's name, or a figure."""
        return args[key] if isinstance(key, int) else kwargs.get(key, NOT_RUN)

    def format_field(self, value: Any, format_spec: str) -> str:
        """The text of a figure."""
        form, _, unit = format_spec.removeprefix("?").partition("*")
        if value == NOT_RUN or (value is None and unit != "MiB"):
            return "" if format_spec.startswith("?") else NOT_RUN
        if value is None:
            return "not counted"
        return value if isinstance(value, str) else format(value * UNITS[unit], form)


fill = Fill()


def read(folder: Path) -> list[Table]:
    """All JSONs: those of chips first, then those that are on paper only."""
    tables = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if any(table["dry"] for table in tables):
        raise ValueError(f"{folder} has figures of toys, which are for no page")
    return sorted(tables, key=lambda t: (t["on_paper"], t["device"], t["date"]))


def text(tables: Iterable[Table]) -> str:
    """The page."""
    tables = list(tables)
    measured = {t["target"] for t in tables if not t["on_paper"]}
    sections = [TOP]
    for table in tables:
        if table["on_paper"] and table["target"] in measured:
            continue
        sections.append(section(table))
    if not tables:
        sections.append(f"No chip: {NOT_RUN}.\n")
    return "\n".join(sections)


def section(table: Table) -> str:
    """A chip."""
    device = table["device"]
    lines = [f"## {device.upper() if table['on_paper'] else device}", ""]
    lines += [origin(table), ""]
    for part in PARTS.split("\n### ")[1:]:
        heading, *shown = part.strip().splitlines()
        name, title = heading.split(": ")
        lines += [f"### {title} on {device}", ""]
        cases = table["parts"].get(name)
        if cases:
            rows = ROWS.get(name, dict)(done(cases))
            *above, pattern = shown[1:]
            lines += above
            lines += [fill.format(pattern, *n.split("/"), **f) for n, f in rows.items()]
            lines += ["", *left_out(cases)]
        else:
            lines += [f"{NOT_RUN.capitalize()}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def origin(table: Table) -> str:
    """How the figures were made."""
    versions = ", ".join(f"{k} {v}" for k, v in table["versions"].items())
    if table["on_paper"]:
        return (
            f"Compiled on {table['date']} by `python -m benchmarks.chip "
            f"--paper={table['device']}` ({versions}). Measured: {NOT_RUN}."
        )
    toy = "Toys, on the CPU: these figures mean nothing. " if table["dry"] else ""
    host = table["host"]
    driver = table.get("driver", {}).get("driver_version")
    return (
        f"{toy}{table['date']}, commit `{table['commit']}`, {versions}"
        + (f", driver {driver}" if driver else "")
        + f"; {table['devices']} device(s) of {gib(table['memory_bytes'])}, the first "
        f"of which was used; host: {host['processor']}, {host['cores']} cores, "
        f"{gib(host['total_bytes'])}, {max(1, len(host['numa_nodes']))} NUMA node(s)."
    )


def left_out(cases: Mapping[str, Table]) -> list[str]:
    """What did not end well, and why."""
    lines = [
        f"- {name}: {entry['outcome']}: {short(entry.get('reason', NOT_RUN))}"
        for name, entry in cases.items()
        if entry["outcome"] != "done"
    ]
    return [*lines, ""] if lines else []


def short(reason: str) -> str:
    """On one line, without what Markdown would take for its own."""
    words = " ".join(reason.split())
    words = words if len(words) < 200 else words[:200] + "..."
    return "`" + words.replace("`", "'") + "`"


def gib(value: Any) -> str:
    """Bytes in GiB, with the unit."""
    return f"{value / 2**30:.1f} GiB"


def values(cases: Figures) -> Figures:
    """Whether a form is within its bound, and what it is called."""
    words = {True: "yes", False: "**no**"}
    return {
        name: {**f, "verdict": words[f["within"] and f.get("as_called", True)]}
        for name, f in cases.items()
    }


def link(cases: Figures) -> Figures:
    """What was fitted to each way on a node, and what a program's text says of it."""
    return {
        f"{node}, {way}": {
            **fit,
            "by": ", ".join(
                sorted({by for r in f["rows"] if r["way"] == way for by in r["done"]})
            ),
        }
        for node, f in cases.items()
        for way, fit in f["fit"].items()
    }


def overlap(cases: Figures) -> Figures:
    """Pieces of a turn: the seconds of each alone, and ratios of several together."""
    return {
        name: {
            **{r["pieces"][0]: r["seconds"] for r in f["rows"] if len(r["pieces"]) < 2},
            **{
                pieces: f"{over['over_longest']:.2f} / {over['over_sum']:.2f}"
                for pieces, over in f["together"].items()
            },
        }
        for name, f in cases.items()
    }


def time(cases: Figures) -> Figures:
    """Steps; what was timed alone has no ratio, and plain steps hide nothing."""
    found = {}
    for name, f in cases.items():
        measured = {"ratio": "", "hidden_share": ""} if "seconds" in f else {}
        found[name] = measured | f
        found[name] |= f.get("profile") or {}
    return found


def largest(cases: Figures) -> Figures:
    """Parameters of the largest model, or the memory of a model people know."""
    found = {}
    for name, f in cases.items():
        if "predicted_layers" not in f:
            predicted = gib(f["predicted_bytes"])
            predicted += f", host {gib(f['predicted_host_bytes'])}"
            measured = "took a step" if "seconds" in f else NOT_RUN
            if f.get("device_bytes"):
                measured = gib(f["device_bytes"])
            seconds = f.get("seconds")
        else:
            predicted, seconds = "as many as the host holds", ""
            if (f["predicted_layers"] or MOST_LAYERS) < MOST_LAYERS:
                limit = f["predicted_limit"].removesuffix("_bytes")
                predicted = f"{f['predicted_parameters'] / 1e9:.2f} (by the {limit})"
            measured = NOT_RUN
            if f.get("parameters") is not None:
                measured = f"{f['parameters'] / 1e9:.2f}"
        found[name] = {"predicted": predicted, "measured": measured}
        found[name] |= {"step_seconds": seconds}
    return found


# What is made of the figures of a part before they are filled in.
ROWS: dict[str, Callable[[Figures], Figures]] = {
    "values": values,
    "link": link,
    "overlap": overlap,
    "time": time,
    "largest": largest,
}
