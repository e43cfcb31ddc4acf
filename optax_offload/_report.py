"""What is where: planned against actual."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import numpy as np

from optax_offload import _memory, _rules


class MemoryKindError(RuntimeError):
    """State is not where it was planned to be."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf.

    Attributes:
      path: its path.
      shape: its global shape.
      dtype: its dtype.
      nbytes: its bytes, each element counted once however often it is replicated.
      nbytes_per_device: the bytes of the largest shard, whichever memory of a device
        it belongs to.
      planned: the memory kind that the rules give it; None without rules.
      actual: the memory kind it has; None for a value that is no array, which has none.
      why: what decided where it was planned.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    nbytes_per_device: int
    planned: str | None
    actual: str | None
    why: str

    @property
    def misplaced(self) -> bool:
        """Whether the leaf is not where it was planned."""
        return self.planned not in (None, self.actual)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Where every leaf of a tree is; ``str()`` of it is a table.

    Attributes:
      rows: one for each leaf, in the order of the tree.
    """

    rows: tuple[Row, ...]

    @property
    def totals(self) -> dict[str | None, int]:
        """The bytes in each memory kind that is there."""
        totals: Counter[str | None] = Counter()
        for row in self.rows:
            totals[row.actual] += row.nbytes
        return dict(totals)

    @property
    def totals_per_device(self) -> dict[str | None, int]:
        """The bytes of each memory kind that belong to one device."""
        totals: Counter[str | None] = Counter()
        for row in self.rows:
            totals[row.actual] += row.nbytes_per_device
        return dict(totals)

    def check(self) -> MemoryReport:
        """Raises unless every leaf is where it was planned.

        Returns:
          The report itself.

        Raises:
          MemoryKindError: leaves are elsewhere; the message names all of them.
          ValueError: the report was made without rules, so that nothing was planned.
        """
        if self.rows and all(row.planned is None for row in self.rows):
            raise ValueError(
                "nothing was planned: give the rules, memory_report(tree, rules)"
            )
        wrong = [row for row in self.rows if row.misplaced]
        if wrong:
            raise MemoryKindError(
                f"{len(wrong)} of {len(self.rows)} leaves are not where they were "
                "planned:\n"
                + "\n".join(
                    f"  {row.path}: planned {row.planned}, is {row.actual} "
                    f"({row.nbytes} bytes; {row.why})"
                    for row in wrong
                )
                + "\nMove them with optax_offload.set_memory_kind. If a jitted step "
                "returned them: its out_shardings, where given, have to name the "
                "memory kinds"
            )
        return self

    def __str__(self) -> str:
        header = ["path", "shape", "dtype", "bytes", "bytes/device"]
        header += ["planned", "actual", "why"]
        body = [
            [
                row.path or "(the tree itself)",
                "x".join(map(str, row.shape)) or "scalar",
                row.dtype,
                f"{row.nbytes:,}",
                f"{row.nbytes_per_device:,}",
                row.planned or "-",
                (row.actual or "-") + (" (!)" if row.misplaced else ""),
                row.why,
            ]
            for row in self.rows
        ]
        right = (3, 4)
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]

        def line(cells: list[str]) -> str:
            padded = (
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return "  ".join(padded).rstrip()

        per_device = self.totals_per_device
        totals = [
            f"{kind or 'no memory kind'}: {nbytes:,} bytes, {per_device[kind]:,} per "
            "device"
            for kind, nbytes in self.totals.items()
        ]
        rule = "-" * len(line(header))
        return "\n".join([line(header), rule, *map(line, body), rule, *totals])


def memory_report(tree: Any, rules: _rules.Rules | None = None) -> MemoryReport:
    """Says where every leaf of a tree is, beside where rules want it.

    Args:
      tree: the state that the rules were given for: arrays, or
        `jax.ShapeDtypeStruct` of them.
      rules: as in `offload`; None to report only what is.

    Returns:
      A `MemoryReport`.

    Raises:
      TypeError, ValueError: as for `offload`: the rules are wrong, or one of them
        decides no leaf.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.sgd(0.1, momentum=0.9), ".*trace.*")
      >>> state = tx.init({"w": jnp.zeros((256, 128))})
      >>> print(oo.memory_report(state, ".*trace.*").check().totals)
      {'pinned_host': 131072}
    """
    leaves = _rules.leaves_with_paths(tree)
    measured = [(path, x, *_sizes(x)) for path, x in leaves]
    placements: list[_rules.Placement | None] = [None] * len(leaves)
    if rules is not None:
        config = _rules.as_config(rules)
        placements = [
            *_rules.place(
                config, [(p, _memory.movable_nbytes(x)) for p, x, _, _ in measured]
            )
        ]
    return MemoryReport(
        tuple(
            Row(
                path=path,
                shape=tuple(np.shape(x)),
                dtype=str(jax.typeof(x).dtype),
                nbytes=nbytes,
                nbytes_per_device=nbytes_per_device,
                planned=placement.memory_kind if placement else None,
                actual=_memory.memory_kind_of(x),
                why=placement.why if placement else "no rules given",
            )
            for (path, x, nbytes, nbytes_per_device), placement in zip(
                measured, placements, strict=True
            )
        )
    )


def _sizes(x: Any) -> tuple[int, int]:
    """The bytes of a leaf in all, and of its shard on a device."""
    nbytes = _memory.nbytes(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or not nbytes:
        return nbytes, nbytes
    shard = math.prod(sharding.shard_shape(x.shape))
    return nbytes, shard * (nbytes // math.prod(x.shape))
