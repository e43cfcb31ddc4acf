"""What of a step's state may move: given rules first, leaf patterns for the rest."""

from __future__ import annotations

import dataclasses

from optax_offload import _rules
from optax_offload._plan.patterns import Leaf, LeafPattern, leaf_patterns
from optax_offload._plan.recording import RecordedOptimizer
from optax_offload._plan.search import Selection


@dataclasses.dataclass(frozen=True)
class MovableState:
    """The state of a step, as far as rules have decided about it and as they may.

    Attributes:
      given: The rules that the user gave; None without any.
      optimizers: The optimizers of the step, with the leaves of their states.
      moved_by_given: The leaves that the given rules move.
      patterns: The patterns of the leaves that no given rule matches, in the order in
        which they should be moved. A `Selection` has positions in it.
      device_count: The number of devices of the target.
    """

    given: _rules.OffloadConfig | None
    optimizers: tuple[RecordedOptimizer, ...]
    moved_by_given: tuple[Leaf, ...]
    patterns: tuple[LeafPattern, ...]
    device_count: int

    @property
    def everything(self) -> Selection:
        """The selection of all patterns."""
        return frozenset(range(len(self.patterns)))

    @property
    def state_bytes(self) -> int:
        """The bytes of all state on each device, without offload."""
        return sum(x.nbytes_per_device for o in self.optimizers for x in o.state)

    @property
    def parameter_bytes(self) -> int:
        """The bytes on each device of the parameters that the optimizers update."""
        return sum(o.parameter_bytes for o in self.optimizers)

    def selected(self, selection: Selection) -> tuple[LeafPattern, ...]:
        """The patterns of a selection."""
        return tuple(self.patterns[i] for i in sorted(selection))

    def moved_bytes(self, selection: Selection) -> int:
        """The bytes that leave each device, by the given rules and by a selection."""
        chosen = [x for pattern in self.selected(selection) for x in pattern.leaves]
        return sum(x.nbytes_per_device for x in (*self.moved_by_given, *chosen))

    @property
    def encoded(self) -> tuple[LeafPattern, ...]:
        """The patterns of the leaves that are encoded, whether they move or not."""
        return tuple(p for p in self.patterns if p.codec)

    def changes_any(self, selection: Selection) -> bool:
        """Whether any leaf moves or is encoded, by given rules or by a selection."""
        given = self.given is not None and any(r.codec for r in self.given.rules)
        return bool(self.moved_by_given or selection or self.encoded or given)

    def config(self, selection: Selection) -> _rules.OffloadConfig:
        """The given rules, and one for each pattern of a selection.

        Then one for each that is encoded where it is. If there is none of these, one
        that keeps all on the device.
        """
        rules = list(self.given.rules) if self.given else []
        rules += [self._rule(pattern) for pattern in self.selected(selection)]
        stay = [
            p for i, p in enumerate(self.patterns) if p.codec and i not in selection
        ]
        rules += [_rules.Rule(p.pattern, "device", codec=p.codec) for p in stay]
        if not rules:
            rules = [_rules.Rule(".*", "device")]
        return _rules.OffloadConfig(
            [self._optional_where_needed(rule) for rule in rules],
            self.given and self.given.window_bytes,
        )

    def _rule(self, pattern: LeafPattern) -> _rules.Rule:
        # What the library would find by itself need not be written: on one device, and
        # for stacked leaves on several, the leading axis.
        found = 0 if pattern.stacked or self.device_count == 1 else None
        axis = "auto" if pattern.slice_axis == found else pattern.slice_axis
        return _rules.Rule(pattern.pattern, slice_axis=axis, codec=pattern.codec)

    def _optional_where_needed(self, rule: _rules.Rule) -> _rules.Rule:
        """The rule; optional if it matches in some of several optimizers only.

        All of them are given the same rules, and a rule has to match in each.
        """
        matches = [any(rule.matches(x.path) for x in o.state) for o in self.optimizers]
        return rule if all(matches) else dataclasses.replace(rule, optional=True)


def movable_state(
    optimizers: tuple[RecordedOptimizer, ...],
    given: _rules.OffloadConfig | None,
    device_count: int,
) -> MovableState:
    """Applies the given rules to the state of the optimizers.

    Raises:
      ValueError: a rule matches no leaf.
    """
    leaves = [x for o in optimizers for x in o.state]
    undecided, moved = leaves, []
    if given is not None:
        sizes = [(x.path, x.nbytes) for x in leaves]
        placements = list(zip(leaves, _rules.place(given, sizes), strict=True))
        undecided = [x for x, p in placements if p.rule is None]
        moved = [x for x, p in placements if p.memory_kind != "device"]
    return MovableState(
        given, optimizers, tuple(moved), tuple(leaf_patterns(undecided)), device_count
    )
