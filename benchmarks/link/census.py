"""Transfers between host and device memory, as the compiler scheduled them.

Read from the text of a compiled program, for chips that need not be here: how many
loads and stores there are, how large, how many in flight at once, and what is computed
meanwhile. A model of the link then says how well the schedule could use it.

Run:
    python -m benchmarks.link.census
    python -m benchmarks.link.census --workloads=leaves --targets=h100 --modes=ours
    python -m benchmarks.link.census --hlo=program.txt --targets=h100

The model is that of `optax_offload.aot.step_time` (`optax_offload/aot/_timeline.py`).
The bandwidth and the latency of the link are those of the target's chip where no flag
gives others. "done by" counts transfers by copy engines and by kernels, beside which
nothing else is computed; under "as copies" stands what the model says if copy engines
did all.

What it reports of the link:

- `efficiency`: the bytes of the direction that has more to do over the bandwidth (the
  least time there could be), over the time during which a transfer is under way in
  either direction. 1 is a link that is full both ways whenever it is used; loads and
  stores one after the other are 0.5 or less, and latency and copies within host
  memory lower it. All time that the device waits for a transfer is such time, so this
  is least time / (exposed time + link time that is hidden behind computation). A link
  that is idle while the device computes is not counted: see `step / floor`.
- `both ways`: the share of the busy time of the direction that has less to do, in which
  the other one is busy too.
- `exposed`: how much longer the step takes than with transfers that take no time.
- `step / floor`: the step, over the longer of its computation and the least link time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from benchmarks.common.steps import MODES, compile_step
from benchmarks.common.workloads import USUAL_WORKLOADS, WORKLOADS
from optax_offload import aot
from optax_offload._units import MIB
from optax_offload.aot._timeline import Model, Timeline

FLAGS = flags.FLAGS

HEADER = """\
                                          moved          done by              MiB \
each  in flight compute   effi-   both exposed    step   step/        as copies
workload         target    mode      load store sync copy kernel   least median   \
most ld/st/both between  ciency   ways      ms      ms   floor   effic.    step"""


def print_census(names: Sequence[str], found: Timeline, as_copies: Timeline) -> None:
    """Prints a row, and under it one for each place that has transfers.

    Args:
      names: The workload, the target and the mode.
      found: The census where a kernel that moves occupies the device.
      as_copies: The census of the same program where it does not.
    """
    sizes = found.sizes("load") + found.sizes("store")
    transfers = found.moves("load") + found.moves("store")
    between = sorted(t.between for t in transfers) or [0]
    workload, target, mode = names
    counts = [found.count("load"), found.count("store")]
    counts += [found.synchronous, found.copies, found.kernels]
    least_median_most = (
        f"{size / MIB:7.2f}"
        for size in (
            min(sizes, default=0),
            statistics.median(sizes) if sizes else 0,
            max(sizes, default=0),
        )
    )
    numbers = (
        found.efficiency,
        found.both_ways,
        found.exposed_seconds * 1e3,
        found.seconds * 1e3,
        found.over_floor,
        as_copies.efficiency,
        as_copies.seconds * 1e3,
    )
    print(
        f"{workload:16s} {target:9s} {mode:8s}"
        + "{:6d}{:6d}{:5d}{:5d}{:7d} ".format(*counts)
        + "".join(least_median_most)
        + f"{'/'.join(map(str, found.most_in_flight)):>11s} "
        + f"{statistics.median(between):7.0f} "
        + " ".join(map(_number, numbers)),
        flush=True,
    )
    for place in found.places:
        forms = Counter(m.how for m in place.moves)
        listed = ", ".join(f"{n} {form}" for form, n in forms.items())
        times = "?" if place.trip_count is None else place.trip_count
        what = f"{place.kind} {place.name}, {times} times" * (place.kind != "top level")
        flight = "/".join(map(str, place.most_in_flight))
        print(
            f"    {what or place.kind}: {listed}; in flight {flight}; "
            f"{place.seconds * 1e3:.2f} ms, of which the least link time is "
            f"{place.efficiency(found.model):.2f}"
            + (" (not taken)" if not place.runs else ""),
            flush=True,
        )


def _number(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.2f}"


def summary(found: Timeline) -> dict[str, Any]:
    """The values of a row of the table, for JSON."""
    row: dict[str, Any] = {"model": dataclasses.asdict(found.model)}
    for direction in found.spans:
        sizes = found.sizes(direction)
        between = [t.between for t in found.moves(direction)]
        row[direction] = {
            "count": len(sizes),
            "bytes": sum(sizes),
            "least_bytes": min(sizes, default=None),
            "median_bytes": statistics.median(sizes) if sizes else None,
            "most_bytes": max(sizes, default=None),
            "median_between": statistics.median(between) if between else None,
            "forms": dict(Counter(t.how for t in found.moves(direction))),
        }
    sizes = found.sizes("load") + found.sizes("store")
    row["median_bytes"] = statistics.median(sizes) if sizes else None
    figures = ["most_in_flight", "synchronous", "copies", "kernels", "efficiency"]
    figures += ["both_ways", "over_floor", "seconds", "compute_seconds"]
    figures += ["exposed_seconds", "least_seconds", "link_seconds"]
    row |= {name: getattr(found, name) for name in figures}
    ends = [end for spans in found.spans.values() for span in spans for end in span]
    row["span_seconds"] = max(ends) - min(ends) if ends else 0.0
    most = ("most_loads", "most_stores", "most_together")
    row["places"] = [
        {
            "name": p.name,
            "kind": p.kind,
            "trip_count": p.trip_count,
            "runs": p.runs,
            **dict(zip(most, p.most_in_flight, strict=True)),
            "seconds": p.seconds,
            "efficiency": p.efficiency(found.model),
            "transfers": dict(Counter(t.how for t in p.moves)),
        }
        for p in found.places
    ]
    return row


def both_ways_of(text: str, target: str) -> tuple[Timeline, Timeline]:
    """The census where kernels occupy the device, and with copies in their place."""
    gbps, us = FLAGS.bandwidth_gbps, FLAGS.latency_us
    model = Model.of(
        aot.Target(target),
        bytes_per_second=None if gbps is None else gbps * 1e9,
        latency_seconds=None if us is None else us / 1e6,
    )
    found = Timeline.of(text, model)
    if not found.kernels:
        return found, found
    copies = dataclasses.replace(model, kernels_occupy_device=False)
    return found, Timeline.of(text, copies)


def main(argv: Sequence[str]) -> None:
    """Compiles, reads, and prints a row for each workload, target and mode."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
    print(HEADER)
    if FLAGS.hlo:
        path, target = Path(FLAGS.hlo), FLAGS.targets[0]
        both = both_ways_of(path.read_text(), target)
        print_census((path.stem[:17], target, ""), *both)
        return
    rows = []
    for name in FLAGS.workloads:
        for target in FLAGS.targets:
            for mode in FLAGS.modes:
                names = {"workload": name, "target": target, "mode": mode}
                try:
                    compiled = compile_step(
                        WORKLOADS[name](), aot.Target(target), MODES[mode]
                    )
                except aot.DoesNotFitError as error:
                    print(f"{name:17s} {target:9s} {mode:9s} {error.args[0][:80]}")
                    rows.append(names | {"does_not_fit": error.used_bytes})
                    continue
                text = compiled.as_text() or ""
                if FLAGS.dump:
                    file = Path(FLAGS.dump) / f"{name}.{target}.{mode}.txt"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)
                found, as_copies = both_ways_of(text, target)
                print_census((name, target, mode), found, as_copies)
                rows.append(names | summary(found) | {"as_copies": summary(as_copies)})
    out = Path(FLAGS.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    print(f"also in {out}")


def define_flags() -> None:
    """Not on import: others import the census, and have flags of the same names."""
    flags.DEFINE_list("targets", ["h100", "v5e:2x2"], "Chips to compile for.")
    flags.DEFINE_list("workloads", USUAL_WORKLOADS, f"Of {', '.join(WORKLOADS)}.")
    flags.DEFINE_list("modes", ["recipe", "ours", "fused"], f"Of {', '.join(MODES)}.")
    flags.DEFINE_float(
        "bandwidth_gbps", None, "GB/s of the link, each way [default: the chip's]."
    )
    flags.DEFINE_float(
        "latency_us", None, "Of each transfer [default: the one assumed of all chips]."
    )
    flags.DEFINE_string("out", "out/census", "Where the .json goes.")
    flags.DEFINE_string(
        "hlo", None, "Read this program's text instead (of the 1st target)."
    )
    flags.DEFINE_string(
        "dump", None, "A folder for the texts of the compiled programs."
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
