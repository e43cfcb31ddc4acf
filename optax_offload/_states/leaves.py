"""A tree as its leaves, and which of them a call is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax

from optax_offload._ground import trees
from optax_offload._ground.errors import OffloadError
from optax_offload._places import memory
from optax_offload._places.rules import Rule, Rules, as_config, decide
from optax_offload._states import records
from optax_offload._states.placeholder import OnDisk


class Leaves:
    """A tree as its leaves and their paths.

    Args:
      tree: Any pytree.

    Attributes:
      paths: The path of each leaf, as rules see it.
      leaves: The leaves, in the order of the paths.
    """

    def __init__(self, tree: Any):
        """Flattens the tree."""
        flat, self._structure = trees.flatten_with_path(tree)
        self._keys = [keys for keys, _ in flat]
        self.paths = [trees.path_string(keys) for keys in self._keys]
        self.leaves = [leaf for _, leaf in flat]

    def name(self, position: int) -> tuple[str, str]:
        """A leaf's path as rules see it, and in JAX's notation."""
        return self.paths[position], jax.tree_util.keystr(self._keys[position])

    def with_leaves(self, others: dict[int, Any]) -> Any:
        """The tree, some leaves replaced, given by their positions."""
        leaves = [others.get(i, x) for i, x in enumerate(self.leaves)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def named(self, positions: Sequence[int]) -> str:
        """The paths of leaves, for a message."""
        return trees.listed([self.paths[i] for i in positions])

    def what_is_lost(self, others: dict[int, Any], unread: Sequence[int] = ()) -> str:
        """A sentence for an error with `with_leaves(others)`: the leaves that are lost.

        Args:
          others: The leaves that are replaced, by their positions.
          unread: The positions of leaves that are on disk and could not be read.
        """
        gone = [
            i
            for i, x in enumerate(self.leaves)
            if isinstance(now := others.get(i, x), jax.Array) and now.is_deleted()
        ]
        lost: list[str] = []
        if gone:
            lost.append(
                f"{self.named(gone)}: deleted meanwhile, by a step or a call that it "
                "was donated to"
            )
        if unread:
            its, it, them = (
                ("its", "it is", "it")
                if len(unread) == 1
                else ("their", "they are", "them")
            )
            lost.append(
                f"{self.named(unread)}: on disk, and cannot be read. If {its} files "
                f"are missing or damaged {it} lost: take {them} from a checkpoint"
            )
        if not lost:
            return "Nothing is lost"
        if len({*gone, *unread}) < len(self.leaves):
            lost.append("All other leaves are there")
        return ". ".join(lost)


def begin(
    name: str, tree: Any, include: Rules, *, block: bool, memory_kind: str | None
) -> tuple[Leaves, list[int]]:
    """The leaves of a tree, and the positions of those that are chosen.

    Args:
      name: The name of the call, for messages.
      tree: The tree that the call was given.
      include: The leaves that are chosen.
      block: Whether to wait for transfers that are still under way.
      memory_kind: The memory kind that the leaves move to; None for each its own.

    Raises:
      OffloadError: An earlier transfer of one of the leaves failed in the background.
      TypeError: The call is under jit.
      ValueError: A pattern matches no leaf, or a leaf is deleted.
    """
    if memory.is_traced(tree):
        raise TypeError(
            f"{name} is for between steps, and was called under jit: use "
            "optax_offload.set_memory_kind there"
        )
    leaves = Leaves(tree)
    chosen = _choose(include, leaves, memory_kind)
    gone = [i for i in chosen if records.is_gone(leaves.leaves[i])]
    if not gone:
        records.settle_freeing()
    _raise_failed(leaves, block)
    on_disk = [i for i in gone if isinstance(leaves.leaves[i], OnDisk)]
    if on_disk:
        raise ValueError(
            f"{leaves.named(on_disk)}: brought back from disk already, and the files "
            "are removed. What that call returned is the state now"
        )
    if gone:
        raise ValueError(
            f"{leaves.named(gone)}: deleted. The array was donated, to a jitted "
            "step or to a call like this one, and what that returned is the state now"
        )
    return leaves, chosen


def _choose(include: Rules, leaves: Leaves, memory_kind: str | None) -> list[int]:
    if isinstance(include, (str, re.Pattern)):
        include = Rule(include, min_bytes=0)
    config = as_config(include)
    for position, rule in enumerate(config.rules):
        if memory_kind and rule.memory_kind not in (
            "device",
            "pinned_host",
            memory_kind,
        ):
            raise ValueError(
                f"rule {position} ({trees.literal(rule.regex)}) has memory_kind "
                f"{rule.memory_kind!r}, but memory_kind={memory_kind!r} was asked for. "
                "Here rules only choose leaves"
            )
    sizes = [
        memory.nbytes(x) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else 0
        for x in leaves.leaves
    ]
    placements = decide(config, list(zip(leaves.paths, sizes, strict=True)))
    return [
        i
        for i, (size, placement) in enumerate(zip(sizes, placements, strict=True))
        if (rule := placement.rule) is not None
        and rule.memory_kind != "device"
        and (placement.memory_kind != "device" or not size)
        and size >= rule.min_bytes
    ]


def _raise_failed(leaves: Leaves, block: bool) -> None:
    """Raises what failed in the background, and gives the sources back."""
    rescued: dict[int, Any] = {}
    errors: list[BaseException] = []
    for i, leaf in enumerate(leaves.leaves):
        x = leaf
        while (record := records.record_of(x)) is not None:
            if record.ended and (block or isinstance(x, OnDisk)):
                futures.wait([record.ended])
            if record.error is None:
                break
            errors.append(record.error)
            x = rescued[i] = record.source
    if errors:
        raise OffloadError(
            "a move failed after the call that started it: "
            f"{one_line(errors[0])}. Not moved: {leaves.named(list(rescued))}. "
            f"{leaves.what_is_lost(rescued)}: this error's .tree is the tree as it is "
            "now",
            leaves.with_leaves(rescued),
        ) from errors[0]


def is_template(x: Any) -> bool:
    """Returns whether a leaf is a struct that stands for no value."""
    return isinstance(x, jax.ShapeDtypeStruct) and not isinstance(x, OnDisk)


def check_values(leaves: Leaves, chosen: list[int], why: str) -> None:
    """Raises a TypeError if a chosen leaf is a struct without a value."""
    structs = [i for i in chosen if is_template(leaves.leaves[i])]
    if structs:
        raise TypeError(f"{leaves.named(structs)}: a struct has no value; {why}")


def grouped_by_array(leaves: Leaves, chosen: list[int]) -> list[list[int]]:
    """The chosen positions, those that hold the same array together."""
    groups: dict[int, list[int]] = {}
    for i in chosen:
        groups.setdefault(id(leaves.leaves[i]), []).append(i)
    return list(groups.values())


def one_line(error: BaseException) -> str:
    """An error as the first line of its message, for a message of ours."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
