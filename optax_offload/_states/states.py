"""The two calls: a whole state off the device between steps, and back as it was."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import jax
from jax.sharding import Sharding

from optax_offload._ground import file_system, trees
from optax_offload._ground.errors import OffloadWarning
from optax_offload._ground.progress import logger
from optax_offload._places import memory
from optax_offload._places.rules import Rules
from optax_offload._states import disk, records, transfers
from optax_offload._states import leaves as _leaves
from optax_offload._states.leaves import Leaves
from optax_offload._states.placeholder import OnDisk

T = TypeVar("T")

Kind = Literal["pinned_host", "unpinned_host", "disk"]
KINDS: tuple[str, ...] = get_args(Kind)

# The copies that are waited for when the next one starts: enough to hide the latency
# of a transfer, and little beside a state.
COPY_WINDOW_BYTES = 64 * 2**20
# The same for files, which take longer.
DISK_WINDOW_BYTES = 256 * 2**20


def offload_states(  # noqa: PLR0913 - the public contract
    tree: T,
    include: Rules = ".*",
    *,
    memory_kind: Kind = "pinned_host",
    directory: str | os.PathLike[str] | None = None,
    donate: bool = True,
    block: bool = False,
) -> T:
    """Moves a state off the device between steps, for `reload_states` to bring back.

    It takes any pytree of arrays: a Flax ``TrainState``, an NNX state, parameters
    alone. Shardings are kept. Leaves that are in that memory already stay as they are,
    such as state that `offload` keeps in host memory. Python and NumPy values stay too.

    This process remembers where each returned array came from, as long as the array
    lives. `jax.tree.map`, Flax's ``replace`` and NNX's ``split`` and ``merge`` hand the
    same arrays on. Code that computes, copies, pickles or restores makes new arrays,
    which are unknown: use `set_memory_kind` for those.

    Args:
      tree: The state.
      include: The leaves: a regex that matches a leaf's whole path, and takes small
        leaves too, so that nothing is left; or a `Rule`, a sequence of them, or an
        `OffloadConfig`, whose ``min_bytes`` count, and whose rules of kind
        ``"device"`` leave their leaves as they are.
      memory_kind: ``"pinned_host"``, ``"unpinned_host"`` or ``"disk"``. With disk,
        small placeholders replace the leaves, and leaves in host memory move too, and
        return there.
      directory: For ``"disk"``: the directory of this state, and of no other. A
        previous state is replaced once all of the new one is written and synced. A
        warning says so if it is memory, as ``/dev/shm`` and often ``/tmp`` are.
        Several hosts need a file system that they share. Needs ``optax-offload[disk]``.
      donate: Whether to free each source as soon as its copy is there. The arrays of
        ``tree`` must then not be used any more.
      block: Whether to wait. If not, this returns when the last copies have started,
        and their sources are freed as they end; a copy that fails then raises in the
        next call that is given its leaf. In either case at most 64 MiB, or one leaf,
        is in both places at once. To disk all is written after the call, if it does
        not wait; at most 256 MiB are under way at once. A call waits for what an
        earlier one still frees, so that none runs ahead.

    Returns:
      A tree of the same structure.

    Raises:
      OffloadError: A transfer failed half way. Its ``tree`` has every leaf, those that
        were moved and those that were not. A `KeyboardInterrupt` has it too.
      ValueError: A pattern matches no leaf; a leaf was donated or deleted before; the
        kind is unknown, or missing on a leaf's devices; the directory is in use, or
        named by an empty string.
      TypeError: It is called under jit, or a leaf is a struct without a value.
      OSError: The directory cannot be written to, or has too little space.
      ImportError: The extra ``disk`` is not installed.

    Example:
      >>> import jax.numpy as jnp, optax_offload as oo
      >>> state = oo.offload_states({"w": jnp.ones((8, 8)), "step": jnp.array(3)})
      >>> oo.memory_report(state).totals
      {'pinned_host': 260}
      >>> oo.memory_report(oo.reload_states(state)).totals
      {'device': 260}
    """
    root = _check_destination(memory_kind, directory)
    leaves, chosen = _leaves.begin(
        "offload_states", tree, include, block=block, memory_kind=memory_kind
    )
    _leaves.check_values(leaves, chosen, "offload_states moves values")
    if root is not None:
        return _to_disk(leaves, chosen, root, donate=donate, block=block)
    found = []
    for positions in _leaves.grouped_by_array(leaves, chosen):
        x = leaves.leaves[positions[0]]
        if memory.memory_kind_of(x) in (None, memory_kind):
            continue
        path = leaves.paths[positions[0]]
        target = memory.with_kind(path, x.sharding, memory_kind)
        origin = records.origin_of(x) or x.sharding
        start = _to_memory(x, target)
        found.append(transfers.ArrayTransfer(positions, x, origin, start))
    call = _call("offload_states", memory_kind, donate, found)
    return _run(call, leaves, found, block)


def reload_states(
    tree: T,
    include: Rules = ".*",
    *,
    directory: str | os.PathLike[str] | None = None,
    donate: bool = True,
    block: bool = False,
) -> T:
    """Brings back what `offload_states` moved, to where it was, sharded as it was.

    All other leaves stay where they are, such as state that `offload` keeps in host
    memory, even if ``include`` matches it. Leaves come back committed to their devices:
    a step that was compiled for uncommitted ones is compiled once more.

    Args:
      tree: A tree with leaves that `offload_states` moved; or, with ``directory``, a
        template.
      include: Which leaves, as for `offload_states`.
      directory: A directory to read what another process left there. ``tree`` is then
        a template, as `eval_shape` makes it: each struct is replaced by the leaf of
        the same path, put where the struct's sharding says, which may be on another
        mesh.
      donate: Whether to free each copy as soon as the leaf is back. The files of a
        directory are removed when all of its leaves are back, unless another tree or
        process refers to them or reads them: then what this returns is a copy, and a
        warning says so. With ``donate=False`` they stay, until the next state is
        complete there.
      block: Whether to wait until all is back, as for `offload_states`. Reading from
        disk always waits.

    Returns:
      A tree of the same structure.

    Raises:
      OffloadError: As for `offload_states`; also if a file is missing or damaged.
      ValueError: `offload_states` never moved any of the chosen leaves, and some of
        them are in host memory; a pattern matches no leaf; a leaf was donated or
        deleted before, or all of its state is back from disk; the directory's manifest
        is damaged, or does not fit the template.
      TypeError: It is called under jit, or a leaf is a struct and no directory is
        given.
      FileNotFoundError: The directory holds no complete state.
      ImportError: The extra ``disk`` is not installed.

    Example:
      >>> import jax.numpy as jnp, optax_offload as oo
      >>> state = oo.offload_states({"w": jnp.ones((8, 8)), "step": jnp.array(3)})
      >>> state = oo.reload_states(state, "w")
      >>> oo.memory_report(state).totals
      {'pinned_host': 4, 'device': 256}
    """
    root = None if directory is None else disk.checked_directory(directory)
    leaves, chosen = _leaves.begin(
        "reload_states", tree, include, block=block, memory_kind=None
    )
    if root is not None:
        _find_on_disk(leaves, chosen, root)
    needed = "reload_states needs directory=... for a template"
    _leaves.check_values(leaves, chosen, needed)
    found, staying = [], []
    for positions in _leaves.grouped_by_array(leaves, chosen):
        x = leaves.leaves[positions[0]]
        target = x.sharding if isinstance(x, OnDisk) else records.origin_of(x)
        if target is not None:
            start = _to_memory(x, target)
            found.append(transfers.ArrayTransfer(positions, x, None, start))
        elif memory.memory_kind_of(x) is not None:
            staying.append(positions[0])
    on_host = [
        i for i in staying if memory.memory_kind_of(leaves.leaves[i]) != "device"
    ]
    # Leaves that came back before are known: then there is nothing left to do.
    known = found or any(records.record_of(leaves.leaves[i]) for i in chosen)
    if on_host and not known:
        raise ValueError(
            "nothing to bring back: offload_states moved none of these leaves, which "
            f"are in host memory: {leaves.named(on_host)}. offload keeps them there, "
            "or they were copied, restored or computed since. To put them on the "
            'device in any case: optax_offload.set_memory_kind(tree, pattern, "device")'
        )
    if on_host:
        logger.debug("reload_states leaves %s in place", leaves.named(on_host))
    call = _call("reload_states", "where it was", donate, found)
    return _run(call, leaves, found, block)


def _check_destination(
    memory_kind: str, directory: str | os.PathLike[str] | None
) -> Path | None:
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
    return None if directory is None else disk.checked_directory(directory)


def _find_on_disk(leaves: Leaves, chosen: list[int], root: Path) -> None:
    """Replaces the structs of a template by the places of what is on disk."""
    wanted = [i for i in chosen if _leaves.is_template(leaves.leaves[i])]
    places, others = disk.find(
        root, [(leaves.name(i), leaves.leaves[i]) for i in wanted]
    )
    for i, place in zip(wanted, places, strict=True):
        leaves.leaves[i] = place
    unknown = [path for path in others if path not in leaves.paths]
    if unknown:
        warnings.warn(
            f"{root} also holds {trees.listed(unknown)}, which the template has not: "
            "it stays there",
            OffloadWarning,
            stacklevel=3,
        )


def _to_memory(x: Any, target: Sharding) -> Any:
    if isinstance(x, OnDisk):
        return transfers.read(target)
    return transfers.copy(target)


def _call(
    name: str, where: str, donate: bool, found: list[transfers.ArrayTransfer]
) -> transfers.StatesCall:
    from_disk = any(isinstance(t.source, OnDisk) for t in found)
    window = DISK_WINDOW_BYTES if from_disk else COPY_WINDOW_BYTES
    return transfers.StatesCall(name, where, donate, window)


def _run(
    call: transfers.StatesCall,
    leaves: Leaves,
    found: list[transfers.ArrayTransfer],
    block: bool,
) -> Any:
    """Makes transfers to memory, from memory or from disk."""
    placeholders = [t.source for t in found if isinstance(t.source, OnDisk)]
    # In the same order in all processes, which wait for each other in each.
    states = sorted({p.files for p in placeholders}, key=lambda files: files.path)
    for files in states:
        files.open(p.entry for p in placeholders if p.files is files)

    staying: list[str] = []

    def end_reading(complete: bool) -> None:
        for files in states:
            if why := files.end_reading(complete):
                staying.append(f"{files.path} ({why})")

    run = transfers.Transfers(call, leaves, found, end_reading)
    # An array cannot be returned before there is something to read it from.
    moved = run.run() if block or states else run.start()
    if staying:
        warnings.warn(
            f"the files stay in {', '.join(staying)}: what this returns is a copy",
            OffloadWarning,
            stacklevel=3,
        )
    return moved


def _to_disk(
    leaves: Leaves, chosen: list[int], root: Path, *, donate: bool, block: bool
) -> Any:
    _check_not_elsewhere(leaves, chosen, root)
    groups = [
        positions
        for positions in _leaves.grouped_by_array(leaves, chosen)
        if isinstance(leaves.leaves[positions[0]], jax.Array)
    ]
    if not groups:
        return leaves.with_leaves({})
    mount = file_system.mount_here(root)
    if mount is not None and mount.kind == "memory":
        warnings.warn(
            f"{root} is memory ({mount.type} at {mount.point}): a state that is parked "
            'there stays in host memory, as with memory_kind="pinned_host". Use a '
            "directory on a drive; `optax-offload doctor --directory DIR` says what "
            "a directory is on, and how fast it is",
            OffloadWarning,
            stacklevel=3,
        )
    # What is still written to this directory may be of a tree that is gone.
    records.settle()
    arrays = [leaves.leaves[positions[0]] for positions in groups]
    origins = [records.origin_of(x) or x.sharding for x in arrays]
    names = [[leaves.name(i) for i in positions] for positions in groups]
    places, entries = disk.begin(root, list(zip(names, arrays, origins, strict=True)))
    found = [
        transfers.ArrayTransfer(
            positions, x, place.sharding, transfers.write(place), result=place
        )
        for positions, x, place in zip(groups, arrays, places, strict=True)
    ]
    call = transfers.StatesCall(
        "offload_states",
        f"disk, in {root}",
        donate,
        DISK_WINDOW_BYTES,
        # A leaf is on disk when all processes have written their part of it.
        all_or_none=jax.process_count() > 1,
    )
    files = places[0].files
    run = transfers.Transfers(
        call, leaves, found, lambda complete: files.commit(entries, complete)
    )
    # What runs beside the caller must not meet other processes at a barrier.
    if block or jax.process_count() > 1:
        return run.run()
    return run.start_in_background()


def _check_not_elsewhere(leaves: Leaves, chosen: list[int], root: Path) -> None:
    elsewhere = [
        i
        for i in chosen
        if isinstance(x := leaves.leaves[i], OnDisk) and x.directory != str(root)
    ]
    if elsewhere:
        raise ValueError(
            f"{leaves.named(elsewhere)}: on disk already, but not in {str(root)!r}. "
            "Reload them first"
        )
