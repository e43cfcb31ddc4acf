"""Spans of time, and how much of it they cover together."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def length(spans: Iterable[Span]) -> float:
    """The time that is in any of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
