"""The manifest of a state on disk: JSON with a hash, checked before it is believed.

The hash tells damage, not intent: whoever can write the file can hash it too. So each
field is checked, and a name that is read never leads out of the directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE_NAME = "manifest.json"
# Of what a manifest says and of how a leaf is stored. Version 1 has no checksums.
VERSION = 2
READABLE = (1, 2)
# Of the CRC-32C of a chunk.
CHECKSUM_BYTES = 4
_STATE_NAME = re.compile(r"state-[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The manifest's entry of one leaf.

    Attributes:
      path: The leaf's path in the tree, as rules see it.
      key_path: The same path in JAX's own notation, as in ``['a']['b']``, which tells
        apart two leaves whose paths are the same text. Empty if it is not known.
      number: The name of the leaf's directory. Leaves of the same array share one.
      dtype: The name of the leaf's dtype.
      global_shape: The leaf's shape, over all devices.
      weak_type: Whether the leaf's dtype gives way to others, as a Python number's.
      key: The implementation of a random key; None for other leaves.
      shape: The shape of what is stored, which for a random key are its numbers.
      itemsize: The bytes of one stored number.
      chunk: The shape of the part that one file holds.
      checksums: The last four bytes of each file, its CRC-32C, in row-major order and
        in hexadecimal digits. None if they are not known.
    """

    path: str
    key_path: str
    number: int
    dtype: str
    global_shape: tuple[int, ...]
    weak_type: bool
    key: str | None
    shape: tuple[int, ...]
    itemsize: int
    chunk: tuple[int, ...]
    checksums: str | None = None

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """The number of files along each axis."""
        return tuple(
            -(-length // part)
            for length, part in zip(self.shape, self.chunk, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of the state that a directory holds.

    Attributes:
      state: The name of the state's directory, in that of the manifest.
      entries: The leaves of the state.
    """

    state: str
    entries: tuple[Entry, ...]


def state_name(token: str) -> str:
    """The name of the directory of a state."""
    return f"state-{token}"


def states_in(directory: Path) -> list[Path]:
    """The directories of states, complete or not, that a directory holds."""
    return [
        p
        for p in directory.iterdir()
        if _STATE_NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
    ]


def write(manifest: Manifest, temporary: Path, directory: Path) -> None:
    """Replaces the manifest of a directory, in one rename, and waits for the drive."""
    table = {
        "version": VERSION,
        "state": manifest.state,
        "leaves": [dataclasses.asdict(entry) for entry in manifest.entries],
    }
    with open(temporary, "w") as f:
        json.dump(table | {"sha256": _hash(table)}, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    for folder in (temporary.parent, directory):
        _sync(folder)
    os.replace(temporary, directory / FILE_NAME)
    _sync(directory)


def read(directory: Path) -> Manifest:
    """The manifest of a directory.

    Raises:
      FileNotFoundError: There is none, so the directory holds no complete state.
      ValueError: The manifest is damaged, or says what no manifest of ours says.
    """
    file = directory / FILE_NAME
    check_file(file)
    try:
        text = file.read_bytes()
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"{directory} holds no complete state: there is no {file}"
        ) from e
    try:
        manifest = _checked(text)
    except _OtherVersionError as e:
        raise ValueError(
            f"{file} {e}. Nothing was read and nothing removed. Read it with the "
            "release that wrote it, or use another directory"
        ) from e
    except (_WrongError, RecursionError) as e:
        why = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ValueError(
            f"{file} is damaged: {why}. Nothing was read and nothing removed. Bring "
            "the state back from a checkpoint, and use another directory or remove "
            "this one"
        ) from e
    state = directory / manifest.state
    if (mode := _mode(state, follow_links=False)) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{file} is damaged: {state} is not a directory. Nothing was read and "
            "nothing removed. Use another directory or remove this one"
        )
    return manifest


def check_file(file: Path) -> None:
    """Raises a ValueError if the manifest's name is taken by what is no file."""
    if (mode := _mode(file)) and not stat.S_ISREG(mode):
        raise ValueError(
            f"{file} is not a regular file, so it cannot be a manifest. Use another "
            "directory, or remove it"
        )


def _mode(path: Path, *, follow_links: bool = True) -> int:
    """The mode of what has a name, asked once: it may go at any time. Else 0."""
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except FileNotFoundError:
        return 0


class _WrongError(Exception):
    """A fault of a manifest."""


class _OtherVersionError(Exception):
    """A manifest is of another version, which the message names."""


def _checked(text: bytes) -> Manifest:
    try:
        table = json.loads(text)
    except ValueError as e:
        raise _WrongError(f"it is not JSON ({e})") from e
    if not isinstance(table, dict):
        raise _WrongError(f"it is {_shown(table)}, not an object")
    if table.pop("sha256", None) != _hash(table):
        raise _WrongError("its hash is not that of what it says")
    if (version := table.get("version")) not in READABLE:
        raise _OtherVersionError(
            f"is of version {_shown(version)}, and this optax_offload reads versions "
            f"{' and '.join(map(str, READABLE))}"
        )
    state, leaves = table.get("state"), table.get("leaves")
    if not isinstance(state, str) or not _STATE_NAME.fullmatch(state):
        raise _WrongError(
            f"state is {_shown(state)}; it must be 'state-' and 16 hexadecimal digits"
        )
    if not isinstance(leaves, list):
        raise _WrongError(f"leaves is {_shown(leaves)}; it must be a list")
    older = {"checksums": None} if version == 1 else {}
    entries = tuple(
        _entry(f"leaves[{i}]", leaf, older) for i, leaf in enumerate(leaves)
    )
    _check_numbers(entries)
    return Manifest(state, entries)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_checksums(value: Any) -> bool:
    return _is_text(value) and re.fullmatch("[0-9a-f]*", value) is not None


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


# For each field what it may be, and in words. `key_path` may be missing.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "path": (_is_text, "a string"),
    "key_path": (_is_text, "a string"),
    "number": (_is_count, "a whole number, at least 0"),
    "dtype": (_is_text, "a string"),
    "global_shape": (_is_shape, "a list of whole numbers, at least 0"),
    "weak_type": (lambda value: isinstance(value, bool), "true or false"),
    "key": (lambda value: value is None or _is_text(value), "a string or null"),
    "shape": (_is_shape, "a list of whole numbers, at least 0"),
    "itemsize": (lambda value: _is_count(value) and value > 0, "a positive number"),
    "chunk": (_is_shape, "a list of whole numbers, at least 0"),
    "checksums": (_are_checksums, "hexadecimal digits, 8 for each chunk"),
}


def _entry(where: str, table: Any, older: dict[str, None]) -> Entry:
    if not isinstance(table, dict):
        raise _WrongError(f"{where} is {_shown(table)}; it must be an object")
    table = {"key_path": "", **table, **older}
    for name, (is_allowed, allowed) in _FIELDS.items():
        if name not in table:
            raise _WrongError(f"{where}.{name} is missing")
        if name not in older and not is_allowed(table[name]):
            raise _WrongError(
                f"{where}.{name} is {_shown(table[name])}; it must be {allowed}"
            )
    values = {name: table[name] for name in _FIELDS}
    for name in ("global_shape", "shape", "chunk"):
        values[name] = tuple(values[name])
    entry = Entry(**values)
    if entry.key is None and entry.shape != entry.global_shape:
        raise _WrongError(
            f"{where}.shape is {list(entry.shape)}; it must be its global_shape, "
            f"{list(entry.global_shape)}"
        )
    if not _fits(entry.chunk, entry.shape):
        raise _WrongError(
            f"{where}.chunk is {list(entry.chunk)}; it must be a part of its shape, "
            f"{list(entry.shape)}"
        )
    count = math.prod(entry.chunk_counts)
    digits = 2 * CHECKSUM_BYTES
    if entry.checksums is not None and len(entry.checksums) != digits * count:
        raise _WrongError(
            f"{where}.checksums has {len(entry.checksums)} digits; it must have "
            f"{digits} for each of {count} chunks"
        )
    return entry


def _fits(chunk: Sequence[int], shape: Sequence[int]) -> bool:
    return len(chunk) == len(shape) and all(
        1 <= part <= max(length, 1) for part, length in zip(chunk, shape, strict=True)
    )


def _check_numbers(entries: Sequence[Entry]) -> None:
    """Two leaves of the same number are the same array."""
    first: dict[int, Entry] = {}
    names: set[tuple[str, str]] = set()
    for i, entry in enumerate(entries):
        if entry.number >= len(entries):
            raise _WrongError(
                f"leaves[{i}].number is {_shown(entry.number)}; it must be below "
                f"{len(entries)}"
            )
        other = first.setdefault(entry.number, entry)
        named = dataclasses.replace(entry, path=other.path, key_path=other.key_path)
        if named != other:
            raise _WrongError(
                f"leaves[{i}] has the number of {other.path!r}, and is not the same"
            )
        if (entry.path, entry.key_path) in names:
            raise _WrongError(f"leaves[{i}].path is {entry.path!r} again")
        names.add((entry.path, entry.key_path))


def _shown(value: Any) -> str:
    """A value in a message: short, however large or deep it is."""
    return reprlib.repr(value)


def _hash(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
