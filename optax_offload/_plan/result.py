"""A plan: its rules, peaks and cost; as a file, as a picture; and where none fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optax_offload import _offload, _rules, aot
from optax_offload._plan.cost import Cost
from optax_offload._plan.search import STATE_AT_ONCE, CompiledCandidate
from optax_offload._plan.state import LeafPattern
from optax_offload._units import GIB, Printed, size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Printed):
    """The rules by which a step fits, what they save and what they cost.

    ``str()`` of it is the same for a person.

    Attributes:
      target: The chips that it was compiled for.
      budget_bytes: What the step may take on each device.
      config: The rules. If nothing is to be moved, one that keeps all on the device.
      moved: The leaves that the plan moves, beside what was given: for each of its
        rules the ``pattern`` and the ``leaves``.
      encoded: The leaves that it encodes, whether they move or not.
      before: The step as the given rules have it: the plain one if there are none.
      after: The step with the plan; the same if nothing is to be moved. The ``parts``
        of both are of parameters, gradients, activations (with all else that is
        temporary), state, state loaded at once (of the host's, where something joins
        all of it), and other arguments and results; parameters and state are those of
        the arguments, gradients count as much as parameters, less those that never
        exist, as far as the temporaries reach.
      compiled: All candidates that were compiled, in order.
      cost: The time that a step takes longer for its transfers.
      environment: The variables to set for the process that trains.
      fused: The step as the given rules have it, with its updates in the backward pass
        (`stream`) and nothing more moved. None if it fits without, if nothing of
        it can be fused, or if it is jitted. ``after.fused`` says whether the plan's
        step is fused.
      outside: Why gradients are left outside of the backward pass, a line for each
        reason; nothing where that was not tried.
    """

    target: aot.Target
    budget_bytes: int
    config: _rules.OffloadConfig
    moved: tuple[LeafPattern, ...]
    before: CompiledCandidate
    after: CompiledCandidate
    compiled: tuple[CompiledCandidate, ...]
    cost: Cost
    environment: Mapping[str, str]
    fused: CompiledCandidate | None = None
    encoded: tuple[LeafPattern, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether all state stays on the device, as it is."""
        return all(
            rule.memory_kind == "device" and rule.codec is None
            for rule in self.config.rules
        )

    def offload(self, inner: Any) -> Any:
        """Wraps an optimizer as the plan says: with `offload`, or not at all.

        Args:
          inner: The optimizer that the step factory gave to its ``offload``.
        """
        return inner if self.empty else _offload.offload(inner, self.config)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rules as a file for `load_config`, with a comment on each.

        Raises:
          OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.rule_file())

    def rule_file(self) -> str:
        """The text that `save` writes."""
        kept = [p for p in self.encoded if p not in self.moved]
        return rule_file_text(self.config, self.moved, kept, self._summary())

    def _summary(self) -> list[str]:
        took = sum(c.seconds for c in self.compiled)
        before, after = self.before.used_bytes, self.after.used_bytes
        lines = [
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device",
            f"peak as given: {size_text(before)}"
            + (", fits: nothing is moved" if self.before.fits else ""),
            *self.fusing(),
        ]
        if self.moved:
            moved = self.after.moved_bytes
            lines.append(
                f"peak with these rules: {size_text(after)}, with {size_text(moved)} "
                "of state in host memory"
            )
        lines.append(f"compiled {len(self.compiled)} times, {took:.0f} s")
        lines += self.numerics()
        return lines + [f"set {name}={x}" for name, x in self.environment.items()]

    def fusing(self) -> list[str]:
        """Lines on what updates in the backward pass bring, if they were tried."""
        lines: list[str] = []
        if self.fused is not None:
            lines.append(
                "peak with updates in the backward pass, before anything is moved: "
                f"{size_text(self.before.used_bytes)} -> "
                f"{size_text(self.fused.used_bytes)}"
                + (", fits: nothing is moved" if self.fused.fits else "")
            )
        if self.after.fused:
            lines.append(
                "the plan is for updates in the backward pass: train with "
                "oo.jit(step), or jit oo.stream(step)"
            )
        return [*lines, *self.outside]

    def numerics(self) -> list[str]:
        """What the codec does to the numbers, and where that was measured."""
        codec = next((p.codec for p in self.encoded), None)
        if codec is None:
            return []
        count = sum(len(p.leaves) for p in self.encoded)
        size = sum(p.nbytes_per_device for p in self.encoded)
        return [
            f"{count} leaves of moments are kept as {codec}: {size_text(size)} on each "
            "device. Updates are not those of float32: docs/low-bits.md has what "
            "training makes of it"
        ]

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs: what `optax-offload fit --json` prints."""
        rules = [
            {
                "pattern": rule.regex,
                "memory_kind": rule.memory_kind,
                "min_bytes": rule.min_bytes,
                "slice_axis": rule.slice_axis,
                "optional": rule.optional,
                "codec": rule.codec,
            }
            for rule in self.config.rules
        ]
        moved = [
            {
                "pattern": pattern.pattern,
                "leaves": [leaf.path for leaf in pattern.leaves],
                "bytes_per_device": pattern.nbytes_per_device,
            }
            for pattern in self.moved
        ]
        return {
            "target": self.target.name,
            "budget_bytes": self.budget_bytes,
            "empty": self.empty,
            "rules": rules,
            "moved": moved,
            "before": self.before.as_dict(),
            "fused": None if self.fused is None else self.fused.as_dict(),
            "outside": list(self.outside),
            "after": self.after.as_dict(),
            "compiled": [c.as_dict() for c in self.compiled],
            "cost": self.cost.as_dict(),
            "environment": dict(self.environment),
        }

    def _headline(self) -> str:
        before, after = self.before.used_bytes, self.after.used_bytes
        leaves = sum(len(pattern.leaves) for pattern in self.moved)
        return (
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device, "
            f"{leaves} leaves moved, peak {size_text(before)} -> {size_text(after)}"
        )

    def __str__(self) -> str:
        before, after = self.before.parts, self.after.parts
        moved = [
            f"  {size_text(p.nbytes_per_device):>10}  {p.pattern}" for p in self.moved
        ]
        parts = [
            f"  {part:<12} {size_text(before.get(part, 0)):>10} -> "
            f"{size_text(after.get(part, 0)):>10}"
            for part in dict.fromkeys([*before, *after])
        ]
        head, *rest = self._summary()
        return "\n".join([head, *rest, *parts, *moved, *self.cost.lines()])


def rule_file_text(
    config: _rules.OffloadConfig,
    moved: Sequence[LeafPattern],
    kept: Sequence[LeafPattern],
    summary: Sequence[str],
) -> str:
    """The file.

    Args:
      config: The rules: those given, of what is moved, of what is encoded where it is.
      moved: What the rules after those given move, in their order.
      kept: What the last rules encode and do not move.
      summary: Lines about the whole, for the head of the file.
    """
    head = ["Rules for optax_offload.offload, found by `optax-offload fit`:", *summary]
    lines = [_commented(line) for line in head]
    if config.window_bytes is not None:
        lines += ["", f"window_bytes = {config.window_bytes}"]
    given = len(config.rules) - len(moved) - len(kept)
    comments = [["Given."] if moved or len(config.rules) > 1 else []] * given
    if not moved and config.rules == (_rules.Rule(".*", "device"),):
        comments = [["Everything fits: all state stays on the device."]]
    comments += [_comment(pattern) for pattern in moved]
    comments += [
        [f"Encodes {_leaves(p)}: {size_text(p.nbytes_per_device)} on each device."]
        for p in kept
    ]
    for rule, comment in zip(config.rules, comments, strict=True):
        lines += ["", *map(_commented, comment), "[[rules]]", *_keys(rule)]
    return "\n".join(lines) + "\n"


def _commented(line: str) -> str:
    # TOML allows no control characters, not even there.
    return "# " + "".join(c if c.isprintable() else "?" for c in line)


def _comment(pattern: LeafPattern) -> list[str]:
    why = {
        (True, True): "stacked layers, updated in slices: all of it leaves the peak",
        (True, False): "updated in slices: all of it leaves the peak",
        (False, True): "stacked layers, but sharded along every axis: updated whole",
        (False, False): "updated whole: the largest leaf comes back for that",
    }[pattern.slice_axis is not None, pattern.stacked]
    size = size_text(pattern.nbytes_per_device)
    return [
        f"Moves {_leaves(pattern)}: {size} off each device.",
        f"Why: {why}.",
    ]


def _leaves(pattern: LeafPattern) -> str:
    count = len(pattern.leaves)
    which = f"{count} leaves, the first" if count > 1 else "the leaf"
    return f"{which} {pattern.leaves[0].path}"


def _keys(rule: _rules.Rule) -> list[str]:
    default = _rules.Rule(rule.pattern)
    names = ("memory_kind", "min_bytes", "slice_axis", "optional", "codec", "signed")
    given = {
        n: getattr(rule, n) for n in names if getattr(rule, n) != getattr(default, n)
    }
    return [f"pattern = {_pattern(rule.regex)}"] + [
        f"{name} = {_value(value)}" for name, value in given.items()
    ]


def _pattern(regex: str) -> str:
    # A literal string needs no escapes, but cannot hold these.
    plain = regex.isprintable() and "'" not in regex
    if plain:
        return f"'{regex}'"
    # JSON's escapes are TOML's, but for one character.
    return json.dumps(regex, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    return json.dumps("none" if value is None else value)


def does_not_fit(
    target: aot.Target,
    budget_bytes: int,
    everything: CompiledCandidate,
    state_bytes: int,
) -> aot.DoesNotFitError:
    """The error: by how much it is short, what takes the memory, what would help.

    Args:
      target: The chips that the step was compiled for.
      budget_bytes: What the step may take on each device.
      everything: The step with all state moved that may move.
      state_bytes: The bytes of all state on each device, without offload.
    """
    short = everything.used_bytes - budget_bytes
    parts = {name: n for name, n in everything.parts.items() if n}
    needs = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
    stays = state_bytes - everything.moved_bytes
    weights = parts.get("parameters", 0) + parts.get("gradients", 0)
    activations = parts.get("activations", 0)
    help_with = []
    if state_bytes and stays > short:
        help_with.append(
            f"rules that let go of the {size_text(stays)} of state that stays"
        )
    at_once = parts.get(STATE_AT_ONCE, 0)
    if at_once > short:
        help_with.append(
            f"an optimizer that nothing joins all state of: {size_text(at_once)} of it "
            "is loaded at once, as for a norm of accumulated gradients (a warning says "
            "what joins it, and what to write instead)"
        )
    if activations > short:
        help_with.append(
            f"a smaller batch, or remat (jax.checkpoint, nn.remat): activations and "
            f"all else that is temporary would have to go to "
            f"{size_text(activations - short)}"
        )
    if weights // 2 > short:
        help_with.append("bfloat16 parameters, if they are float32: half of both")
    fused = " and updates in the backward pass" if everything.fused else ""
    ratio = everything.used_bytes / budget_bytes
    more = math.ceil(target.device_count * ratio)
    help_with.append(
        f"more devices: parameters, gradients and batch sharded over at least {more}"
        f" (now {target.device_count}), or larger ones"
    )
    return aot.DoesNotFitError(
        f"does not fit on {target.name!r} even with all state moved{fused}: short by "
        f"{size_text(short)} of {size_text(budget_bytes)} on each device. It needs "
        f"{size_text(everything.used_bytes)}: {needs}. What would help:"
        + "".join(f"\n- {line}" for line in help_with)
        + "".join(f"\n{line}" for line in everything.outside),
        used_bytes=everything.used_bytes,
        limit_bytes=budget_bytes,
        peak=everything.peak,
    )


COLORS = {
    "parameters": "#4269d0",
    "gradients": "#efb118",
    "activations": "#6cc5b0",
    "state": "#ff725c",
    STATE_AT_ONCE: "#a463f2",
    "other": "#9c9c9c",
}


def check_can_plot() -> type[Figure]:
    """What draws a figure; asked for before what takes long.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a plan is drawn with matplotlib: pip install 'optax-offload[plot]'"
        ) from error
    return Figure


def save_plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the peaks before and after as stacked bars, beside the budget, as PNG.

    Args:
      plan: What planning found.
      path: The picture.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure_class = check_can_plot()
    figure = figure_class(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    bars = {"as given": plan.before.parts, "with the plan": plan.after.parts}
    bottoms = [0.0] * len(bars)
    for part, color in COLORS.items():
        heights = [parts.get(part, 0) / GIB for parts in bars.values()]
        if part == STATE_AT_ONCE and not any(heights):
            continue
        axes.bar(list(bars), heights, 0.6, bottoms, label=part, color=color)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (x, total), ha="center", va="bottom")
    budget = plan.budget_bytes / GIB
    axes.axhline(budget, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set(ylabel="peak of each device (GiB)", title=plan.target.name)
    axes.set_ylim(0, 1.1 * max(*bottoms, budget))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)
