"""Ways that are timed in turns: a machine that is busy for a while is so for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Seconds = dict[str, float]
# The seconds of each round, by way and by what is timed.
Rounds = dict[str, dict[str, list[float]]]


def clocked(call: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
    """What a call returns, and its seconds, by the clock and of the CPU."""
    started, started_cpu = time.perf_counter(), time.process_time()
    found = call(*args)
    seconds = time.perf_counter() - started
    return found, seconds, time.process_time() - started_cpu


def in_turns(
    ways: Mapping[str, Callable[[], Seconds]], rounds: int, unmeasured: int = 0
) -> Rounds:
    """Has each way timed once in each round.

    Args:
      ways: What times a way once.
      rounds: So many are kept.
      unmeasured: So many come before, which compile and warm up.
    """
    found: Rounds = {name: {} for name in ways}
    for number in range(unmeasured + rounds):
        for name, way in ways.items():
            for what, seconds in way().items():
                if number >= unmeasured:
                    found[name].setdefault(what, []).append(seconds)
    return found


def median(found: Rounds, name: str, what: str) -> float:
    """The seconds of a way."""
    return statistics.median(found[name][what])


def ratio(found: Rounds, name: str, other: str, what: str) -> float:
    """How many times as long as another way it takes, in the same rounds."""
    pairs = zip(found[name][what], found[other][what], strict=True)
    return statistics.median(a / b for a, b in pairs)
