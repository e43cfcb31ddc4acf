"""Explanations of rules: where they put each leaf, and which rules decide nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from optax_offload._ground import trees
from optax_offload._places.rules import OffloadConfig, Placement, Rule, decide


class PlacedLeaf(NamedTuple):
    """A leaf, and the reason for its place.

    Attributes:
      path: The path that rules match.
      bytes: The bytes of the leaf; None for a leaf that cannot move.
      memory_kind: The memory kind that it gets.
      why: The reason for that.
      codec: The format that the leaf, or the codes of it, are in; "" for its own.
    """

    path: str
    bytes: int | None
    memory_kind: str
    why: str
    codec: str = ""


class IdleRule(NamedTuple):
    """A rule that decides about no leaf.

    Attributes:
      rule: The position of the rule among all.
      pattern: The regex of the rule.
      optional: Whether the rule may match nothing.
    """

    rule: int
    pattern: str
    optional: bool


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The effect of rules on leaves.

    Attributes:
      leaves: All leaves, in their order.
      idle_rules: The rules that decide nothing.
    """

    leaves: tuple[PlacedLeaf, ...]
    idle_rules: tuple[IdleRule, ...]

    def bytes_in(self, memory_kind: str) -> int:
        """The bytes that go to a memory kind."""
        return sum(x.bytes or 0 for x in self.leaves if x.memory_kind == memory_kind)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values, ready for `json.dumps`."""
        return {
            "leaves": [x._asdict() for x in self.leaves],
            "idle_rules": [x._asdict() for x in self.idle_rules],
        }


def explanation_of(
    rules: Sequence[Rule], leaves: Sequence[tuple[str, int | None]]
) -> Explanation:
    """Applies rules to leaves; a rule that matches nothing is no error here.

    Args:
      rules: The rules, of state or of parameters.
      leaves: The path and the bytes of each leaf; None for bytes that cannot move.
    """
    lenient = [dataclasses.replace(rule, optional=True) for rule in rules]
    placements = decide(OffloadConfig(lenient), leaves)
    # By identity: of two equal rules the second decides nothing.
    deciding = {id(p.rule) for p in placements if p.rule is not None}
    return Explanation(
        tuple(
            PlacedLeaf(path, nbytes, p.memory_kind, *_format(path, p))
            for (path, nbytes), p in zip(leaves, placements, strict=True)
        ),
        tuple(
            IdleRule(i, rule.regex, rule.optional)
            for i, (rule, asked) in enumerate(zip(rules, lenient, strict=True))
            if id(asked) not in deciding
        ),
    )


def _format(path: str, placement: Placement) -> tuple[str, str]:
    """The reason for a leaf's place, and the format that the leaf is in."""
    codec = placement.rule and placement.rule.codec
    if not codec:
        return placement.why, ""
    if trees.encoded_leaf(path) is not None:
        return placement.why, codec
    return f"{placement.why}; not in {codec} here", ""
