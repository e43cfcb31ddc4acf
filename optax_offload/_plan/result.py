"""What planning finds: rules, what they save, and what they cost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from optax_offload import _offload, _rules, aot
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.cost import Cost
from optax_offload._plan.patterns import LeafPattern
from optax_offload._plan.rule_file import rule_file_text
from optax_offload._units import Printed, size_text


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
        (`fuse_backward`) and nothing more moved. None if it fits without, if nothing of
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
                "oo.jit(step), or jit oo.fuse_backward(step)"
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
