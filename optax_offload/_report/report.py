"""Reports of the planned and the actual memory of every leaf."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import Counter
from typing import Any

import jax

from optax_offload._ground import trees
from optax_offload._ground.errors import CodecError, MemoryKindError, OffloadWarning
from optax_offload._ground.units import Printed, size_text
from optax_offload._host import host_memory
from optax_offload._low_bit import codecs_named, encoded_parts, in_other_forms
from optax_offload._places import memory
from optax_offload._places.rules import (
    Placement,
    Rules,
    as_config,
    decide,
)
from optax_offload._places.unmoved import why_nothing_moves
from optax_offload._report import rendering
from optax_offload._report.rows import ReportRow, row_of

# What a value without a memory kind is filed under.
NO_KIND = "no memory kind"
HOST_KINDS = ("pinned_host", "unpinned_host")


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(Printed):
    """The memory of every leaf of a tree; ``str()`` of it is a table.

    Leaves whose paths differ in numbers only, as those of layers do, and that are alike
    in all else, share a line of the table: ``layers_{0..11}/kernel``.

    Attributes:
      rows: A row for each leaf, in the order of the tree.
      host: The host memory of this process that the tree takes, beside what is free;
        nothing in the reports of `subtrees`.
      under: The path at which the paths of the rules begin; "" for the whole tree.
    """

    rows: tuple[ReportRow, ...]
    host: host_memory.HostMemory = dataclasses.field(
        default_factory=host_memory.HostMemory
    )
    under: str = ""

    @property
    def totals(self) -> dict[str | None, int]:
        """The bytes in each memory kind."""
        return self._sum("nbytes")

    @property
    def totals_per_device(self) -> dict[str | None, int]:
        """The bytes of each memory kind that belong to one device."""
        return self._sum("nbytes_per_device")

    @property
    def totals_per_host(self) -> dict[str | None, int]:
        """The bytes of each memory kind that belong to this process's devices."""
        return self._sum("nbytes_per_host")

    def _sum(self, name: str) -> dict[str | None, int]:
        totals: Counter[str | None] = Counter()
        for row in self.rows:
            totals[row.actual] += getattr(row, name)
        return dict(totals)

    def subtrees(self, depth: int = 1) -> dict[str, MemoryReport]:
        """The report of each subtree, by the first ``depth`` parts of its path.

        Raises:
          ValueError: ``depth`` is less than 1.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        parts: dict[str, list[ReportRow]] = {}
        for row in self.rows:
            parts.setdefault("/".join(row.path.split("/")[:depth]), []).append(row)
        return {
            name: MemoryReport(tuple(rows), under=self.under)
            for name, rows in parts.items()
        }

    def as_dict(self, depth: int = 1) -> dict[str, Any]:
        """The report as plain values, ready for `json.dumps`.

        Args:
          depth: As in `subtrees`.

        Returns:
          ``rows``; ``totals`` and, for each of ``subtrees``, the bytes of each memory
          kind (``bytes``, ``bytes_per_device``, ``bytes_per_host``); ``host`` as in
          `MemoryReport`. A value that is no array has the kind "no memory kind".
        """
        return {
            "rows": [
                dataclasses.asdict(row) | {"shape": list(row.shape)}
                for row in self.rows
            ],
            "totals": self._totals_as_dict(),
            "subtrees": {
                name: part._totals_as_dict()
                for name, part in self.subtrees(depth).items()
            },
            "host": self.host.as_dict(),
        }

    def _totals_as_dict(self) -> dict[str, dict[str, int]]:
        return {
            kind or NO_KIND: {
                "bytes": nbytes,
                "bytes_per_device": self.totals_per_device[kind],
                "bytes_per_host": self.totals_per_host[kind],
            }
            for kind, nbytes in self.totals.items()
        }

    def plot(self, path: str | os.PathLike[str], depth: int = 1) -> None:
        """Writes a bar chart: the bytes of each subtree, by memory kind.

        Args:
          path: The picture; its ending says the format, such as ``.png`` or ``.svg``.
          depth: As in `subtrees`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        named = [*self.subtrees(depth).items(), ("total", self)]
        rendering.plot([(name, part._kinds()) for name, part in named], path)

    def _kinds(self) -> dict[str, int]:
        return {kind or NO_KIND: nbytes for kind, nbytes in self.totals.items()}

    def check(self) -> MemoryReport:
        """Raises unless every leaf is where it was planned, and in the form planned.

        Returns:
          The report itself.

        Raises:
          MemoryKindError: leaves are elsewhere; the message names all of them.
          CodecError: leaves are not in the codec that their rule names, or are in one
            where it names none; the message names all of them.
          ValueError: the report was made without rules, so that nothing was planned.
        """
        if self.rows and all(row.planned is None for row in self.rows):
            raise ValueError(
                "this report was made without rules, so it has nothing to check. Write "
                "memory_report(tree, rules)"
            )
        under = self.under and f", under={self.under!r}"
        fix = f"optax_offload.place(tree, rules{under})"
        others = [row for row in self.rows if row.named]
        if others:
            raise CodecError(
                f"{len(others)} of {len(self.rows)} leaves are in another form than "
                "their rule names:\n"
                + "\n".join(f"  {row.path}: {row.named}" for row in others)
                + "\nConvert them, and move what is not where it was planned, with "
                + fix
            )
        wrong = [row for row in self.rows if row.misplaced]
        if wrong:
            raise MemoryKindError(
                f"{len(wrong)} of {len(self.rows)} leaves are not where they were "
                "planned:\n"
                + "\n".join(
                    f"  {row.path}: planned {row.planned}, is {row.actual} "
                    f"({size_text(row.nbytes)}; {row.why})"
                    for row in wrong
                )
                + f"\nMove them with {fix}. If a jitted step "
                "returned them: make its out_shardings with "
                "optax_offload.state_shardings, which name the memory kinds"
            )
        return self

    def _headline(self) -> str:
        kinds = [f"{size_text(n)} {kind}" for kind, n in self._kinds().items()]
        wrong = sum(row.misplaced for row in self.rows)
        misplaced = [f"{wrong} not where planned"] if wrong else []
        nothing = ["none planned for the host"] if self._why_nothing_moves() else []
        return ", ".join([f"{len(self.rows)} leaves", *kinds, *misplaced, *nothing])

    def __str__(self) -> str:
        return rendering.text(self.rows, self._sums(), self._below())

    def _repr_html_(self) -> str:
        return rendering.html(self._headline(), self.rows, self._sums(), self._below())

    def _sums(self) -> list[list[str]]:
        parts = self.subtrees()
        named = [*(parts.items() if len(parts) > 1 else ()), ("total", self)]
        return [
            [name, kind, *map(size_text, columns.values())]
            for name, part in named
            for kind, columns in part._totals_as_dict().items()
        ]

    def _below(self) -> str:
        below = [self._why_nothing_moves(), str(self.host)]
        return "\n\n".join(filter(None, below))

    def _why_nothing_moves(self) -> str:
        """A line on rules that leave all on the device, as of a small model."""
        planned = [(row.planned, row.why) for row in self.rows if row.planned]
        return why_nothing_moves(planned)


def memory_report(
    tree: Any, rules: Rules | None = None, *, under: str = ""
) -> MemoryReport:
    """Reports where every leaf of a tree is, and where rules want it.

    It also compares the host memory that the devices of this process will take with
    what the machine, its cgroup and, for GPUs, the plugin's own limit leave. That works
    before the first step, and on templates, which take no memory themselves. Processes
    on one machine share its memory, and each counts only its own needs.

    Args:
      tree: Arrays, or `jax.ShapeDtypeStruct` of them as from `eval_shape`: the state
        that the rules were given for, or a larger tree that has it ``under`` a path.
      rules: As in `offload`; None to report only what is.
      under: The path of the state that the rules were given for, as
        ``"opt_state/1"`` in a Flax ``TrainState`` whose optimizer is
        ``optax.chain(clip, offload(...))``. Leaves outside of it have no plan.

    Returns:
      A `MemoryReport`.

    Raises:
      TypeError, ValueError: the rules are wrong, or match nothing, as in `offload`;
        no leaf is ``under`` the path; or a leaf is a function.

    Warns:
      OffloadWarning: there is not enough host memory; it gives the line that helps.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.offload(optax.sgd(0.1, momentum=0.9), ".*trace.*")
      >>> state = tx.init({"w": jnp.ones((256, 128))})
      >>> print(oo.memory_report(state, ".*trace.*").check().totals)
      {'pinned_host': 131072}
    """
    leaves = trees.leaves_with_paths(tree)
    functions = [path for path, x in leaves if callable(x) and not hasattr(x, "dtype")]
    if functions:
        raise TypeError(
            f"the tree has functions at {trees.listed(functions)}. Give it arrays: of "
            "an optimizer its state, memory_report(tx.init(params), rules), and of an "
            "Equinox model equinox.filter(model, equinox.is_array)"
        )
    placements = _placements(leaves, rules, under)
    formats = encoded_parts(tree)
    named = _in_other_forms(tree, rules, under)
    rows = [
        row_of(path, x, placement, formats.get(path), named.get(path))
        for (path, x), placement in zip(leaves, placements, strict=True)
    ]
    host = _host_needs(rows, [x for _, x in leaves])
    for shortage in host.shortages:
        warnings.warn(shortage, OffloadWarning, stacklevel=2)
    return MemoryReport(tuple(rows), host, under)


def _placements(
    leaves: list[tuple[str, Any]], rules: Rules | None, under: str
) -> list[Placement]:
    """Returns the planned memory of each leaf; "" where no rule decides."""
    if rules is None:
        if under:
            raise ValueError(trees.under_no_rules_message(under))
        return [Placement("", "no rules given")] * len(leaves)
    sizes = [(path, memory.movable_nbytes(x)) for path, x in leaves]
    return decide(as_config(rules), sizes, under=under)


def _in_other_forms(tree: Any, rules: Rules | None, under: str) -> dict[str, str]:
    """Finds leaves, and parts of leaves, in another form than the rules name."""
    if rules is None:
        return {}
    config = as_config(rules).made_lenient()
    others = in_other_forms(tree, codecs_named(tree, config, under=under))
    said = {x.path: f"{x.form}, where the rules say {x.named}" for x in others}
    paths = [path for path, _ in trees.leaves_with_paths(tree)]
    wholes = {path: trees.encoded_leaf(path) or path for path in paths}
    return {p: said[q] for p, q in wholes.items() if q in said}


def _host_needs(rows: list[ReportRow], leaves: list[Any]) -> host_memory.HostMemory:
    needed: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    distinct: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for row, x in zip(rows, leaves, strict=True):
        kind = row.planned or row.actual
        if kind in HOST_KINDS:
            needed[kind] += row.nbytes_per_host
            distinct[kind] += row.nbytes_per_host // row.copies_per_host
            copies[kind] = max(copies[kind], row.copies_per_host)
            there = isinstance(x, jax.Array) and row.actual == kind
            missing[kind] += 0 if there else row.nbytes_per_host
    platforms = {platform for x in leaves for platform in _platforms_here(x)}
    limits = ()
    if needed and platforms:
        pinned = memory.pinned_bytes_of_this_process() if "gpu" in platforms else 0
        limits = tuple(host_memory.limits(gpu="gpu" in platforms, pinned_bytes=pinned))
    return host_memory.HostMemory(
        dict(needed), dict(missing), limits, dict(distinct), dict(copies)
    )


def _platforms_here(x: Any) -> set[str]:
    """The platforms of a leaf's devices; none of devices that are not attached."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return {jax.default_backend()}
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return set()
    return {device.platform for device in sharding.addressable_devices}
