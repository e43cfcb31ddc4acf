"""Leaves of the state that one rule moves together, in the order of preference."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from optax_offload import _rules


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
    codec: _rules.CodecName | None = None


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
    def codec(self) -> _rules.CodecName | None:
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
        """Whether all of the leaves are stacked."""
        return all(leaf.stacked for leaf in self.leaves)


def pattern_of(path: str) -> str:
    r"""The regex that matches a path, and those that differ from it in numbers only.

    Example:
      >>> pattern_of("0/mu/layers_10/kernel")
      '\\d+/mu/layers_\\d+/kernel'
    """
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(path))


def leaf_patterns(
    leaves: Sequence[Leaf], min_bytes: int = _rules.DEFAULT_MIN_BYTES
) -> list[LeafPattern]:
    """Puts leaves under patterns, in the order in which they should be moved.

    What can be sliced comes first (a move takes all of it from the peak; of other
    leaves a whole one comes back for its update), stacked leaves before matrices, and
    large before small: fewer rules, in longer transfers. Leaves under ``min_bytes``
    are left out, as `Rule` does.
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
