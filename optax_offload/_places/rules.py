"""Rules: the memory and the format of each leaf. Touches no device."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, cast, get_args

from optax_offload._ground import trees
from optax_offload._ground.units import check_bytes, size_text
from optax_offload._places.step_options import Options

MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
MEMORY_KINDS: tuple[str, ...] = get_args(MemoryKind)
DEFAULT_MIN_BYTES = 64 * 1024
# What `_low_bit` has a codec for: of state, and of parameters that are frozen.
StateCodecName = Literal[
    "int8",
    "int8-companded",
    "float8",
    "bfloat16",
    "bfloat16-stochastic",
    "bfloat16-remainder",
]
ParameterCodecName = Literal["nf4", "nf4-double", "int8-linear"]
CodecName = StateCodecName | ParameterCodecName
STATE_CODECS: tuple[str, ...] = get_args(StateCodecName)
PARAMETER_CODECS: tuple[str, ...] = get_args(ParameterCodecName)
CODEC_NAMES = (*STATE_CODECS, *PARAMETER_CODECS)


def compile_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compiles a pattern, or says what is wrong with it and where.

    A ``.`` matches a newline too, also in a pattern that the user compiled without
    `re.DOTALL`: paths may hold one, and ``.*`` means every leaf. All other flags stay.
    """
    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(
            f"pattern must be a regex (a string or re.compile(...)), got {pattern!r}"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        glob = ". It's a regex, not a glob: write '.*' for any text"
        hint = glob * ("*" in str(pattern))
        raise ValueError(f"pattern {pattern!r} is not a valid regex: {e}{hint}") from e
    if not isinstance(compiled.pattern, str):
        raise TypeError(f"pattern must match text, got a pattern of bytes: {pattern!r}")
    if compiled.flags & re.DOTALL:
        return compiled
    return re.compile(compiled.pattern, compiled.flags | re.DOTALL)


def check_memory_kind(memory_kind: object) -> None:
    """Raises a ValueError that names the kinds, for any other word.

    No compiled step can use ``"unpinned_host"``: `offload` refuses it.
    """
    if memory_kind in CODEC_NAMES:
        raise ValueError(
            f"memory_kind is {memory_kind!r}, which is a codec. Write "
            f"Rule(pattern, codec={memory_kind!r}), and memory_kind='device' too to "
            "keep what is encoded on the device"
        )
    if memory_kind not in MEMORY_KINDS:
        raise ValueError(
            f"memory_kind is {memory_kind!r}; it must be 'pinned_host', which is host "
            "memory, or 'device'; or, between steps alone, 'unpinned_host', see "
            "offload_states"
        )


def _check_fraction(value: Any, memory_kind: str) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (number and 0 < float(value) <= 1):
        raise ValueError(
            f"fraction is {value!r}; it must be a number above 0 and at most 1, such "
            "as 0.5 for half of the bytes"
        )
    if value < 1 and memory_kind == "device":
        raise ValueError(
            f"fraction is {value!r} in a rule with memory_kind 'device', which moves "
            "nothing. Leave it out, or give it to a rule that moves leaves"
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    r"""A rule for where matching leaves rest between updates.

    Args:
      pattern: A regex that matches the leaf's whole path (``re.fullmatch``), as in
        ``0/mu/decoder/layers/kernel``. A ``.`` matches newlines too, as with
        ``re.DOTALL``.
      memory_kind: ``"pinned_host"``, or ``"device"`` to keep the leaf where it is.
        ``"unpinned_host"`` is for `offload_states` and `place` alone, between steps.
      min_bytes: Leaves smaller than this stay on the device. Moving a few bytes
        takes as long as moving half a megabyte, and a step counter in host memory
        costs a synchronization.
      fraction: The share of the bytes to move, above 0 and at most 1: the largest of
        the leaves that the rule decides about move until they have that share, and the
        others stay on the device. Of equal ones the first by path moves first. Leaves
        smaller than ``min_bytes`` do not count. Bytes are those of whole leaves, over
        all devices, encoded where the rule names a codec.
      slice_axis: The axis along which a leaf may be streamed in slices, which must not
        be sharded; None forbids slices. By default the library looks for one: in JAX's
        Explicit mode the first that is not sharded; in Auto mode, which does not tell,
        the leading axis of leaves with three or more dimensions, as `nn.scan` makes
        them; on a single device the leading axis of any leaf.
      optional: Whether the rule may match nothing. By default that is an error, since
        it is most often a typing mistake.
      codec: The format in which a leaf is kept: of state between updates, such as
        ``"int8"``, see `low_bit`; of frozen parameters, such as ``"nf4"``, see
        `place`. None keeps its dtype.
      signed: Whether an encoded leaf can be negative; None where the library decides.

    Raises:
      TypeError, ValueError: An argument is not as above.

    Example:
      >>> rule = Rule(r".*/(mu|nu)/.*")
      >>> rule.memory_kind, rule.matches("0/mu/dense/kernel"), rule.matches("0/count")
      ('pinned_host', True, False)
    """

    pattern: str | re.Pattern[str]
    memory_kind: MemoryKind = "pinned_host"
    _: dataclasses.KW_ONLY
    min_bytes: int = DEFAULT_MIN_BYTES
    fraction: float = 1.0
    slice_axis: int | Literal["auto"] | None = "auto"
    optional: bool = False
    codec: CodecName | None = None
    signed: bool | None = None

    def __post_init__(self):
        object.__setattr__(self, "pattern", compile_pattern(self.pattern))
        check_memory_kind(self.memory_kind)
        check_bytes("min_bytes", self.min_bytes, 0)
        _check_fraction(self.fraction, self.memory_kind)
        object.__setattr__(self, "fraction", float(self.fraction))
        axis = self.slice_axis
        if axis not in (None, "auto") and (
            isinstance(axis, bool) or not isinstance(axis, int) or axis < 0
        ):
            raise ValueError(
                f"slice_axis is {axis!r}; it must be an axis, counted from 0, None or "
                "'auto'"
            )
        if not isinstance(self.optional, bool):
            raise ValueError(f"optional is {self.optional!r}; it must be a bool")
        if self.codec not in (None, *CODEC_NAMES):
            raise ValueError(
                f"codec is {self.codec!r}; it must be one of "
                + ", ".join(map(repr, CODEC_NAMES))
            )
        if not (self.signed is None or isinstance(self.signed, bool)):
            raise ValueError(f"signed is {self.signed!r}; it must be a bool")

    @property
    def regex(self) -> str:
        """The pattern as text."""
        return self._compiled.pattern

    @property
    def _compiled(self) -> re.Pattern[str]:
        # Once for a rule: it is looked up for each leaf.
        return cast("re.Pattern[str]", self.pattern)

    def matches(self, path: str) -> bool:
        """Returns whether this rule's pattern matches the whole of ``path``.

        A part of an encoded leaf is matched by what matches the leaf.
        """
        return trees.matches(self._compiled, path)


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """Rules in order, of which the first that matches decides, and their window.

    Args:
      rules: One or more `Rule`; a regex stands for ``Rule(regex)``. They are of the
        optimizer's state.
      window_bytes: The bytes of state that may be on the device at once during an
        update; None lets `offload` choose.
      parameters: Rules of parameters, for `place`: ``place(params, config.parameters)``
        puts on the host what rests there, and encodes what has a codec. Their paths
        begin at the parameters.
      step: The options that the step is jitted with, as in
        ``jit(train_step, **config.step)``.

    Raises:
      TypeError, ValueError: An argument is not as above.

    Example:
      >>> config = OffloadConfig((Rule(".*/embed.*", "device"), Rule(".*")))
      >>> len(config.rules), config.window_bytes, config.step["residuals"]
      (2, None, 'device')
    """

    rules: Sequence[Rule]
    window_bytes: int | None = None
    parameters: Sequence[Rule] = ()
    step: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self):
        rules = _checked("rules", self.rules)
        if not rules:
            raise ValueError(
                "rules is empty, so nothing would be offloaded. Give at least one "
                "Rule, or leave the optimizer as it is"
            )
        object.__setattr__(self, "rules", rules)
        parameters = _checked("parameters", self.parameters)
        check_codecs("parameters", parameters, PARAMETER_CODECS)
        object.__setattr__(self, "parameters", parameters)
        if self.window_bytes is not None:
            check_bytes("window_bytes", self.window_bytes, 1)
        if not isinstance(self.step, Options):
            raise TypeError(
                f"step is {self.step!r}; it must be what load_config(file).step is"
            )

    @property
    def lenient(self) -> bool:
        """Returns whether all rules may match nothing."""
        return all(rule.optional for rule in self.rules)

    def made_lenient(self) -> OffloadConfig:
        """The same, with rules that may match nothing."""
        rules = [dataclasses.replace(rule, optional=True) for rule in self.rules]
        return dataclasses.replace(self, rules=rules)


def check_codecs(name: str, rules: Iterable[Rule], allowed: Sequence[str]) -> None:
    """Raises where a rule names a codec that is not for what the rules are of.

    Args:
      name: What the rules are called.
      rules: The rules.
      allowed: The codecs for what they are of.
    """
    wrong = [rule for rule in rules if rule.codec not in (None, *allowed)]
    if wrong:
        other = "frozen parameters, as a base under adapters"
        if allowed is PARAMETER_CODECS:
            other = "the state of an optimizer"
        of_rule = trees.literal(wrong[0].regex)
        raise ValueError(
            f"{name} has codec {wrong[0].codec!r} in the rule of {of_rule}, "
            f"which is for {other}. Leave the codec out, or give one of "
            + ", ".join(map(repr, allowed))
        )


def _checked(name: str, rules: Any) -> tuple[Rule, ...]:
    """Rules, of which some are given as regexes."""
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(f"{name} must be a sequence of Rule, got {rules!r}")
    made: list[Rule] = []
    for position, rule in enumerate(cast("Sequence[Any]", rules)):
        if not isinstance(rule, (Rule, str, re.Pattern)):
            raise TypeError(
                f"{name}[{position}] is {rule!r}; it must be an optax_offload.Rule "
                "or a regex"
            )
        made.append(rule if isinstance(rule, Rule) else Rule(rule))
    return tuple(made)


_OneRule = str | re.Pattern[str] | Rule
Rules = _OneRule | Sequence[_OneRule] | OffloadConfig


def as_config(rules: Rules, window_bytes: int | None = None) -> OffloadConfig:
    """Makes an `OffloadConfig` of what `offload` and the reports take for ``rules``."""
    # No path of a leaf ends so.
    if isinstance(rules, os.PathLike) or str(rules).endswith(".toml"):
        raise TypeError(
            f"rules is a file. Read it first: optax_offload.load_config({str(rules)!r})"
        )
    if isinstance(rules, (str, re.Pattern)):
        rules = Rule(rules)
    if isinstance(rules, Rule):
        rules = (rules,)
    if hasattr(rules, "init") and hasattr(rules, "update"):
        raise TypeError(
            "rules is an optimizer. Give the rules that offload was given: '.*' if it "
            "was given none"
        )
    if isinstance(rules, OffloadConfig):
        config = rules
    elif isinstance(rules, Sequence):
        # It takes a regex for a rule, and has rules only.
        config = OffloadConfig(cast("Sequence[Rule]", rules))
    else:
        raise TypeError(
            "rules must be a regex, a Rule, a sequence of these or an OffloadConfig, "
            f"got {rules!r}"
        )
    if window_bytes is None:
        return config
    return dataclasses.replace(config, window_bytes=window_bytes)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The decision for one leaf.

    Attributes:
      memory_kind: The memory kind that the leaf is kept in between updates.
      why: The reason, for people to read.
      rule: The rule that decided, None where none matches.
    """

    memory_kind: str
    why: str
    rule: Rule | None = None


def decide(
    config: OffloadConfig,
    leaves: Sequence[tuple[str, int | None]],
    *,
    under: str | None = None,
) -> list[Placement]:
    """Decides for each leaf, given as (path, bytes), where it is kept.

    Args:
      config: The rules.
      leaves: The bytes are None for a leaf that cannot be in host memory.
      under: The path of the state that the rules are for, whose leaves they know
        without it. None where nobody can say it.

    Returns:
      A decision for each leaf. The memory kind of those that are not under that path
      is "": the rules say nothing of them.

    Raises:
      ValueError: A rule that is not optional decides no leaf, or no leaf is there.
    """
    prefix = f"{under}/" if under else ""
    inside = [
        (path.removeprefix(prefix), nbytes) if path.startswith(prefix) else None
        for path, nbytes in leaves
    ]
    paths = [path for path, _ in leaves]
    if under and not any(inside):
        raise ValueError(trees.nothing_under_message(under, paths))
    whole = () if under is None else paths
    placed = iter(_placed(config, [leaf for leaf in inside if leaf is not None], whole))
    elsewhere = Placement("", f"not under {under!r}")
    return [elsewhere if leaf is None else next(placed) for leaf in inside]


def _placed(
    config: OffloadConfig,
    leaves: Sequence[tuple[str, int | None]],
    whole: Sequence[str],
) -> list[Placement]:
    positions = [
        next((i for i, rule in enumerate(config.rules) if rule.matches(path)), None)
        for path, _ in leaves
    ]
    decided = set(positions)
    idle = [
        i
        for i, rule in enumerate(config.rules)
        if i not in decided and not rule.optional
    ]
    if idle:
        paths = [path for path, _ in leaves]
        raise ValueError("\n".join(_idle_rule(config, i, paths, whole) for i in idle))
    placements = [
        _placement(config, position, nbytes)
        for position, (_, nbytes) in zip(positions, leaves, strict=True)
    ]
    for position, rule in enumerate(config.rules):
        if rule.fraction < 1:
            # What would move without it, whose bytes are known.
            moving = {
                i: (path, nbytes or 0)
                for i, (path, nbytes) in enumerate(leaves)
                if positions[i] == position and placements[i].memory_kind != "device"
            }
            share = _share(
                rule, f"rule {position} {trees.literal(rule.regex)}", moving.values()
            )
            for i, (path, _) in moving.items():
                placements[i] = share[trees.encoded_leaf(path) or path]
    return placements


def _share(
    rule: Rule, name: str, leaves: Collection[tuple[str, int]]
) -> dict[str, Placement]:
    """The decision for each leaf of which a share moves, by its path.

    The parts of an encoded leaf are one leaf: neither is of use without the others.
    """
    sizes: Counter[str] = Counter()
    for path, nbytes in leaves:
        sizes[trees.encoded_leaf(path) or path] += nbytes
    # As it was written: as a binary number 0.07 is more than 7 of 100.
    wanted = Fraction(str(rule.fraction)) * sizes.total()
    moved: set[str] = set()
    moved_bytes = 0
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        if moved_bytes < wanted:
            moved.add(path)
            moved_bytes += sizes[path]
    why = (
        f"the largest {size_text(moved_bytes)} of {size_text(sizes.total())}, for "
        f"fraction {rule.fraction:g} ({name})"
    )
    return {
        path: Placement(rule.memory_kind, why, rule)
        if path in moved
        else Placement("device", f"beyond {why}", rule)
        for path in sizes
    }


def _placement(
    config: OffloadConfig, position: int | None, nbytes: int | None
) -> Placement:
    if position is None:
        return Placement("device", "no rule matches")
    rule = config.rules[position]
    name = f"rule {position} {trees.literal(rule.regex)}"
    if rule.memory_kind != "device":
        if nbytes is None:
            return Placement("device", f"random keys cannot move ({name})", rule)
        if not nbytes:
            return Placement("device", f"empty leaf ({name})", rule)
        if nbytes < rule.min_bytes:
            least = size_text(rule.min_bytes)
            return Placement("device", f"under {least} ({name})", rule)
    return Placement(rule.memory_kind, name, rule)


def _idle_rule(
    config: OffloadConfig, position: int, paths: list[str], whole: Sequence[str]
) -> str:
    rule = config.rules[position]
    name = f"rule {position}, pattern {trees.literal(rule.regex)},"
    for path in paths:
        if rule.matches(path):
            first = next(i for i, r in enumerate(config.rules) if r.matches(path))
            earlier = f"{first}, {trees.literal(config.rules[first].regex)}"
            return (
                f"{name} never decides: each leaf that it matches, such as {path!r}, "
                f"is decided by an earlier rule ({earlier}). Put it before that rule, "
                "or remove it"
            )
    if not paths:
        return (
            f"{name} matches no leaf, because the tree has no leaves. An optimizer "
            "without state, such as optax.sgd without momentum, has nothing to move, "
            "so leave offload(...) out"
        )
    pattern = compile_pattern(rule.pattern)
    under = trees.beginning(pattern, whole)
    if under:
        return f"{name} matches no leaf, and does below {under!r}: give under={under!r}"
    remedy = trees.remedy(pattern, paths)
    return (
        f"{name} matches no leaf. {remedy}. A pattern must match the whole path of a "
        "leaf. If the rule may match nothing, write Rule(..., optional=True)"
    )
