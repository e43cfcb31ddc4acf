"""A plan: its rules, peaks and times; as a file; and the error where none fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optax_offload import _offload, _rules, aot
from optax_offload._plan.alternatives import Alternatives
from optax_offload._plan.candidates import (
    STATE_AT_ONCE,
    THE_REST,
    Budget,
    CompiledCandidate,
)
from optax_offload._plan.state import REMAINDER, Codecs, LeafPattern
from optax_offload._step_options import Options
from optax_offload._units import Printed, milliseconds, seconds_text, size_text


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Printed):
    """A plan: the settings with which a step fits, what they save and what they cost.

    ``str()`` of it is the same for a person.

    Attributes:
      target: The chips that it was compiled for.
      budget_bytes: The memory that the step may take on each device.
      config: The settings for a train script: the rules of state for `offload` (one
        that keeps all on the device, if none moves), the rules of ``parameters`` for
        `place`, and the options of ``step`` for `jit`.
      moved: The leaves of state that the plan moves, beside what was given: for each of
        its rules the ``pattern`` and the ``leaves``.
      encoded: The leaves that it encodes, whether they move or not.
      before: The step as the given rules have it: the plain one if there are none.
      after: The step with the plan; the same if nothing is to be done. Its ``time`` is
        the modelled one, and ``parts`` what fills the device: parameters, state,
        gradients (as much as parameters, less those that never exist), residuals (what
        scans keep for their backward pass), state loaded at once (of the host's, where
        something joins all of it), other temporaries, and other arguments
        and results. Each counts as far as the compiled program has room for it.
      compiled: All candidates that were compiled, in order.
      alternatives: The table of them, and why each was not chosen.
      environment: The variables to set for the process that trains.
      host_memory_bytes: The memory that the step may take of each host; None where that
        was not bounded.
      outside: The reasons why gradients are left outside of the backward pass, a line
        for each; nothing where fusing was not tried.
      tokens: The tokens of a step, on all devices; None where that was not told.
      complete: Whether the search was finished; otherwise the plan is the best that was
        found.
    """

    target: aot.Target
    budget_bytes: int
    config: _rules.OffloadConfig
    moved: tuple[LeafPattern, ...]
    before: CompiledCandidate
    after: CompiledCandidate
    compiled: tuple[CompiledCandidate, ...]
    alternatives: Alternatives
    environment: Mapping[str, str]
    encoded: tuple[LeafPattern, ...] = ()
    host_memory_bytes: int | None = None
    outside: tuple[str, ...] = ()
    tokens: int | None = None
    complete: bool = True

    @property
    def empty(self) -> bool:
        """True if all state stays on the device, as it is."""
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

    @property
    def host_bytes(self) -> int:
        """The host memory that the step needs of each host."""
        return self.after.host_bytes * self.target.devices_per_host

    def _summary(self) -> list[str]:
        took = sum(c.seconds for c in self.compiled)
        before, after = self.before.used_bytes, self.after.used_bytes
        lines = [
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device",
            f"peak as given: {size_text(before)}"
            + (", fits: nothing is moved" if self.before.fits else ""),
        ]
        if not self.before.fits:
            lines.append(f"chosen: {self.after.what}")
            lines.append(f"its peak: {size_text(after)}")
        lines += self.host()
        lines += self.timing()
        lines.append(f"compiled {len(self.compiled)} times, {seconds_text(took)}")
        if not self.complete:
            lines.append("interrupted: this is the best way found so far")
        lines += self.numerics()
        lines += [] if self.before.fits else self.outside
        return lines + [f"set {name}={x}" for name, x in self.environment.items()]

    def host(self) -> list[str]:
        """A line on the host memory that is needed, if any is."""
        if not self.after.host_bytes:
            return []
        line = f"host memory: {size_text(self.host_bytes)} on each host"
        if self.target.devices_per_host > 1:
            line += f" for its {self.target.devices_per_host} devices"
        if self.host_memory_bytes is not None:
            return [f"{line}, of {size_text(self.host_memory_bytes)}"]
        return [f"{line} (set a limit with --host-memory or host_memory_bytes)"]

    def timing(self) -> list[str]:
        """Lines on the modelled time of a step; none where the compiler tells none."""
        time, plain = self.after.time, self.before.time
        if time is None:
            return []
        line = f"modelled step: {milliseconds(time.seconds)}"
        if plain is not None and self.after is not self.before and plain.seconds:
            line += f", {time.seconds / plain.seconds:.2f} times the step as given"
        line += f", {time.waiting_share:.0%} of it waiting for the link"
        if self.tokens and time.seconds:
            line += f"; {self.tokens / time.seconds:,.0f} tokens a second"
        return [line]

    def training(self, file: str = "rules.toml") -> list[str]:
        """The lines that a train script needs, for a file of this plan."""
        lines = [f'config = oo.load_config("{file}")']
        if not self.empty:
            lines.append("tx = oo.offload(optimizer, config)")
        if self.config.parameters:
            lines.append("params = oo.place(params, config.parameters)")
        return [*lines, "step = oo.jit(train_step, **config.step)"]

    def numerics(self) -> list[str]:
        """Lines on what the codecs do to the numbers, and where that was measured."""
        lines: list[str] = []
        for codec in dict.fromkeys(p.codec for p in self.encoded):
            some = [p for p in self.encoded if p.codec == codec]
            what, effect = _NUMBERS[codec == REMAINDER]
            count = sum(len(p.leaves) for p in some)
            size = sum(p.nbytes_per_device for p in some)
            lines.append(
                f"{count} leaves of {what} are kept as {codec}: {size_text(size)} on "
                f"each device. {effect}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs: what `optax-offload fit --json` prints."""
        rules, parameters = (
            [
                {
                    "pattern": rule.regex,
                    "memory_kind": rule.memory_kind,
                    "min_bytes": rule.min_bytes,
                    "fraction": rule.fraction,
                    "slice_axis": rule.slice_axis,
                    "optional": rule.optional,
                    "codec": rule.codec,
                }
                for rule in some
            ]
            for some in (self.config.rules, self.config.parameters)
        )
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
            "parameters": parameters,
            "step": dict(**self.config.step),
            "window_bytes": self.config.window_bytes,
            "moved": moved,
            "before": self.before.as_dict(),
            "outside": list(self.outside),
            "after": self.after.as_dict(),
            "compiled": [c.as_dict() for c in self.compiled],
            "alternatives": self.alternatives.as_dict(),
            "host_bytes": self.host_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "environment": dict(self.environment),
            "complete": self.complete,
        }

    def _headline(self) -> str:
        before, after = self.before.used_bytes, self.after.used_bytes
        leaves = sum(len(pattern.leaves) for pattern in self.moved)
        return (
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device, "
            f"{leaves} {'leaf' if leaves == 1 else 'leaves'} moved, peak "
            f"{size_text(before)} -> {size_text(after)}"
        )

    def __str__(self) -> str:
        before, after = self.before.parts, self.after.parts
        moved = [
            f"  {size_text(p.nbytes_per_device):>10}  {p.pattern}" for p in self.moved
        ]
        width = max(map(len, [*before, *after]), default=0)
        parts = [
            f"  {part:<{width}} {size_text(before.get(part, 0)):>10} -> "
            f"{size_text(after.get(part, 0)):>10}"
            for part in dict.fromkeys([*before, *after])
        ]
        head, *rest = self._summary()
        assumed = [f"assumed {a}" for a in self.alternatives.assumptions]
        table = str(self.alternatives).splitlines()
        return "\n".join([head, *rest, *parts, *moved, *table, *assumed])


# The leaves that a codec is for, and its effect; the second is that of remainders.
_NUMBERS = (
    (
        "moments",
        "Updates then differ from those in float32; docs/low-bits.md shows what that "
        "does to training",
    ),
    (
        "master weights",
        "With their bfloat16 parameters they are the float32 weights, exactly",
    ),
)


def rule_file_text(
    config: _rules.OffloadConfig,
    moved: Sequence[LeafPattern],
    kept: Sequence[LeafPattern],
    summary: Sequence[str],
) -> str:
    """The text of a rule file.

    Args:
      config: The rules: those given, of what is moved, of what is encoded where it is.
      moved: The leaves that the rules after those given move, in their order.
      kept: The leaves that the last rules encode and do not move.
      summary: Lines about the whole, for the head of the file.
    """
    head = ["Rules for optax_offload.offload, found by `optax-offload fit`:", *summary]
    lines = [_commented(line) for line in head]
    if config.window_bytes is not None:
        lines += ["", f"window_bytes = {config.window_bytes}"]
    lines += _step(config.step)
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
    for position, rule in enumerate(config.parameters):
        comment = [] if position else [_commented(_PLACE)]
        lines += ["", *comment, "[[parameters]]", *_keys(rule)]
    return "\n".join(lines) + "\n"


_PLACE = "Parameters: params = oo.place(params, config.parameters)."


def _step(options: Options) -> list[str]:
    """The table of what a step is jitted with, where that is not what `jit` does."""
    default = Options()
    given = [
        f"{name} = {_value(options[name])}"
        for name in options.keys()  # noqa: SIM118 (it is no mapping but for `**`)
        if options[name] != default[name]
    ]
    comment = "# What the step is jitted with: oo.jit(train_step, **config.step)."
    return ["", comment, "[step]", *given] if given else []


def _commented(line: str) -> str:
    # TOML allows no control characters, not even there.
    return "# " + "".join(c if c.isprintable() else "?" for c in line)


def _comment(pattern: LeafPattern) -> list[str]:
    why = {
        (True, True): "stacked layers, updated in slices, so all of it leaves the peak",
        (True, False): "updated in slices, so all of it leaves the peak",
        (False, True): "stacked layers, but sharded along every axis, so updated whole",
        (False, False): "updated whole, so the largest leaf visits the device",
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
    names = [f.name for f in dataclasses.fields(rule) if f.name not in ("pattern", "_")]
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


class NothingFitsError(aot.DoesNotFitError):
    """No way of training fits.

    Attributes:
      alternatives: The table of what was tried, the nearest of them marked.
    """

    def __init__(
        self,
        target: aot.Target,
        budget: Budget,
        compiled: Sequence[CompiledCandidate],
        table: Alternatives,
        codecs: Codecs = (),
    ):
        """Says by how much, what takes the memory and what would help.

        Args:
          target: The chips that the step was compiled for.
          budget: The memory that the step may take.
          compiled: All candidates that were compiled.
          table: The table of these.
          codecs: The codecs to allow for the least state; nothing if they are allowed.
        """
        on_device = [c for c in compiled if c.used_bytes <= budget.device_bytes]
        if on_device:
            found = min(on_device, key=lambda c: c.host_bytes)
            message = _host_is_short(target, budget, found, codecs)
        else:
            found = min(compiled, key=lambda c: c.used_bytes)
            message = _device_is_short(target, budget, found, codecs)
            message = "\n".join([message, *table.outside])
        super().__init__(
            message,
            used_bytes=found.used_bytes,
            limit_bytes=budget.device_bytes,
            peak=found.peak,
        )
        self.alternatives = table


def _host_is_short(
    target: aot.Target, budget: Budget, least: CompiledCandidate, codecs: Codecs
) -> str:
    devices = target.devices_per_host
    have, need = (n * devices for n in (budget.host_bytes or 0, least.host_bytes))
    return (
        f"host memory is too small: a step that fits {target.name!r} needs at least "
        f"{size_text(need)} on each host ({least.what}), which has {size_text(have)}. "
        "What would help:\n"
        + "\n".join(
            [
                *_fewer_bits(codecs),
                "- a host with more memory, or more hosts that share the state",
                *[_BFLOAT16] * (REMAINDER not in codecs),
            ]
        )
    )


_BFLOAT16 = (
    "- bfloat16 parameters, if they are float32, with oo.master_weights around the "
    "optimizer"
)


def _fewer_bits(codecs: Codecs) -> Iterator[str]:
    """A line that names the codecs to allow, if there are any."""
    what = {
        REMAINDER: "master weights as the half that their bfloat16 parameters lack, "
        "which is exact"
    }
    names = ",".join(codecs)
    means = "; ".join(what.get(c, f"moments as {c}") for c in codecs)
    if codecs:
        yield f"- fewer bits: --allow {names} (allow={names!r}): {means}"


def _device_is_short(
    target: aot.Target, budget: Budget, least: CompiledCandidate, codecs: Codecs
) -> str:
    budget_bytes = budget.device_bytes
    short = least.used_bytes - budget_bytes
    parts = {name: n for name, n in least.parts.items() if n}
    needs = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
    text = (
        f"the step does not fit on {target.name!r}, whatever is moved. The smallest "
        f"way ({least.what}) needs {size_text(least.used_bytes)} on each device, "
        f"{size_text(short)} more than the budget of {size_text(budget_bytes)}: "
        f"{needs}."
    )
    if budget.host_bytes is not None:
        text += (
            " Ways that need more than the "
            f"{size_text(budget.host_bytes * target.devices_per_host)} of each host "
            "were not tried."
        )
    lines = [*_what_helps(target, budget_bytes, least, short)]
    if budget.host_bytes is not None:
        lines = [*_fewer_bits(codecs), *lines]
    return text + " What would help:\n" + "\n".join(lines)


def _what_helps(
    target: aot.Target, budget_bytes: int, least: CompiledCandidate, short: int
) -> Iterator[str]:
    """A line for each part of the peak that is more than what is missing."""
    parts = least.parts
    if parts.get("state", 0) > short:
        yield (
            f"- rules that also move the {size_text(parts['state'])} of state that "
            "stays on the device"
        )
    at_once = sum(n for name, n in parts.items() if name.startswith(STATE_AT_ONCE))
    if at_once > short:
        yield (
            "- an optimizer that does not join all of its state: "
            f"{size_text(at_once)} of it is loaded at once, as for a norm of "
            "accumulated gradients (a warning names the equation, and what to write "
            "instead)"
        )
    temporary = parts.get("residuals", 0) + parts.get(THE_REST, 0)
    if temporary > short:
        yield (
            "- a smaller batch, or remat (jax.checkpoint, nn.remat): residuals and "
            f"other temporaries would have to shrink to {size_text(temporary - short)}"
        )
    if (parts.get("parameters", 0) + parts.get("gradients", 0)) // 2 > short:
        yield "- bfloat16 parameters, if they are float32: that halves gradients too"
    more = math.ceil(target.device_count * least.used_bytes / budget_bytes)
    yield (
        "- more devices: parameters, gradients and batch sharded over at least "
        f"{more} (now {target.device_count}), or larger ones"
    )
