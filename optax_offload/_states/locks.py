"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import os
from pathlib import Path


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


def in_use(state: Path) -> bool:
    """Whether a tree of this process, or of another that lives, refers to a state."""
    for file in state.glob("lock-*"):
        descriptor = acquire(file)
        if descriptor is None:
            return True
        os.close(descriptor)
    return False
