"""Whole states between steps: off the device for a while, and back as they were."""

from __future__ import annotations

import os
import re
import warnings
from concurrent import futures
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

from optax_offload import _memory, _rules, _trees
from optax_offload._errors import OffloadWarning
from optax_offload._states import disk as _disk
from optax_offload._states import moves as _moves

T = TypeVar("T")

KINDS = ("pinned_host", "unpinned_host", "disk")


def offload_states(
    tree: T,
    include: _rules.Rules = ".*",
    *,
    memory_kind: str = "pinned_host",
    directory: str | os.PathLike[str] | None = None,
    donate: bool = True,
    block: bool = False,
) -> T:
    """Moves a state off the device between steps, for `reload_states` to bring back.

    For any pytree of arrays: a Flax ``TrainState``, an NNX state, parameters alone.
    Shardings are kept. A leaf that is there already is not touched: what `offload`
    keeps in host memory stays. Leaves that are no `jax.Array` (Python and NumPy values)
    are on no device and stay too.

    What came from where is remembered for the arrays returned, in this process, as long
    as they live. `jax.tree.map`, Flax's ``replace`` and NNX's ``split`` and ``merge``
    hand the same arrays on. What computes, copies, pickles or restores makes others,
    which are not known: use `set_memory_kind` for those.

    Args:
      tree: the state.
      include: which leaves: a regex that matches a leaf's whole path, and takes small
        leaves too, so that nothing is left; or a `Rule`, a sequence of them, or an
        `OffloadConfig`, whose ``min_bytes`` count, and whose rules of kind
        ``"device"`` leave their leaves as they are.
      memory_kind: ``"pinned_host"``, ``"unpinned_host"`` or ``"disk"``. On disk, small
        placeholders take the place of leaves; and what was in host memory goes too, to
        come back to there.
      directory: for ``"disk"``: where this state goes, and no other. What is there from
        before is replaced once all of the new is written and synced. With many hosts
        it has to be on a file system that they share. Needs ``optax-offload[disk]``.
      donate: whether to free each source as soon as its copy is there. The arrays of
        ``tree`` must then not be used any more.
      block: whether to wait. Without, this returns when all copies are started, and
        sources are freed as the copies end; one that fails raises in the next call that
        is given its leaf. With, at most 64 MiB, or one leaf, is in both places at once;
        of what goes to disk, 256 MiB.

    Returns:
      A tree of the same structure.

    Raises:
      OffloadError: a move failed half way. Its ``tree`` has every leaf, those that
        were moved and those that were not. A `KeyboardInterrupt` has it too.
      ValueError: a pattern matches no leaf; a leaf was donated or deleted before; the
        kind is unknown, or missing on a leaf's devices; the directory is in use.
      TypeError: called under jit, or a leaf is a struct without a value.
      OSError: the directory cannot be written to, or has too little space.
      ImportError: tensorstore is missing.

    Example:
      >>> import jax.numpy as jnp, optax_offload as oo
      >>> state = oo.offload_states({"w": jnp.ones((8, 8)), "step": jnp.array(3)})
      >>> oo.memory_report(state).totals
      {'pinned_host': 260}
      >>> oo.memory_report(oo.reload_states(state)).totals
      {'device': 260}
    """
    _check_destination(memory_kind, directory)
    leaves, chosen = _begin("offload_states", tree, include, block, memory_kind)
    _check_values(leaves, chosen, "offload_states moves values")
    if memory_kind == "disk":
        assert directory is not None
        _check_not_elsewhere(leaves, chosen, directory)
        return _to_disk(leaves, chosen, directory, donate=donate, block=block)
    moves = []
    for positions in _same(leaves, chosen):
        x = leaves.leaves[positions[0]]
        if _memory.memory_kind_of(x) in (None, memory_kind):
            continue
        path = leaves.paths[positions[0]]
        target = _memory.with_kind(path, x.sharding, memory_kind)
        origin = _moves.origin_of(x) or x.sharding
        moves.append(_moves.Move(positions, x, origin, _to_memory(x, target)))
    return _run("offload_states", leaves, moves, memory_kind, donate, block)


def reload_states(
    tree: T,
    include: _rules.Rules = ".*",
    *,
    directory: str | os.PathLike[str] | None = None,
    donate: bool = True,
    block: bool = False,
) -> T:
    """Brings back what `offload_states` moved, to where it was, sharded as it was.

    All other leaves stay where they are; so what `offload` keeps in host memory stays
    there, also where ``include`` matches it. Leaves come back committed to their
    devices: a step that was compiled for uncommitted ones is compiled once more.

    Args:
      tree: a tree with leaves that `offload_states` moved; or, with ``directory``, a
        template.
      include: which leaves, as for `offload_states`.
      directory: reads what another process left there. ``tree`` is then a template, as
        `eval_shape` makes it: each struct is replaced by the leaf of the same path, put
        where the struct's sharding says, which may be on another mesh.
      donate: whether to free each copy as soon as the leaf is back. The files of a
        directory are removed when all of its leaves are back; with ``donate=False``
        they stay, until the next state is complete there.
      block: whether to wait until all is back. What comes from disk is waited for.

    Returns:
      A tree of the same structure.

    Raises:
      OffloadError: as for `offload_states`; also if a file is missing or damaged.
      ValueError: all chosen leaves are in host memory and `offload_states` moved none
        of them; a pattern matches no leaf; a leaf was donated or deleted before; the
        directory's manifest is damaged, or does not fit the template.
      TypeError: called under jit, or a leaf is a struct and no directory is given.
      FileNotFoundError: the directory holds no complete state.
      ImportError: tensorstore is missing.

    Example:
      >>> import jax.numpy as jnp, optax_offload as oo
      >>> state = oo.offload_states({"w": jnp.ones((8, 8)), "step": jnp.array(3)})
      >>> state = oo.reload_states(state, "w")
      >>> oo.memory_report(state).totals
      {'pinned_host': 4, 'device': 256}
    """
    leaves, chosen = _begin("reload_states", tree, include, block, None)
    if directory is not None:
        _find_on_disk(leaves, chosen, directory)
    _check_values(leaves, chosen, "reload_states needs directory=... for a template")
    moves, staying = [], []
    for positions in _same(leaves, chosen):
        x = leaves.leaves[positions[0]]
        target = x.sharding if isinstance(x, _disk.OnDisk) else _moves.origin_of(x)
        if target is not None:
            moves.append(_moves.Move(positions, x, None, _to_memory(x, target)))
        elif _memory.memory_kind_of(x) is not None:
            staying.append(positions[0])
    on_host = [
        i for i in staying if _memory.memory_kind_of(leaves.leaves[i]) != "device"
    ]
    if on_host and on_host == staying and not moves:
        raise ValueError(
            "all leaves that include chooses are in host memory, and offload_states "
            f"moved none of them: {leaves.named(on_host)}. offload keeps them there, "
            "or they were copied, restored or computed since. To put them on the "
            'device in any case: optax_offload.set_memory_kind(tree, pattern, "device")'
        )
    if on_host:
        _moves.logger.debug("reload_states leaves %s in place", leaves.named(on_host))
    return _run("reload_states", leaves, moves, "where it was", donate, block)


def _check_destination(
    memory_kind: str, directory: str | os.PathLike[str] | None
) -> None:
    if memory_kind not in KINDS:
        raise ValueError(
            f"memory_kind is {memory_kind!r}; offload_states moves to "
            f"{', '.join(map(repr, KINDS))}, and reload_states back to the device"
        )
    if (memory_kind == "disk") != (directory is not None):
        raise ValueError(
            f"memory_kind is {memory_kind!r} and directory is {directory!r}: 'disk' "
            "needs a directory, and nothing else takes one"
        )


def _begin(
    name: str, tree: Any, include: _rules.Rules, block: bool, memory_kind: str | None
) -> tuple[_moves.Tree, list[int]]:
    """The leaves of a tree, and the positions of those that are chosen.

    Raises:
      OffloadError: an earlier move of one of the leaves failed in the background.
      TypeError, ValueError: as the calls say.
    """
    if _memory.is_traced(tree):
        raise TypeError(
            f"{name} is for between steps, and was called under jit: use "
            "optax_offload.set_memory_kind there"
        )
    leaves = _moves.Tree(tree)
    chosen = _choose(include, leaves, memory_kind)
    _raise_failed(leaves, block)
    deleted = [
        i
        for i in chosen
        if isinstance(leaves.leaves[i], jax.Array) and leaves.leaves[i].is_deleted()
    ]
    if deleted:
        raise ValueError(
            f"{leaves.named(deleted)}: deleted. The array was donated, to a jitted "
            "step or to a call like this one, and what that returned is the state now"
        )
    return leaves, chosen


def _choose(
    include: _rules.Rules, leaves: _moves.Tree, memory_kind: str | None
) -> list[int]:
    if isinstance(include, (str, re.Pattern)):
        include = _rules.Rule(include, min_bytes=0)
    config = _rules.as_config(include)
    for position, rule in enumerate(config.rules):
        if memory_kind and rule.memory_kind not in (
            "device",
            "pinned_host",
            memory_kind,
        ):
            raise ValueError(
                f"rule {position} ({rule.regex!r}) has memory_kind "
                f"{rule.memory_kind!r}, but memory_kind={memory_kind!r} was asked for. "
                "Here rules only choose leaves"
            )
    sizes = [
        _memory.nbytes(x) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else 0
        for x in leaves.leaves
    ]
    placements = _rules.place(config, list(zip(leaves.paths, sizes, strict=True)))
    return [
        i
        for i, (size, placement) in enumerate(zip(sizes, placements, strict=True))
        if (rule := placement.rule) is not None
        and rule.memory_kind != "device"
        and size >= rule.min_bytes
    ]


def _raise_failed(leaves: _moves.Tree, block: bool) -> None:
    """Raises what failed in the background, and gives the sources back."""
    rescued, errors = {}, []
    for i, leaf in enumerate(leaves.leaves):
        x = leaf
        while (record := _moves.record_of(x)) is not None:
            if record.ended and (block or isinstance(x, _disk.OnDisk)):
                futures.wait([record.ended])
            if record.error is None:
                break
            errors.append(record.error)
            x = rescued[i] = record.source
    if errors:
        raise _moves.OffloadError(
            "a move failed after the call that started it: "
            f"{_moves.one_line(errors[0])}. Not moved: {leaves.named(list(rescued))}. "
            "Nothing is lost: this error's .tree is the tree as it is now",
            leaves.with_leaves(rescued),
        ) from errors[0]


def _is_template(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and not isinstance(x, _disk.OnDisk)


def _check_values(leaves: _moves.Tree, chosen: list[int], why: str) -> None:
    structs = [i for i in chosen if _is_template(leaves.leaves[i])]
    if structs:
        raise TypeError(f"{leaves.named(structs)}: a struct has no value; {why}")


def _check_not_elsewhere(
    leaves: _moves.Tree, chosen: list[int], directory: str | os.PathLike[str]
) -> None:
    elsewhere = [
        i
        for i in chosen
        if isinstance(x := leaves.leaves[i], _disk.OnDisk)
        and x.directory != os.path.abspath(directory)
    ]
    if elsewhere:
        raise ValueError(
            f"{leaves.named(elsewhere)}: on disk already, but not in "
            f"{os.fspath(directory)!r}. Reload them first"
        )


def _find_on_disk(
    leaves: _moves.Tree, chosen: list[int], directory: str | os.PathLike[str]
) -> None:
    """Replaces the structs of a template by the places of what is on disk."""
    wanted = [i for i in chosen if _is_template(leaves.leaves[i])]
    places, others = _disk.find(
        directory, [(leaves.paths[i], leaves.leaves[i]) for i in wanted]
    )
    for i, place in zip(wanted, places, strict=True):
        leaves.leaves[i] = place
    unknown = [path for path in others if path not in leaves.paths]
    if unknown:
        warnings.warn(
            f"{os.fspath(directory)} also holds {_trees.listed(unknown)}, which the "
            "template has not: it stays there",
            OffloadWarning,
            stacklevel=3,
        )


def _same(leaves: _moves.Tree, chosen: list[int]) -> list[list[int]]:
    """The chosen positions, those that hold the same array together."""
    groups: dict[int, list[int]] = {}
    for i in chosen:
        groups.setdefault(id(leaves.leaves[i]), []).append(i)
    return list(groups.values())


def _to_memory(x: Any, target: Sharding) -> Any:
    return _moves.read(target) if isinstance(x, _disk.OnDisk) else _moves.copy(target)


def _run(
    name: str,
    leaves: _moves.Tree,
    moves: list[_moves.Move],
    where: str,
    donate: bool,
    block: bool,
) -> Any:
    from_disk = [m.source for m in moves if isinstance(m.source, _disk.OnDisk)]
    states = sorted({place.state for place in from_disk}, key=lambda s: s.path)
    for state in states:
        state.open(place for place in from_disk if place.state is state)

    def tidy(complete: bool) -> None:
        for state in states:
            state.tidy(complete)

    run = _moves.Moves(
        name,
        leaves,
        moves,
        where=where,
        donate=donate,
        window_bytes=(_moves.DISK_WINDOW_BYTES if states else _moves.COPY_WINDOW_BYTES),
        commit=tidy,
    )
    # An array cannot be returned before there is something to read it from.
    return run.in_turn() if block or states else run.started()


def _to_disk(
    leaves: _moves.Tree,
    chosen: list[int],
    directory: str | os.PathLike[str],
    *,
    donate: bool,
    block: bool,
) -> Any:
    groups = [
        positions
        for positions in _same(leaves, chosen)
        if isinstance(leaves.leaves[positions[0]], jax.Array)
    ]
    if not groups:
        return leaves.with_leaves({})
    arrays = [leaves.leaves[positions[0]] for positions in groups]
    names = [leaves.paths[positions[0]] for positions in groups]
    origins = [_moves.origin_of(x) or x.sharding for x in arrays]
    # What is still written to this directory may be of a tree that is gone.
    _moves.settle()
    places = _disk.begin(directory, list(zip(names, arrays, origins, strict=True)))
    moves = [
        _moves.Move(positions, x, place.sharding, _moves.write(place), result=place)
        for positions, x, place in zip(groups, arrays, places, strict=True)
    ]
    run = _moves.Moves(
        "offload_states",
        leaves,
        moves,
        where=f"disk, in {os.fspath(directory)}",
        donate=donate,
        window_bytes=_moves.DISK_WINDOW_BYTES,
        commit=lambda complete: places[0].state.commit(places, complete),
        # A leaf is on disk when all processes have written their part of it.
        all_or_none=jax.process_count() > 1,
    )
    # What runs beside the caller must not meet other processes at a barrier.
    if block or jax.process_count() > 1:
        return run.in_turn()
    return run.started_in_background()
