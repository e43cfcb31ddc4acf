"""The page `docs/on-a-chip.md`, made of all JSONs: predicted beside measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chip.machine import ROOT
from benchmarks.chip.record import done

PAGE = ROOT / "docs" / "on-a-chip.md"
NOT_RUN = "not run yet"
# What takes a few KiB of the device for a layer has no end there.
MOST_LAYERS = 10_000
Table = dict[str, Any]
Row = Sequence[str]

TOP = """\
# On a Chip

Predictions beside measurements on real GPUs and TPUs, made by
`python -m benchmarks.chip --page` from the files in `benchmarks/results/chips/`.

To measure yours, run this in a checkout on its machine. It needs JAX, optax and Flax:

```sh
make accelerator   # or: python -m benchmarks.chip
```

It takes at most 25 minutes and has seven parts of at most 8:

| part | measures |
| --- | --- |
| `values` | the results of every form of step against those of the plain step |
| `peaks` | the memory that steps take of the device and of the host |
| `link` | the bandwidth between them |
| `overlap` | whether loads, stores and products of one loop run side by side |
| `time` | the time of steps, in turns with the plain step |
| `largest` | the largest models that take a step |
| `others` | what users of PyTorch would use instead, if PyTorch is installed |

Call the command again and it runs only what is missing: if your machine stops commands
after ten minutes, repeat it with `--minutes=9`. `--only=values,peaks` runs some parts,
`--dry` all of them at toy size on the CPU. `--paper=h200` compiles for a chip that
isn't attached.

Predictions are read from compiled programs: peaks by `aot.peak`, and times by
`aot.step_time`, which assumes that the chip always reaches its documented rates.
"""


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
    parts = table["parts"]
    lines = [f"## {table['device'].upper() if table['on_paper'] else table['device']}"]
    lines += ["", *origin(table), ""]
    for name, render in PARTS.items():
        cases = parts.get(name, {})
        lines += [f"### {TITLES[name]} on {table['device']}", ""]
        if cases:
            lines += [*render(cases), "", *left_out(cases)]
        else:
            lines += [f"{NOT_RUN.capitalize()}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def origin(table: Table) -> list[str]:
    """How the figures were made."""
    versions = ", ".join(f"{k} {v}" for k, v in table["versions"].items())
    toy = "Toys, on the CPU: these figures mean nothing. " if table["dry"] else ""
    if table["on_paper"]:
        return [
            f"Compiled on {table['date']} by `python -m benchmarks.chip "
            f"--paper={table['device']}` ({versions}). Measured: {NOT_RUN}."
        ]
    host = table["host"]
    driver = table.get("driver", {}).get("driver_version")
    return [
        f"{toy}{table['date']}, commit `{table['commit']}`, {versions}"
        + (f", driver {driver}" if driver else "")
        + f"; {table['devices']} device(s) of {gib(table['memory_bytes'])}, the first "
        f"of which was used; host: {host['processor']}, {host['cores']} cores, "
        f"{gib(host['total_bytes'])}, {max(1, len(host['numa_nodes']))} NUMA node(s)."
    ]


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


def grid(header: Row, rows: Iterable[Row]) -> list[str]:
    """A table in Markdown."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def number(form: str, value: Any, scale: float = 1.0) -> str:
    """A measured figure."""
    return NOT_RUN if value is None else format(value * scale, form)


def mib(figures: Table, key: str) -> str:
    """Bytes in MiB."""
    if key in figures and figures[key] is None:
        return "not counted"
    return number(".1f", figures.get(key), 2**-20)


def gib(value: Any) -> str:
    """Bytes in GiB, with the unit."""
    return f"{value / 2**30:.1f} GiB"


def values(cases: Mapping[str, Table]) -> list[str]:
    """Forms, and how far they are from plain."""
    rows = [
        (
            name,
            number(".2f", f["ulps"]) if "ulps" in f else "",
            number(".2g", f["drift"]) if "drift" in f else "",
            f["bound"],
            "yes" if f["within"] and f.get("as_called", True) else "**no**",
        )
        for name, f in done(cases).items()
    ]
    said = (
        "Differences from the plain step after five steps, or thirty where the name "
        "says so. `ulps` is the largest difference, in units of the last place of each "
        "leaf's largest value. `mean` is the mean difference of parameters, in "
        "learning rates. Matrix products are in full float32."
    )
    return [said, "", *grid(("form", "ulps", "mean", "bound", "within"), rows)]


def peaks(cases: Mapping[str, Table]) -> list[str]:
    """Device memory and host memory of steps."""
    rows = [
        (
            *name.split("/"),
            mib(f, "predicted_bytes"),
            mib(f, "measured_bytes"),
            mib(f, "predicted_host_bytes"),
            mib(f, "measured_host_bytes"),
        )
        for name, f in done(cases).items()
    ]
    header = ("workload", "form", "MiB, predicted", "measured")
    header += ("host MiB, predicted", "measured")
    said = (
        "The device's peak is its own count (`peak_bytes_in_use`) in a fresh process, "
        "which also makes the model. The host's is the drop in its available memory."
    )
    return [said, "", *grid(header, rows)]


def link(cases: Mapping[str, Table]) -> list[str]:
    """Bandwidth and latency by NUMA node."""
    rows = [
        (
            f"{node}, {way}",
            number(".2f", fit["bytes_per_second"], 1e-9),
            number(".1f", fit["latency_seconds"], 1e6),
            ", ".join(moved_by(f["rows"], way)),
        )
        for node, f in done(cases).items()
        for way, fit in f["fit"].items()
    ]
    header = ("memory on", "GB/s each way", "latency, us", "in the program")
    return grid(header, rows)


def moved_by(rows: Iterable[Table], way: str) -> list[str]:
    """What a program's text says moves the rows."""
    return sorted({name for r in rows if r["way"] == way for name in r["done"]})


def overlap(cases: Mapping[str, Table]) -> list[str]:
    """Pieces of a turn, alone and together."""
    header, rows = ["form"], []
    for name, f in done(cases).items():
        alone = {
            row["pieces"][0]: number(".2f", row["seconds"], 1e3)
            for row in f["rows"]
            if len(row["pieces"]) == 1
        }
        ratios = {
            pieces: f"{over['over_longest']:.2f} / {over['over_sum']:.2f}"
            for pieces, over in f["together"].items()
        }
        header = ["form", *alone, *ratios]
        rows.append((name, *alone.values(), *ratios.values()))
    header[1:2] = [f"{first}, ms" for first in header[1:2]]
    said = (
        "Each turn of a loop loads 64 MiB, stores 64 MiB, or multiplies matrices, or "
        "does several of these. Of several: their time over that of the longest of "
        "them, and over their sum. They run side by side where the first is 1, and "
        "in turn where the second is 1. "
        "[F78](compiler-findings.md#f78) says what the options change."
    )
    return [said, "", *grid(header, rows)]


def time(cases: Mapping[str, Table]) -> list[str]:
    """Steps."""
    rows = [
        (
            name.partition("/")[0],
            f"{f['parameters'] / 1e9:.1f}",
            name.partition("/")[2],
            number(".0f", f["predicted_seconds"], 1e3),
            number(".0f", f.get("seconds"), 1e3),
            number(".2f", f.get("ratio")) if "ratio" in f or "seconds" not in f else "",
            number(".0f", f.get("tokens_per_second")),
            hidden(f),
        )
        for name, f in done(cases).items()
    ]
    header = ("size", "billions", "form", "ms, predicted", "measured")
    header += ("over plain", "tokens/s", "transfers hidden")
    said = (
        "The model has gated layers of width 2048 under a scan, in float32, with adam. "
        "It has 24 of them; `filled` has as many as fill the card, and 16384 tokens. "
        'All but `filled` are timed in turns with the plain step. "Transfers hidden" '
        "is the share of transfer time in which kernels run, from a profile."
    )
    return [said, "", *grid(header, rows)]


def hidden(figures: Table) -> str:
    """The share of transfers that run beside kernels."""
    if "seconds" not in figures:
        return NOT_RUN
    share = (figures.get("profile") or {}).get("hidden_share")
    return "" if share is None else f"{share:.0%}"


def largest(cases: Mapping[str, Table]) -> list[str]:
    """Models that took a step."""
    rows = []
    for name, f in done(cases).items():
        if "predicted_layers" in f:
            predicted = "as many as the host holds"
            if (
                f["predicted_layers"] is not None
                and f["predicted_layers"] < MOST_LAYERS
            ):
                count = f["predicted_parameters"] / 1e9
                limit = f["predicted_limit"].removesuffix("_bytes")
                predicted = f"{count:.2f} (by the {limit})"
            measured = number(".2f", f.get("parameters"), 1e-9)
            rows.append((name, predicted, measured, ""))
        else:
            on_host = gib(f["predicted_host_bytes"])
            predicted = f"{gib(f['predicted_bytes'])}, host {on_host}"
            count = f.get("device_bytes")
            measured = NOT_RUN if "seconds" not in f else "took a step"
            measured = gib(count) if count else measured
            rows.append((name, predicted, measured, number(".2f", f.get("seconds"))))
    header = ("model", "predicted", "measured", "s a step")
    said = (
        "Billions of parameters in the largest model of such layers that takes a step, "
        "and the memory that limits the prediction (on paper only the device's). For "
        "well-known models, the memory that a step takes."
    )
    return [said, "", *grid(header, rows)]


def others(cases: Mapping[str, Table]) -> list[str]:
    """PyTorch."""
    rows = [
        (
            *name.split("/"),
            number(".0f", f["seconds"], 1e3),
            number(".0f", f["tokens_per_second"]),
            mib(f, "measured_bytes"),
        )
        for name, f in done(cases).items()
    ]
    header = ("size", "optimizer", "ms a step", "tokens/s", "MiB")
    said = (
        "The same model, tokens and dtype in PyTorch. Nothing is predicted for these."
    )
    return [said, "", *grid(header, rows)]


PARTS: dict[str, Callable[[Mapping[str, Table]], list[str]]] = {
    "values": values,
    "peaks": peaks,
    "link": link,
    "overlap": overlap,
    "time": time,
    "largest": largest,
    "others": others,
}
TITLES = {
    "values": "Values",
    "peaks": "Peaks",
    "link": "Link",
    "overlap": "Overlap",
    "time": "Time",
    "largest": "Largest models",
    "others": "PyTorch",
}
