"""A directory for states on disk as it is seen: its space, and how fast it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path

from optax_offload._ground import file_system
from optax_offload._ground.units import GIB, MIB

# As states are written: in files of this size, so many at once.
_BLOCK_BYTES = 16 * MIB
_AT_ONCE = 8
# Of the free space so much is left alone.
_FREE_SHARE = 4
# Each way; no block begins later. A slow drive is known by then.
_MOST_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class DirectoryView:
    """A directory as it is seen from this process.

    Attributes:
      path: Its path, without links.
      measured_at: The nearest directory that exists, where a file was written.
      free_bytes: The space that is free for this user.
      total_bytes: The size of the file system.
      measured_bytes: The bytes that were written and read.
      write_bytes_per_second: How fast they were written; None if they were not.
      read_bytes_per_second: How fast they were read, past the page cache.
      error: The reason why nothing could be measured; "" if it was, or is memory.
    """

    path: str = ""
    measured_at: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    measured_bytes: int = 0
    write_bytes_per_second: float | None = None
    read_bytes_per_second: float | None = None
    error: str = ""

    def as_json(self) -> str:
        """A text for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DirectoryView:
        """Reads what `as_json` wrote; any other text gives a view without facts."""
        try:
            found = cls(**json.loads(text))
            texts = (found.path, found.measured_at, found.error)
            numbers = dataclasses.astuple(found)[2:7]
        except (ValueError, TypeError):
            return cls()
        fine = all(isinstance(x, str) for x in texts) and all(
            x is None or (isinstance(x, (int, float)) and x >= 0) for x in numbers
        )
        return found if fine else cls()


def look_at(directory: str, nbytes: int = GIB) -> DirectoryView:
    """Looks at a directory, and measures it with a file that has no name.

    Args:
      directory: Its path. It need not exist: then the nearest one above it that does
        is looked at.
      nbytes: The most bytes to write, less where little space is free.

    Raises:
      ValueError: The path names no directory.
    """
    if not directory or "\0" in directory:
        raise ValueError(f"--directory {directory!r} names no directory")
    path = Path(os.path.realpath(directory))
    at = next(p for p in (path, *path.parents) if p.exists())
    if not at.is_dir():
        raise ValueError(f"--directory {directory}: {at} is not a directory")
    usage = shutil.disk_usage(at)
    view = DirectoryView(str(path), str(at), usage.free, usage.total)
    mount = file_system.mount_here(at)
    if mount is not None and mount.kind == "memory":
        return view  # Its speed is that of memory, of which a GiB may be missed.
    nbytes = min(nbytes, usage.free // _FREE_SHARE) // MIB * MIB
    if not nbytes:
        return dataclasses.replace(view, error="too little space is free to measure")
    try:
        written, writes, reads = _measured(at, nbytes)
    except OSError as e:
        return dataclasses.replace(view, error=f"{type(e).__name__}: {e}")
    return dataclasses.replace(
        view,
        measured_bytes=written,
        write_bytes_per_second=writes,
        read_bytes_per_second=reads,
    )


def _measured(directory: Path, nbytes: int) -> tuple[int, float, float]:
    """The bytes of a file that is written and read, and both speeds."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        # Not every file system has it, and some say so only when they are written to.
        with contextlib.suppress(OSError):
            return _with_flags(directory, nbytes, direct)
    return _with_flags(directory, nbytes, 0)


def _with_flags(directory: Path, nbytes: int, direct: int) -> tuple[int, float, float]:
    name = directory / f".optax-offload-doctor-{secrets.token_hex(8)}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | direct, 0o600)
    try:
        # It ends with this process, whatever becomes of it.
        name.unlink()
        return _rates(file, nbytes, cached=not direct)
    finally:
        os.close(file)


def _rates(file: int, nbytes: int, *, cached: bool) -> tuple[int, float, float]:
    # Pages of their own, which is what O_DIRECT asks for.
    block = max(nbytes // _AT_ONCE // MIB * MIB, MIB)
    buffers = [mmap.mmap(-1, min(block, _BLOCK_BYTES)) for _ in range(_AT_ONCE)]
    for buffer in buffers:
        buffer.write(os.urandom(len(buffer)))  # Zeros might be compressed.
    starts = range(0, nbytes - len(buffers[0]) + 1, len(buffers[0]))

    def write(buffer: mmap.mmap, start: int) -> int:
        return os.pwrite(file, buffer, start)

    def read(buffer: mmap.mmap, start: int) -> int:
        return os.preadv(file, [buffer], start)

    with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        written, writes = _rate(pool, write, buffers, starts, lambda: _flush(file))
        if cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        there = [start for start in starts if start + len(buffers[0]) <= written]
        _, reads = _rate(pool, read, buffers, there, lambda: None)
    return written, writes, reads


def _rate(
    pool: futures.Executor,
    move: Callable[[mmap.mmap, int], int],
    buffers: Sequence[mmap.mmap],
    starts: Sequence[int],
    flush: Callable[[], None],
) -> tuple[int, float]:
    """The bytes that are moved, a few blocks at once, and how many in a second."""
    begun, moved = time.perf_counter(), 0
    for first in range(0, len(starts), len(buffers)):
        group = starts[first : first + len(buffers)]
        moved += sum(pool.map(move, buffers, group))
        flush()
        if time.perf_counter() - begun > _MOST_SECONDS:
            break
    return moved, moved / (time.perf_counter() - begun)


def _flush(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)
