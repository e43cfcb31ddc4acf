"""Carrying out a plan against the clock of a modelled device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from optax_offload.aot._model import Model
from optax_offload.aot._planner import Compute, Done, Move, Place, Start, Step
from optax_offload.aot._spans import Span, length


@dataclasses.dataclass
class _Flight:
    """A transfer between its start and its done."""

    move: Move
    end: float
    operations: int
    computed: float


class Run:
    """Carries out a plan against the model's clock."""

    def __init__(self, model: Model):
        self.model = model
        self.clock = 0.0
        self.computed_seconds = 0.0
        self._operations = 0
        self._free = {"load": 0.0, "store": 0.0}  # when each direction is free
        self._busy: dict[str, list[Span]] = {
            "load": [],
            "store": [],
            "host copy": [],
        }
        self._flights: dict[tuple[str, str], list[_Flight]] = {}
        self._scopes: list[tuple[Place, set[tuple[str, str]]]] = []
        self.most_in_flight = (0, 0, 0)

    def carry_out(self, plan: list[Step], place: Place) -> None:
        with self._scope(place):
            for step in plan:
                if isinstance(step, Compute):
                    self.clock += step.seconds
                    self.computed_seconds += step.seconds
                    self._operations += 1
                elif isinstance(step, Start):
                    self._start(step)
                elif isinstance(step, Done):
                    self._done(step.key)
                else:
                    for _ in range(step.times):
                        self.carry_out(step.plan, step.place)

    @contextlib.contextmanager
    def _scope(self, place: Place) -> Iterator[None]:
        place.runs += 1
        before = self.clock
        self._scopes.append((place, set()))
        yield
        self._scopes.pop()
        place.seconds += self.clock - before

    def _start(self, step: Start) -> None:
        flights = []
        for t in step.moves:
            ways = ("load", "store") if t.direction == "host copy" else (t.direction,)
            begin = max(self.clock, *(self._free[w] for w in ways))
            end = begin + self.model.link.seconds(t.nbytes)
            for way in ways:
                self._free[way] = end
            self._busy[t.direction].append((begin, end))
            t.runs += 1
            operations, computed = self._operations, self.computed_seconds
            flights.append(_Flight(t, end, operations, computed))
            if t.kernel and self.model.kernels_occupy_device:
                self.clock = end
        self._flights[step.key] = flights
        place, started = self._scopes[-1]
        started.add(step.key)
        self.most_in_flight = _most(self.most_in_flight, self._flying(self._flights))
        most = place.most_loads, place.most_stores, place.most_together
        most = _most(most, self._flying(started))
        place.most_loads, place.most_stores, place.most_together = most

    def _flying(self, keys: Iterable[tuple[str, str]]) -> tuple[int, int, int]:
        """Loads, stores, and both together if there are some of both."""
        flying = Counter(f.move.direction for k in keys for f in self._flights[k])
        loads, stores = flying["load"], flying["store"]
        return loads, stores, loads + stores if loads and stores else 0

    def _done(self, key: tuple[str, str]) -> None:
        for flight in self._flights.pop(key, ()):
            self.clock = max(self.clock, flight.end)
            flight.move.between = self._operations - flight.operations
            between = self.computed_seconds - flight.computed
            flight.move.between_seconds = between
        self._scopes[-1][1].discard(key)

    def finish(self) -> None:
        """Waits for what the program's text does not wait for."""
        self.clock = max(self.clock, *self._free.values())

    @property
    def _spans(self) -> list[Span]:
        return [span for spans in self._busy.values() for span in spans]

    @property
    def link_seconds(self) -> float:
        return length(self._spans)

    def busy_seconds(self, direction: str) -> float:
        """The time during which a transfer of that direction is under way."""
        return length(self._busy[direction])

    @property
    def both_seconds(self) -> float:
        loads, stores = self._busy["load"], self._busy["store"]
        both = length(loads) + length(stores) - length(loads + stores)
        return max(both, 0.0)  # Rounding.

    @property
    def span_seconds(self) -> float:
        if not self._spans:
            return 0.0
        return max(e for _, e in self._spans) - min(b for b, _ in self._spans)


def _most(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])
