"""A plan: its rules, peaks and times; as a text, a file and a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optax_offload import aot
from optax_offload._ground.units import (
    GIB,
    Printed,
    html_paragraph,
    html_table,
    leaves_text,
    milliseconds,
    seconds_text,
    size_text,
)
from optax_offload._places import rule_files
from optax_offload._places.rules import PARAMETER_CODECS, OffloadConfig, Rule
from optax_offload._plan.allowed import REMAINDER
from optax_offload._plan.alternatives import Alternatives
from optax_offload._plan.budget import GPU_DEFAULT_FRACTION, MEM_FRACTION
from optax_offload._plan.candidates import (
    OTHERS,
    STATE_AT_ONCE,
    THE_REST,
    CompiledCandidate,
)
from optax_offload._plan.state import LeafPattern
from optax_offload._step import offload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A step that takes so many times as long may be worth another way of saving memory.
SLOW = 1.5


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
      encoded: The leaves of state that it encodes, whether they move or not.
      frozen: The frozen parameters that it moves or encodes.
      placed: The names of the trees that rules of parameters are for.
      before: The step as the given rules have it: the plain one if there are none.
      after: The step with the plan; the same if nothing is to be done. Its ``time`` is
        the modeled one, and ``parts`` what fills the device: parameters, state,
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
      donated: The arguments that the step donates, as `jit` takes them; None where that
        is not known.
    """

    target: aot.Target
    budget_bytes: int
    config: OffloadConfig
    moved: tuple[LeafPattern, ...]
    before: CompiledCandidate
    after: CompiledCandidate
    compiled: tuple[CompiledCandidate, ...]
    alternatives: Alternatives
    environment: Mapping[str, str]
    encoded: tuple[LeafPattern, ...] = ()
    frozen: tuple[LeafPattern, ...] = ()
    placed: tuple[str, ...] = ("params",)
    host_memory_bytes: int | None = None
    outside: tuple[str, ...] = ()
    tokens: int | None = None
    complete: bool = True
    donated: Mapping[str, Any] | None = None

    @property
    def empty(self) -> bool:
        """True if all state stays on the device, as it is."""
        return all(
            rule.memory_kind == "device" and rule.codec is None
            for rule in self.config.rules
        )

    @property
    def given(self) -> tuple[Rule, ...]:
        """The rules of state that were given."""
        own = len(self.moved) + len(self._kept)
        return tuple(self.config.rules[: -own or None])

    @property
    def _kept(self) -> list[LeafPattern]:
        """The patterns of what is encoded and not moved."""
        moved = {leaf.path for p in self.moved for leaf in p.leaves}
        return [p for p in self.encoded if p.leaves[0].path not in moved]

    @property
    def verdict(self) -> str:
        """How it fits."""
        if not self.before.fits:
            return f"fits with {self.after.what}"
        if self.empty and not self.config.parameters:
            return "fits as it is: nothing is moved"
        return "fits with the given rules: nothing more is moved (not tried without)"

    def offload(self, inner: Any) -> Any:
        """Wraps an optimizer as the plan says: with `offload`, or not at all.

        Args:
          inner: The optimizer that the step factory gave to its ``offload``.
        """
        return inner if self.empty else offload(inner, self.config)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rules as a file for `load_config`, with a comment on each.

        Raises:
          OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.rule_file())

    def rule_file(self) -> str:
        """The text that `save` writes."""
        head = "Rules for optax_offload.offload, found by `optax-offload fit`:"
        given = len(self.given)
        comments = [["Given."] if len(self.config.rules) > 1 else []] * given
        if not self.moved and self.config.rules == (Rule(".*", "device"),):
            fits = "Everything fits: all" if self.before.fits else "All"
            comments = [[f"{fits} state stays on the device."]]
        comments += [_comment(pattern) for pattern in self.moved]
        comments += [
            [f"Encodes {_leaves(p)}: {size_text(p.nbytes_per_device)} on each device."]
            for p in self._kept
        ]
        return rule_files.config_text(
            self.config, [head, *self._summary()], comments, self.placed, self.jitting()
        )

    @property
    def host_bytes(self) -> int:
        """The host memory that the step needs of each host."""
        return self.after.host_bytes * self.target.devices_per_host

    def _summary(self) -> list[str]:
        took = sum(c.seconds for c in self.compiled)
        before, after = self.before.used_bytes, self.after.used_bytes
        lines = [
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device",
            f"peak as given, compiled for this memory: {size_text(before)}"
            + (f", {self.verdict}" if self.before.fits else ""),
        ]
        lines += [*self.undonated(), *self.unfused()]
        if not self.before.fits:
            lines.append(f"chosen: {self.after.what}")
            lines.append(f"its peak: {size_text(after)}")
        lines += self.host()
        lines += self.timing()
        lines.append(f"compiled {len(self.compiled)} times, {seconds_text(took)}")
        if not self.complete:
            lines.append("interrupted: this is the best way found so far")
        lines += self.numerics()
        return lines + self.settings()

    def settings(self) -> list[str]:
        """Lines on the variables to set, and why."""
        default = f"; a process takes {GPU_DEFAULT_FRACTION} of a GPU by default"
        why = {MEM_FRACTION: default}
        return [f"set {x}={y}{why.get(x, '')}" for x, y in self.environment.items()]

    def unfused(self) -> list[str]:
        """Lines on the gradients that are not fused, and what fusing them would save.

        Nothing where all of them are, or where the step fits as it is.
        """
        if self.before.fits or not self.outside:
            return []
        lines = [f"not fused: {line}" for line in self.outside]
        size = self.after.parts.get("gradients", 0)
        if size:
            lines.append(f"if all were fused: up to {size_text(size)} less")
        return lines

    def undonated(self) -> list[str]:
        """A line on a step that donates nothing; none where that is not known."""
        if self.donated is None or self.donated:
            return []
        return [
            "the step donates nothing, so its old and its new parameters and state are "
            "there at once: give Step(..., donate_argnums=...), as (0, 1)"
        ]

    def advice(self) -> list[str]:
        """A line on what may be faster than a plan that waits for the link.

        Nothing where residuals are less than a quarter of the peak.
        """
        before = self.before
        residuals = before.parts.get("residuals", 0)
        slow = self.after.step_seconds > SLOW * before.step_seconds
        if not slow or residuals < before.used_bytes / 4:
            return []
        return [
            f"residuals are {size_text(residuals)} of the peak as given: "
            "jax.checkpoint (nn.remat, nnx.remat) around each layer frees most of "
            "them, and may be faster than this plan"
        ]

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
        """Lines on the modeled time of a step; none where the compiler tells none."""
        time, plain = self.after.time, self.before.time
        if time is None:
            return []
        line = f"modeled step: {milliseconds(time.seconds)}"
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
            lines.append("tx = oo.offload(optax.adamw(...), config)  # your own")
        if self.config.parameters:
            lines += map(rule_files.placing, self.placed)
        return [*lines, f"step = {self.jitting()}"]

    def jitting(self) -> str:
        """The call that jits a train step, with what the step factory donates."""
        donated = (f"{name}={value!r}" for name, value in (self.donated or {}).items())
        return f"oo.jit({', '.join(['train_step', *donated, '**config.step'])})"

    def numerics(self) -> list[str]:
        """Lines on what the codecs do to the numbers, and where that was measured."""
        lines: list[str] = []
        every = [p for p in (*self.encoded, *self.frozen) if p.codec]
        for codec in dict.fromkeys(p.codec for p in every):
            some = [p for p in every if p.codec == codec]
            what, effect = _NUMBERS.get(codec or "", _OF_MOMENTS)
            leaves = leaves_text(sum(len(p.leaves) for p in some))
            size = sum(p.nbytes_per_device for p in some)
            lines.append(
                f"kept as {codec}: {leaves} of {what}, {size_text(size)} of each "
                f"device. {effect}"
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
        leaves = leaves_text(sum(len(pattern.leaves) for pattern in self.moved))
        return (
            f"for {self.target.name}, {size_text(self.budget_bytes)} on each device, "
            f"{leaves} moved, peak {size_text(before)} -> {size_text(after)}"
        )

    def _repr_html_(self) -> str:
        parts = filling(self)
        used = [size_text(x.used_bytes) for x in (self.before, self.after)]
        header = ["of each device", "as given", "with the plan"]
        return "".join(
            [
                html_paragraph(self._headline()),
                html_table(
                    [header, *parts, ["peak", *used]], right=(1, 2), bold=[len(parts)]
                ),
                self.alternatives._repr_html_(),
            ]
        )

    def __str__(self) -> str:
        moved = [
            f"  {size_text(p.nbytes_per_device):>10}  {p.pattern}" for p in self.moved
        ]
        filled = filling(self)
        width = max((len(part) for part, *_ in filled), default=0)
        parts = [f"  {x:<{width}} {old:>10} -> {new:>10}" for x, old, new in filled]
        head, *rest = self._summary()
        assumed = [f"assumed {a}" for a in self.alternatives.assumptions]
        table = str(self.alternatives).splitlines()
        return "\n".join([head, *rest, *parts, *moved, *table, *assumed])


def filling(plan: Plan) -> list[tuple[str, str, str]]:
    """What fills each device: a part, its size as given and that with the plan."""
    before, after = plan.before.parts, plan.after.parts
    return [
        (part, size_text(before.get(part, 0)), size_text(after.get(part, 0)))
        for part in dict.fromkeys([*before, *after])
    ]


# The leaves that a codec is for, and its effect.
_OF_MOMENTS = (
    "moments",
    "Updates then differ from those in float32; docs/low-bits.md shows the effect on "
    "training",
)
_OF_FROZEN = (
    "frozen parameters",
    "The step computes with rounded values; help(oo.place) says how far off they are",
)
_NUMBERS = {
    REMAINDER: (
        "master weights",
        "With their bfloat16 parameters they are the float32 weights, exactly",
    ),
    **dict.fromkeys(PARAMETER_CODECS, _OF_FROZEN),
}


def _comment(pattern: LeafPattern) -> list[str]:
    why = {
        (True, True): "updated in slices, so all of it leaves the peak",
        (True, False): "updated in slices, so all of it leaves the peak",
        (False, True): "sharded along every axis, so updated whole",
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


COLORS = {
    "parameters": "#4269d0",
    "state": "#ff725c",
    "gradients": "#efb118",
    "residuals": "#6cc5b0",
    STATE_AT_ONCE: "#a463f2",
    THE_REST: "#97bbf5",
    OTHERS: "#9c9c9c",
}


def check_can_plot() -> type[Figure]:
    """Returns the class that draws a figure. Call it before the work that takes long.

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
    """Draws a plan, as PNG or whatever the path's ending says.

    On the left the peaks before and after as stacked bars, beside the budget; on the
    right all that was compiled, the modeled time of a step against its peak.

    Args:
      plan: The plan.
      path: The picture.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure_class = check_can_plot()
    figure = figure_class(figsize=(10, 4.5), layout="constrained")
    bars, times = figure.subplots(1, 2)
    _draw_parts(plan, bars)
    _draw_times(plan, times)
    figure.savefig(path, dpi=150)


def _draw_parts(plan: Plan, axes: Any) -> None:
    bars = {"as given": plan.before.parts, "with the plan": plan.after.parts}
    bottoms = [0.0] * len(bars)
    for part, color in COLORS.items():
        heights = [
            sum(n for name, n in parts.items() if name.partition(" (")[0] == part) / GIB
            for parts in bars.values()
        ]
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
    axes.legend(loc="upper right", fontsize="small")


def _draw_times(plan: Plan, axes: Any) -> None:
    """A point for each way that has a modeled time; the chosen one is filled."""
    rows = [row for row in plan.alternatives.rows if row.step_seconds is not None]
    for row in rows:
        peak, seconds = row.used_bytes / GIB, row.step_seconds or 0.0
        color = "#3ca951" if row.fits else "#ff725c"
        face = color if row.chosen else "none"
        axes.scatter(peak, seconds * 1e3, edgecolors=color, facecolors=face, zorder=3)
        axes.annotate(
            row.what,
            (peak, seconds * 1e3),
            fontsize="x-small",
            xytext=(4, 4),
            textcoords="offset points",
        )
    axes.axvline(plan.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="peak of each device (GiB)", ylabel="modeled step (ms)")
    axes.set(title="filled: chosen; green: fits", ylim=(0, None))
    axes.margins(x=0.2)
