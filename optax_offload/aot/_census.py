"""The transfers of a scheduled program, and what the model makes of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from typing import Any

from optax_offload.aot import _hlo
from optax_offload.aot._clock import Run
from optax_offload.aot._model import Model
from optax_offload.aot._planner import Move, Place, Planner


@dataclasses.dataclass
class Census:
    """The transfers of a step, and what the model of `step_times.py` makes of them.

    Attributes:
      model: The rates from which times are modelled.
      places: The computations that have transfers.
      seconds: The time of the step.
      compute_seconds: The time of the step with transfers that take none.
      link_seconds: The time during which a transfer is under way.
      load_seconds: The time during which a load is under way.
      store_seconds: The time during which a store is under way.
      both_seconds: The time during which a load and a store are under way.
      span_seconds: The time from the first start to the last done.
      most_in_flight: Loads, stores, and both together while there are some of both,
        between their starts and dones.
    """

    model: Model
    places: list[Place]
    seconds: float
    compute_seconds: float
    link_seconds: float
    load_seconds: float
    store_seconds: float
    both_seconds: float
    span_seconds: float
    most_in_flight: tuple[int, int, int]

    def moves(self, direction: str) -> list[Move]:
        """The transfers in one direction that run, once each."""
        found = (m for p in self.places for m in p.moves)
        return [m for m in found if m.direction == direction and m.runs]

    def count(self, direction: str) -> int:
        """The number of these that are carried out in a step."""
        return sum(t.runs for t in self.moves(direction))

    def sizes(self, direction: str) -> list[int]:
        """The bytes of each that is carried out."""
        return [t.nbytes for t in self.moves(direction) for _ in range(t.runs)]

    @property
    def synchronous(self) -> int:
        """Transfers (also host copies) that are waited for at once, in a step."""
        found = (t for p in self.places for t in p.moves)
        return sum(t.runs for t in found if not t.asynchronous)

    @property
    def kernels(self) -> int:
        """Transfers (also host copies) that kernels do, in a step."""
        found = (t for p in self.places for t in p.moves)
        return sum(t.runs for t in found if t.kernel)

    @property
    def copies(self) -> int:
        """Transfers (also host copies) that copy engines do, in a step."""
        found = (t for p in self.places for t in p.moves)
        return sum(t.runs for t in found if not t.kernel)

    @property
    def least_seconds(self) -> float:
        """The time of the direction that moves more, without any latency."""
        sizes = (sum(self.sizes(d)) for d in ("load", "store"))
        return self.model.least_seconds(max(sizes))

    @property
    def efficiency(self) -> float | None:
        """The efficiency of the link while it is used; None without transfers."""
        return self.least_seconds / self.link_seconds if self.link_seconds else None

    @property
    def both_ways(self) -> float | None:
        """The share of the lesser direction's time in which both are busy."""
        seconds = [
            self.model.link.seconds(sum(self.sizes(d)), self.count(d))
            for d in ("load", "store")
        ]
        return self.both_seconds / min(seconds) if min(seconds) else None

    @property
    def exposed_seconds(self) -> float:
        """The time that transfers add to the step."""
        return self.seconds - self.compute_seconds

    @property
    def over_floor(self) -> float:
        """The step over the longer of its computation and the least link time."""
        floor = max(self.compute_seconds, self.least_seconds)
        return self.seconds / floor if floor else 1.0

    def summary(self) -> dict[str, Any]:
        """The values of a row of the table, for JSON."""
        row: dict[str, Any] = {"model": dataclasses.asdict(self.model)}
        for direction in ("load", "store", "host copy"):
            sizes = self.sizes(direction)
            between = [t.between for t in self.moves(direction)]
            row[direction] = {
                "count": len(sizes),
                "bytes": sum(sizes),
                "least_bytes": min(sizes, default=None),
                "median_bytes": statistics.median(sizes) if sizes else None,
                "most_bytes": max(sizes, default=None),
                "median_between": statistics.median(between) if between else None,
                "forms": dict(Counter(t.how for t in self.moves(direction))),
            }
        row["median_bytes"] = self.median_bytes
        row["most_in_flight"] = self.most_in_flight
        for name in ("synchronous", "copies", "kernels"):
            row[name] = getattr(self, name)
        for name in ("efficiency", "both_ways", "over_floor"):
            row[name] = getattr(self, name)
        for name in ("", "compute_", "exposed_", "least_", "link_", "span_"):
            row[f"{name}seconds"] = getattr(self, f"{name}seconds")
        row["places"] = [
            {
                **{k: v for k, v in vars(p).items() if k != "moves"},
                "efficiency": p.efficiency(self.model),
                "transfers": dict(Counter(t.how for t in p.moves)),
            }
            for p in self.places
        ]
        return row

    @property
    def median_bytes(self) -> float | None:
        """The median size of all loads and stores of a step."""
        sizes = self.sizes("load") + self.sizes("store")
        return statistics.median(sizes) if sizes else None


def census(text: str, model: Model | None = None) -> Census:
    """The transfers in a scheduled program, of `compiled.as_text()`.

    Raises:
      ValueError: The text is not that of a scheduled program.
    """
    planner = Planner(_hlo.parse(text), model or Model())
    top = Place("entry", "top level", 1)
    planner.places.append(top)
    plan = planner.plan(planner.module.entry, top)
    run = Run(planner.model)
    run.carry_out(plan, top)
    run.finish()
    return Census(
        model=planner.model,
        places=[p for p in planner.places if p.moves],
        seconds=run.clock,
        compute_seconds=run.computed_seconds,
        link_seconds=run.link_seconds,
        load_seconds=run.busy_seconds("load"),
        store_seconds=run.busy_seconds("store"),
        both_seconds=run.both_seconds,
        span_seconds=run.span_seconds,
        most_in_flight=run.most_in_flight,
    )
