"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path

# A directory is locked while states are made known in it or removed, not while they are
# written: longer than this takes only what hangs.
MOST_SECONDS = 60.0


def acquire(file: Path) -> int | None:
    """Opens a file and locks it, for as long as it is open; None if it is locked."""
    import fcntl  # Not on every platform that JAX runs on.

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        return None  # Just removed by who had it.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def directory(path: Path) -> Generator[None, None, None]:
    """Holds a directory alone: nobody else looks for states in it, or removes one.

    Raises:
      OSError: The directory cannot be written to, or somebody holds it for too long.
    """
    file = path / "lock"
    begun = time.monotonic()
    while not _is_held(descriptor := acquire(file), file):
        if descriptor is not None:
            os.close(descriptor)
        if time.monotonic() - begun > MOST_SECONDS:
            raise OSError(
                f"another process has held {file} for {MOST_SECONDS:.0f} seconds. Wait "
                "for it, end it, or give each process a directory of its own"
            )
        time.sleep(0.01)
    assert descriptor is not None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _is_held(descriptor: int | None, file: Path) -> bool:
    """Returns whether a lock is still on the file of that name."""
    if descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def in_use(state: Path) -> bool:
    """Returns whether a tree of any live process refers to a state."""
    for file in state.glob("lock-*"):
        descriptor = acquire(file)
        if descriptor is None:
            return True
        os.close(descriptor)
    return False
