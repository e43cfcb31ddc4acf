"""States on disk: what is checked before a directory is written to or read from."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from optax_offload._places import memory
from optax_offload._states import locks, manifest, processes, zarr
from optax_offload._states.files import StateFiles
from optax_offload._states.manifest import Entry
from optax_offload._states.placeholder import OnDisk

# A leaf's path as rules see it, and the same in JAX's notation (`Entry`).
Name = tuple[str, str]

# Of the parts of a path.
_UNSUITABLE = re.compile(r"\\|\.__lock$|[\udc80-\udcff]")


def checked_directory(directory: str | os.PathLike[str]) -> Path:
    """A directory that the user names, absolute.

    Raises:
      TypeError: It is no path.
      ValueError: It names nothing.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"directory is {directory!r}; it must be a path: a string or a pathlib.Path"
        )
    name = os.fspath(directory)
    if not name or "\0" in name:
        raise ValueError(
            f"directory is {name!r}, which names no directory. Give one that holds "
            'this state and nothing else, as in directory="states/model"'
        )
    # Not `os.path.abspath`, which keeps two slashes at the beginning. A link that leads
    # elsewhere later does not matter any more.
    path = Path(os.path.realpath(name))
    unsuitable = [part for part in path.parts if _UNSUITABLE.search(part)]
    if unsuitable:
        raise ValueError(
            f"directory is {name!r}, and tensorstore writes to no directory with "
            f"{', '.join(map(repr, unsuitable))} in its path: it takes backslashes for "
            "slashes, *.__lock for its own files, and names have to be UTF-8. Use "
            "another directory"
        )
    return path


def begin(
    root: Path,
    arrays: Sequence[tuple[list[Name], jax.Array, Sharding]],
) -> tuple[list[OnDisk], list[Entry]]:
    """Prepares a directory for arrays.

    Each array comes with its names, several where it is at several places of a tree,
    and with the sharding that it is to return to.

    Returns:
      For each array its placeholder, whose value is still to be written; and the
      entries for the manifest, one for each name.

    Raises:
      ImportError: tensorstore is missing.
      ValueError: The directory holds leaves of a tree that is still in use, or two
        leaves cannot be told apart.
      OSError: The directory cannot be written to, or has too little space.
    """
    zarr.tensorstore()
    _check_names([name for names, _, _ in arrays for name in names])
    state = manifest.state_name(processes.agreed_token())
    files = StateFiles(root, state, range(len(arrays)))
    entries = [
        [_entry(number, name, x) for name in names]
        for number, (names, x, _) in enumerate(arrays)
    ]
    with contextlib.ExitStack() as until_created:

        def prepare() -> None:
            root.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                # Or another program does not see this state, and removes it.
                until_created.enter_context(locks.directory(root))
            _prepare(root, sum(x.nbytes for _, x, _ in arrays))

        elsewhere = f"another process cannot write to {root}; it says why"
        processes.in_all(prepare, OSError(elsewhere))
        try:
            same_entries = [same[0] for same in entries]
            processes.in_all(lambda: files.create(same_entries), OSError(elsewhere))
        except BaseException:
            files.discard()
            raise
    placeholders = [
        OnDisk(x, sharding, files, same[0])
        for (_, x, sharding), same in zip(arrays, entries, strict=True)
    ]
    return placeholders, [entry for same in entries for entry in same]


def _check_names(names: Sequence[Name]) -> None:
    """Each leaf must be known by its name, to be found again by another process."""
    again = [path for (path, _), n in collections.Counter(names).items() if n > 1]
    if again:
        raise ValueError(
            f"{', '.join(map(repr, again))}: several leaves have this path, and JAX "
            "gives their keys the same text. Nothing was moved. Rename one of the keys"
        )


def _prepare(root: Path, needed: int) -> None:
    """Checks that a directory can be written to, and removes what was left half way."""
    manifest.check_file(root / manifest.FILE_NAME)
    committed, damaged = None, False
    try:
        committed = manifest.read(root).state
    except FileNotFoundError:
        pass
    except ValueError:
        # Which state was complete is not known: all stay until the new one is.
        damaged = True
    # One process looks: to look is to lock.
    for other in manifest.states_in(root) if jax.process_index() == 0 else ():
        if locks.is_parked(other):
            raise ValueError(
                f"{root} holds leaves that offload_states put there and that a tree "
                "still refers to. Reload them first, drop that tree, or give each "
                "state a directory of its own"
            )
        if other.name != committed and not damaged:
            with locks.alone(other) as nobody:
                if nobody:
                    shutil.rmtree(other)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise OSError(
            f"{root} has {free} bytes free; {needed} are needed. Nothing was moved. "
            "Make room, choose fewer leaves with include, or another directory"
        )


def _entry(number: int, name: Name, x: jax.Array) -> Entry:
    """Returns the manifest's entry of an array."""
    is_key = memory.is_key(x)
    data = jax.random.key_data(x) if is_key else x
    itemsize = np.dtype(data.dtype).itemsize
    path, key_path = name
    return Entry(
        path=path,
        key_path=key_path,
        number=number,
        dtype=str(x.dtype),
        global_shape=x.shape,
        weak_type=bool(jax.typeof(x).weak_type) if not is_key else False,
        key=str(jax.random.key_impl(x)) if is_key else None,
        shape=data.shape,
        itemsize=itemsize,
        chunk=zarr.chunk_shape(data.sharding.shard_shape(data.shape), itemsize),
    )


def find(
    root: Path, template: Sequence[tuple[Name, Any]]
) -> tuple[list[OnDisk], list[str]]:
    """The places of leaves that another process wrote, for structs with shardings.

    A leaf is found by its path; where several have the same path, by its keys in JAX's
    notation too.

    Returns:
      A placeholder for each struct, and the paths on disk that none asks for.

    Raises:
      FileNotFoundError: The directory holds no complete state.
      ValueError: The manifest is damaged, or a struct is not as the leaf on disk.
    """
    table, files = _shared(root)
    by_path: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in table.entries:
        by_path[entry.path].append(entry)
    asked = collections.Counter(path for (path, _), _ in template)
    found: dict[tuple[int, Sharding], OnDisk] = {}
    places, used, wrong = [], set(), []
    for (path, key_path), struct in template:
        entries = by_path.get(path, [])
        if len(entries) > 1 or asked[path] > 1:
            entries = [entry for entry in entries if entry.key_path == key_path]
        why = _why_not(entries, struct, root)
        if why:
            wrong.append(f"{path!r} {why}")
            continue
        (entry,) = entries
        used.add((path, entry.key_path))
        # Leaves that were the same array are one again, where they go to one place.
        place = OnDisk(struct, struct.sharding, files, entry)
        places.append(found.setdefault((entry.number, struct.sharding), place))
    if wrong:
        raise ValueError(
            f"the state in {root} does not fit the tree: {'; '.join(wrong)}. Make the "
            "template as the state was made, with optax_offload.eval_shape(...); give "
            "values for what was no jax.Array"
        )
    others = [e.path for e in table.entries if (e.path, e.key_path) not in used]
    return places, others


def _shared(root: Path) -> tuple[manifest.Manifest, StateFiles]:
    """The state that a directory holds, which nobody removes as long as it is read."""
    table = manifest.read(root)
    while True:
        files = StateFiles(root, table.state, [e.number for e in table.entries])
        files.share()
        now = manifest.read(root)
        if now.state == table.state:
            return table, files
        table = now  # Another state has replaced it meanwhile.


def _why_not(entries: Sequence[Entry], struct: Any, root: Path) -> str | None:
    """Returns why a struct does not fit its entry; None if it does.

    Raises:
      ValueError: The manifest contradicts itself.
    """
    if not entries:
        return "is not there"
    (entry,) = entries
    if (entry.dtype, entry.global_shape) != (str(struct.dtype), struct.shape):
        return f"is {entry.dtype}{list(entry.global_shape)} there, not {struct}"
    if struct.sharding is None:
        return "has no sharding in the template"
    if not _is_stored_as(entry, struct):
        raise ValueError(
            f"{root / manifest.FILE_NAME} is damaged: what it says of {entry.path!r} "
            f"is not how {entry.dtype}{list(entry.global_shape)} is stored. Nothing "
            "was read and nothing removed. Use another directory or remove this one"
        )
    return None


def _is_stored_as(entry: Entry, struct: Any) -> bool:
    """Returns whether an entry's numbers fit a struct's dtype and shape."""
    is_key = memory.is_key(struct)
    if not is_key or entry.key is None:
        return (
            not is_key
            and entry.key is None
            and entry.itemsize == np.dtype(struct.dtype).itemsize
        )
    data = jax.ShapeDtypeStruct(entry.shape, np.uint32)
    try:
        made = jax.eval_shape(
            lambda x: jax.random.wrap_key_data(x, impl=entry.key), data
        )
    except (TypeError, ValueError):
        return False
    same = (made.dtype, made.shape) == (struct.dtype, struct.shape)
    return same and entry.itemsize == np.dtype(np.uint32).itemsize
