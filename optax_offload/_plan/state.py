"""The state of a step's optimizers: its leaves, their sizes, and which may move."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from optax_offload._places.rules import (
    DEFAULT_MIN_BYTES,
    CodecName,
    OffloadConfig,
    Rule,
    as_config,
    decide,
)

# Positions of patterns.
Selection = frozenset[int]
# Which parameters rest on the host: none, those that scans take row by row, or all.
Parameters = Literal["device", "rows", "all"]
MOST_LAST: tuple[Parameters, ...] = ("device", "rows", "all")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the optimizer's state.

    Attributes:
      path: The path that rules match.
      nbytes: Its bytes over all devices; None for a leaf that cannot move.
      nbytes_per_device: Its bytes on each device.
      slice_axis: The first axis that is not sharded; None if there is none.
      stacked: Whether it has three dimensions or more, as layers under `nn.scan` have.
      codec: The format that a plan keeps it in; None where it keeps its dtype, or the
        user's own rules say.
    """

    path: str
    nbytes: int | None
    nbytes_per_device: int
    slice_axis: int | None
    stacked: bool
    codec: CodecName | None = None


@dataclasses.dataclass(frozen=True)
class LeafPattern:
    r"""Leaves whose paths differ in numbers only, which one rule moves together.

    Attributes:
      pattern: The regex that matches their paths, as in ``\d+/mu/layers_\d+/kernel``.
      leaves: The leaves that the rule moves.
    """

    pattern: str
    leaves: tuple[Leaf, ...]

    @property
    def codec(self) -> CodecName | None:
        """The format of those that a plan encodes; None where it encodes none."""
        return next((leaf.codec for leaf in self.leaves if leaf.codec), None)

    @property
    def nbytes_per_device(self) -> int:
        """The bytes that moving them takes off each device."""
        return sum(leaf.nbytes_per_device for leaf in self.leaves)

    @property
    def slice_axis(self) -> int | None:
        """The axis along which all of them can be sliced; None if there is none."""
        axes = {leaf.slice_axis for leaf in self.leaves}
        return axes.pop() if len(axes) == 1 else None

    @property
    def stacked(self) -> bool:
        """True if all of the leaves are stacked."""
        return all(leaf.stacked for leaf in self.leaves)


def pattern_of(path: str) -> str:
    r"""The regex that matches a path, and those that differ from it in numbers only.

    Example:
      >>> pattern_of("0/mu/layers_10/kernel")
      '\\d+/mu/layers_\\d+/kernel'
    """
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(path))


def alternated(
    patterns: Sequence[str], alike: Sequence[Hashable]
) -> list[tuple[str, list[int]]]:
    """Regexes of paths that differ in one name, as one with alternatives.

    Args:
      patterns: The regexes.
      alike: What each has to have in common with those that it is joined with.

    Returns:
      For each the regex, and the positions of those that it stands for.

    Example:
      >>> alternated(["m/a/w", "n/a/w", "m/b/w", "n/b/w", "m/c"], [0] * 5)
      [('(m|n)/(a|b)/w', [0, 1, 2, 3]), ('m/c', [4])]
    """
    found = [
        (tuple(pattern.split("/")), key, [n])
        for n, (pattern, key) in enumerate(zip(patterns, alike, strict=True))
    ]
    for at in range(max((len(names) for names, *_ in found), default=0)):
        groups: dict[Any, list[tuple[str, list[int]]]] = {}
        for names, key, numbers in found:
            word = "".join(names[at : at + 1])
            group = (names[:at], names[at + 1 :], len(names), key)
            groups.setdefault(group, []).append((word, numbers))
        found = []
        for (before, after, length, key), some in groups.items():
            words = sorted(word for word, _ in some)
            word = words[0] if len(words) == 1 else f"({'|'.join(words)})"
            names = (*before, *[word] * (length > at), *after)
            found.append((names, key, [n for _, several in some for n in several]))
    return [("/".join(names), numbers) for names, _, numbers in found]


def leaf_patterns(
    leaves: Sequence[Leaf], min_bytes: int = DEFAULT_MIN_BYTES
) -> list[LeafPattern]:
    """Puts leaves under patterns, in the order in which they should be moved.

    Leaves that can be sliced come first: a move takes all of them from the peak, while
    of other leaves a whole one comes back for its update. Stacked leaves come before
    matrices, and large ones before small, for fewer rules and longer transfers. Leaves
    under ``min_bytes`` are left out, as `Rule` does.
    """
    by_pattern: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.nbytes is not None and leaf.nbytes >= min_bytes:
            by_pattern.setdefault(pattern_of(leaf.path), []).append(leaf)
    found = [LeafPattern(pattern, tuple(same)) for pattern, same in by_pattern.items()]
    return sorted(
        found,
        key=lambda p: (
            p.slice_axis is None,
            not p.stacked,
            -p.nbytes_per_device,
            p.pattern,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a step, and whether it may rest on the host.

    Attributes:
      leaf: Its path as the optimizer sees it, or a frozen one's in its argument; its
        bytes, and the codec that it is kept in.
      argument: Its path among the arguments of the step.
      by_rows: Whether turns take it: row by row, or as one layer of many.
      given: The memory kind that the given rules name; None where none of them matches.
      frozen: Whether it is not trained.
    """

    leaf: Leaf
    argument: str
    by_rows: bool = False
    given: str | None = None
    frozen: bool = False

    @property
    def root(self) -> str:
        """The path of the tree that rules of it are for, with a slash at the end."""
        return self.argument.removesuffix(self.leaf.path)

    def rests(self, which: Parameters) -> bool:
        """Returns whether it rests on the host if parameters are moved in this way."""
        if self.given is not None:
            return self.given != "device"
        if (self.leaf.nbytes or 0) < DEFAULT_MIN_BYTES:
            return False
        return which == "all" or (which == "rows" and self.by_rows)


class RecordedOptimizer(NamedTuple):
    """An optimizer that a step factory gave to its ``offload``.

    Attributes:
      state: The leaves of the optimizer's state.
      parameter_bytes: The bytes on each device of the parameters that it was
        initialised with.
      parameters: The leaves of these that are arguments of the step.
      moments: The paths of the leaves that are known to be moments.
      halves: The paths of master weights whose other half a bfloat16 parameter has.
      parameter_dtypes: The dtypes of the parameters, in the order of their names.
    """

    state: tuple[Leaf, ...]
    parameter_bytes: int
    parameters: tuple[Parameter, ...] = ()
    moments: frozenset[str] = frozenset()
    halves: frozenset[str] = frozenset()
    parameter_dtypes: tuple[str, ...] = ()


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
      parameters: The parameters of the step, trained and frozen.
    """

    given: OffloadConfig | None
    optimizers: tuple[RecordedOptimizer, ...]
    moved_by_given: tuple[Leaf, ...]
    patterns: tuple[LeafPattern, ...]
    device_count: int
    parameters: tuple[Parameter, ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that are trained."""
        return tuple(x for x in self.parameters if not x.frozen)

    @property
    def frozen(self) -> tuple[Parameter, ...]:
        """The parameters that are not trained."""
        return tuple(x for x in self.parameters if x.frozen)

    def resting(
        self, which: Parameters, frozen: Parameters = "device"
    ) -> tuple[Parameter, ...]:
        """The parameters that rest on the host, with such of them moved."""
        return tuple(
            x for x in self.parameters if x.rests(frozen if x.frozen else which)
        )

    def with_rows(self, arguments: Collection[str]) -> MovableState:
        """The same, where it is known which arguments turns take in part."""
        known = [
            dataclasses.replace(x, by_rows=x.argument in arguments)
            for x in self.parameters
        ]
        return dataclasses.replace(self, parameters=tuple(known))

    def placed(
        self, which: Parameters, frozen: Parameters = "device"
    ) -> tuple[Parameter, ...]:
        """The parameters that rest on the host, or are encoded on the device.

        There only what scans take rows of is: of the rest all would be decoded at once.
        """
        moved = self.resting(which, frozen)
        return tuple(
            x
            for x in self.parameters
            if x in moved or (x.leaf.codec and (x.given or (x.frozen and x.by_rows)))
        )

    def parameter_rules(
        self, which: Parameters, frozen: Parameters = "device"
    ) -> tuple[Rule, ...]:
        """The given rules of parameters, and one for each pattern of what is placed.

        A rule may match in some of several arguments only, and be given all of them.
        """
        rules = list(self.given.parameters) if self.given else []
        own: list[Rule] = []
        moved, placed = self.resting(which, frozen), self.placed(which, frozen)
        how = {x.argument: (x in moved, x.leaf.codec) for x in placed}
        for x in placed:
            if x.given is not None:
                continue
            # Paths may differ in numbers only, and scans take rows of some.
            pattern = re.compile(pattern_of(x.leaf.path), re.DOTALL)
            exact = any(
                pattern.fullmatch(y.leaf.path)
                for y in self.parameters
                if how.get(y.argument) != how[x.argument]
            )
            rule = Rule(
                re.escape(x.leaf.path) if exact else pattern.pattern,
                "pinned_host" if x in moved else "device",
                codec=x.leaf.codec,
            )
            if rule not in own:
                own.append(rule)
        alike = [(rule.memory_kind, rule.codec) for rule in own]
        rules += (
            dataclasses.replace(own[numbers[0]], pattern=regex)
            for regex, numbers in alternated([rule.regex for rule in own], alike)
        )
        of_each: dict[str, list[str]] = {}
        roots = {x.root for x in placed}
        for x in self.parameters:
            if x.root in roots:
                of_each.setdefault(x.root, []).append(x.leaf.path)
        return tuple(
            rule
            if all(any(map(rule.matches, paths)) for paths in of_each.values())
            else dataclasses.replace(rule, optional=True)
            for rule in rules
        )

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

    @property
    def frozen_bytes(self) -> int:
        """The bytes on each device of those that are not trained."""
        return sum(x.leaf.nbytes_per_device for x in self.frozen)

    def selected(self, selection: Selection) -> tuple[LeafPattern, ...]:
        """The patterns of a selection, those that differ in a name as one."""
        some = [self.patterns[i] for i in sorted(selection)]
        alike = [(p.slice_axis, p.stacked, p.codec) for p in some]
        return tuple(
            LeafPattern(regex, tuple(x for n in numbers for x in some[n].leaves))
            for regex, numbers in alternated([p.pattern for p in some], alike)
        )

    def moved_bytes(self, selection: Selection) -> int:
        """The bytes that leave each device, by the given rules and by a selection."""
        chosen = [x for pattern in self.selected(selection) for x in pattern.leaves]
        return sum(x.nbytes_per_device for x in (*self.moved_by_given, *chosen))

    @property
    def encoded(self) -> tuple[LeafPattern, ...]:
        """The patterns of the leaves that are encoded, whether they move or not."""
        return tuple(p for p in self.patterns if p.codec)

    def changes_any(self, selection: Selection) -> bool:
        """Returns whether given rules or a selection move or encode any leaf."""
        given = self.given is not None and any(r.codec for r in self.given.rules)
        return bool(self.moved_by_given or selection or self.encoded or given)

    def config(self, selection: Selection) -> OffloadConfig:
        """The given rules, and one for each pattern of a selection.

        Then one for each that is encoded where it is. If there is none of these, one
        that keeps all on the device.
        """
        rules = list(self.given.rules) if self.given else []
        rules += [self._rule(pattern) for pattern in self.selected(selection)]
        stay = [
            p for i, p in enumerate(self.patterns) if p.codec and i not in selection
        ]
        rules += [Rule(p.pattern, "device", codec=p.codec) for p in stay]
        if not rules:
            rules = [Rule(".*", "device")]
        return OffloadConfig(
            [self._optional_where_needed(rule) for rule in rules],
            self.given and self.given.window_bytes,
        )

    def _rule(self, pattern: LeafPattern) -> Rule:
        # What the library would find by itself need not be written: on one device, and
        # for stacked leaves on several, the leading axis.
        found = 0 if pattern.stacked or self.device_count == 1 else None
        axis = "auto" if pattern.slice_axis == found else pattern.slice_axis
        return Rule(pattern.pattern, slice_axis=axis, codec=pattern.codec)

    def _optional_where_needed(self, rule: Rule) -> Rule:
        """The rule; optional if it matches in some of several optimizers only.

        All of them are given the same rules, and a rule has to match in each.
        """
        matches = [any(rule.matches(x.path) for x in o.state) for o in self.optimizers]
        return rule if all(matches) else dataclasses.replace(rule, optional=True)


def movable_state(
    optimizers: Sequence[RecordedOptimizer],
    given: OffloadConfig | None,
    device_count: int,
    frozen: Sequence[Parameter] = (),
) -> MovableState:
    """Applies the given rules to the state of the optimizers, and to parameters.

    Args:
      optimizers: The optimizers of the step.
      given: The given rules.
      device_count: The number of devices of the target.
      frozen: The parameters that are not trained.

    Raises:
      ValueError: a rule matches no leaf.
    """
    leaves = [x for o in optimizers for x in o.state]
    undecided, moved = leaves, []
    if given is not None:
        decide(given, _sizes(leaves))  # A rule has to match in one of them.
        # Each is given the rules, and a share is one of its own state.
        placements = [
            (x, p)
            for o in optimizers
            for x, p in zip(
                o.state,
                decide(given.made_lenient(), _sizes(o.state)),
                strict=True,
            )
        ]
        undecided = [x for x, p in placements if p.rule is None]
        moved = [x for x, p in placements if p.memory_kind != "device"]
    return MovableState(
        given,
        tuple(optimizers),
        tuple(moved),
        tuple(leaf_patterns(undecided)),
        device_count,
        _parameters((*_beside(frozen, trained_parameters(optimizers)), *frozen), given),
    )


def _beside(
    frozen: Sequence[Parameter], trained: Sequence[Parameter]
) -> Iterator[Parameter]:
    """Trained parameters, those beside frozen ones by their path in their argument."""
    whole = {x.root for x in frozen}
    for x in trained:
        root = x.argument.partition("/")[0] + "/"
        if root in whole and x.root != root:
            path = x.argument.removeprefix(root)
            leaf = dataclasses.replace(x.leaf, path=path)
            yield dataclasses.replace(x, leaf=leaf)
        else:
            yield x


def trained_parameters(
    optimizers: Sequence[RecordedOptimizer],
) -> tuple[Parameter, ...]:
    """The parameters of all optimizers, each once."""
    return tuple({x.argument: x for o in optimizers for x in o.parameters}.values())


def _parameters(
    found: Sequence[Parameter], given: OffloadConfig | None
) -> tuple[Parameter, ...]:
    """Parameters, and where given rules have them."""
    if given is None or not given.parameters:
        return tuple(found)
    config = as_config(given.parameters)
    placements = decide(config, _sizes([x.leaf for x in found]))
    return tuple(
        x if p.rule is None else dataclasses.replace(x, given=p.memory_kind)
        for x, p in zip(found, placements, strict=True)
    )


def _sizes(leaves: Sequence[Leaf]) -> list[tuple[str, int | None]]:
    return [(x.path, x.nbytes) for x in leaves]
