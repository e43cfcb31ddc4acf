"""Transfers between host and device memory, as the compiler scheduled them.

Read from the text of a compiled program, for chips that need not be here: how many
loads and stores there are, how large, how many in flight at once, and how well a model
of the link says that the schedule could use it (`optax_offload/aot/_timeline.py`, as
`optax_offload.aot.step_time` has it). Copy engines do some and kernels others; beside
the latter nothing else is computed.

- `efficiency`: the bytes of the direction that has more to do over the bandwidth (the
  least time there could be), over the time during which a transfer is under way in
  either direction. 1 is a link that is full both ways whenever it is used; loads and
  stores one after the other are 0.5 or less, and latency and copies within host
  memory lower it. A link that is idle while the device computes is not counted: see
  `over floor`.
- `both ways`: the share of the busy time of the direction that has less to do, in which
  the other one is busy too.
- `exposed`: how much longer the step takes than with transfers that take no time.
- `over floor`: the step, over the longer of its computation and the least link time.

Run:
    python -m benchmarks.link.census
    python -m benchmarks.link.census --workloads=leaves --targets=h100 --modes=ours
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.common import command
from benchmarks.common.steps import MODES, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS
from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload.aot._timeline import Model, Place, TimedMove, Timeline, length

FLAGS = flags.FLAGS
COLUMNS = (
    *("loads", "stores", "copies", "kernels", "sync", "median MiB"),
    *("efficiency", "both ways", "exposed ms", "step ms", "over floor"),
)


def print_census(names: tuple[str, str, str], found: Timeline) -> None:
    """Prints a row, and under it one for each place that has transfers."""
    sizes = found.sizes("load") + found.sizes("store")
    row = summary(found)
    milliseconds = (1e3 * row[name] for name in ("exposed_seconds", "seconds"))
    figures = (
        *(found.count("load"), found.count("store")),
        *(row["copies"], row["kernels"], row["synchronous"]),
        statistics.median(sizes) / MIB if sizes else None,
        *(row["efficiency"], row["both_ways"], *milliseconds, row["over_floor"]),
    )
    command.print_row(names, figures)
    for place in row["places"]:
        listed = ", ".join(f"{n} {form}" for form, n in place["transfers"].items())
        inside = f"{place['name']}, {place['trip_count'] or '?'} times"
        flight = "/".join(map(str, place["most_in_flight"]))
        print(
            f"    {place['kind']} ({inside}): {listed}; in flight {flight}; "
            f"{place['seconds'] * 1e3:.2f} ms, of which the least link time is "
            f"{place['efficiency']:.2f}",
            flush=True,
        )


def summary(found: Timeline) -> dict[str, Any]:
    """The values of a row of the table, for JSON."""
    row = counts(found) | use_of_link(found) | {"model": asdict(found.model)}
    for direction in found.spans:
        sizes = found.sizes(direction)
        row[direction] = {"count": len(sizes), "bytes": sum(sizes)}
    of_place = ("name", "kind", "trip_count", "most_in_flight", "seconds", "runs")
    row["places"] = [
        {
            **{name: getattr(place, name) for name in of_place},
            "efficiency": efficiency(place, found.model),
            "transfers": dict(Counter(map(how, place.moves))),
        }
        for place in found.places
    ]
    return row


def counts(found: Timeline) -> dict[str, Any]:
    """The numbers of transfers, also of host copies, in a step."""
    moves = [move for place in found.places for move in place.moves]
    kernels = sum(move.runs for move in moves if move.kernel)
    return {
        "most_in_flight": found.most_in_flight,
        "synchronous": sum(move.runs for move in moves if not move.asynchronous),
        "copies": sum(move.runs for move in moves) - kernels,
        "kernels": kernels,
    }


def use_of_link(found: Timeline) -> dict[str, Any]:
    """The times of a step, and how well it uses the link (see above)."""
    least, link = found.least_seconds, found.model.link
    either = length(found.spans["load"] + found.spans["store"])
    both = max(found.load_seconds + found.store_seconds - either, 0.0)  # Rounding.
    ways = ("load", "store")
    lesser = min(link.seconds(sum(found.sizes(d)), found.count(d)) for d in ways)
    floor = max(found.compute_seconds, least)
    return {
        "efficiency": least / found.link_seconds if found.link_seconds else None,
        "both_ways": both / lesser if lesser else None,
        "over_floor": found.seconds / floor if floor else 1.0,
        "seconds": found.seconds,
        "compute_seconds": found.compute_seconds,
        "exposed_seconds": found.seconds - found.compute_seconds,
        "least_seconds": least,
        "link_seconds": found.link_seconds,
    }


def efficiency(place: Place, model: Model) -> float:
    """The least link time of what a place moves, over all its time."""
    nbytes: Counter[str] = Counter()
    for move in place.moves:
        nbytes[move.direction] += move.nbytes * move.runs
    least = model.least_seconds(max(nbytes["load"], nbytes["store"]))
    return least / place.seconds if place.seconds else 0.0


def how(move: TimedMove) -> str:
    """A transfer for a person, such as `load: sync dynamic-slice kernel`."""
    waited = "" if move.asynchronous else "sync "
    kernel = " kernel" if move.kernel and move.form != "fusion" else ""
    return f"{move.direction}: {waited}{move.form}{kernel}"


def main() -> None:
    """Compiles, reads, and prints a row for each workload, target and mode."""
    command.print_header(("workload", "target", "mode"), COLUMNS)
    gbps, rows = FLAGS.bandwidth_gbps, []
    for names in itertools.product(FLAGS.workloads, FLAGS.targets, FLAGS.modes):
        name, target, mode = names
        row = dict(zip(("workload", "target", "mode"), names, strict=True))
        try:
            compiled = compile_step(WORKLOADS[name](), aot.Target(target), MODES[mode])
        except aot.DoesNotFitError as error:
            print(*names, error.args[0][:80])
            rows.append(row | {"does_not_fit": error.used_bytes})
            continue
        text = compiled.as_text() or ""
        if FLAGS.dump:
            file = Path(FLAGS.dump) / f"{name}.{target}.{mode}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        bytes_per_second = None if gbps is None else gbps * 1e9
        model = Model.of(aot.Target(target), bytes_per_second=bytes_per_second)
        found = Timeline.of(text, model)
        print_census(names, found)
        rows.append(row | summary(found))
    command.write(rows=rows)


if __name__ == "__main__":
    command.define_shared(
        targets=["h100", "v5e:2x2"],
        workloads=USUAL_WORKLOADS,
        modes=["recipe", "ours", "fused"],
    )
    flags.DEFINE_float(
        "bandwidth_gbps", None, "GB/s of the link, each way [default: the chip's]."
    )
    flags.DEFINE_string("dump", None, "A folder for the texts of compiled programs.")
    command.run(main, out="out/census")
