"""Locks on files, which end with the process that holds them, or with what it holds.

Whoever writes a state holds a lock in it for as long as a tree refers to its leaves;
whoever reads it by a template shares another one. Nobody removes a state before holding
all of these alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path

# A directory is locked while states are made known in it or removed, not while they are
# written: longer than this takes only what hangs.
MOST_SECONDS = 60.0
# The name of the lock that all who read a state share.
READERS = "readers"


def acquire(file: Path, *, shared: bool = False) -> int | None:
    """Opens a file and locks it, for as long as it is open.

    Args:
      file: The file, which is made where there is none.
      shared: Whether others may share the lock, who need not be able to write.

    Returns:
      The open file; None if somebody else holds it, or its directory is gone.

    Raises:
      OSError: It cannot be opened or locked.
    """
    import fcntl  # Not on every platform that JAX runs on.

    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    # Who opens a pipe would wait for its other end.
    flags |= os.O_RDONLY | os.O_NONBLOCK if shared else os.O_RDWR
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        return None  # Just removed by who had it.
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EISDIR):
            raise _not_a_lock(e.errno, file) from e
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_a_lock(errno.EINVAL, file)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as e:
        os.close(descriptor)
        if e.filename:
            raise
        raise OSError(
            e.errno,
            f"{file} cannot be locked ({e.strerror}). States on disk need a file "
            "system with locks (flock): use a directory on another one",
        ) from e
    return descriptor


def _not_a_lock(number: int, file: Path) -> OSError:
    what = "a symbolic link" if file.is_symlink() else "not a regular file"
    return OSError(
        number,
        f"it is {what}, and a lock has to be a file of its own. Remove it, or use "
        "another directory",
        str(file),
    )


def release(descriptor: int, taken_by: int) -> None:
    """Ends a lock.

    A process that was forked meanwhile has the same open file: there the lock would
    outlive the one who took it, and must not end before.

    Args:
      descriptor: The open file.
      taken_by: The number of the process that took the lock.
    """
    import fcntl

    if os.getpid() == taken_by:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def directory(path: Path) -> Generator[None, None, None]:
    """Holds a directory alone: nobody else looks for states in it, or removes one.

    Raises:
      OSError: The directory cannot be written to, or somebody holds it for too long.
    """
    file = path / "lock"
    descriptor = _waited_for(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        release(descriptor, os.getpid())


def _waited_for(file: Path, *, shared: bool = False) -> int:
    """Opens and locks a file, once whoever holds it lets go of it."""
    begun = time.monotonic()
    while not _is_held(descriptor := acquire(file, shared=shared), file):
        if descriptor is not None:
            os.close(descriptor)
        elif not file.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(file.parent))
        if time.monotonic() - begun > MOST_SECONDS:
            raise OSError(
                f"another process has held {file} for {MOST_SECONDS:.0f} seconds. Wait "
                "for it, end it, or give each process a directory of its own"
            )
        time.sleep(0.01)
    assert descriptor is not None
    return descriptor


def _is_held(descriptor: int | None, file: Path) -> bool:
    """Returns whether a lock is still on the file of that name."""
    if descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def share(state: Path) -> int | None:
    """Shares a state with all who read it; None if it is gone, or cannot be locked.

    Where a directory cannot be written to, a state of before, without a lock to share,
    can be read all the same.
    """
    try:
        return _waited_for(state / READERS, shared=True)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as e:
        if e.errno == errno.EROFS:
            return None
        raise


def is_parked(state: Path) -> bool:
    """Returns whether a tree of a live process that wrote a state refers to it."""
    with contextlib.ExitStack() as held:
        return not all(_hold(file, held) for file in state.glob("lock-*"))


@contextlib.contextmanager
def alone(state: Path) -> Generator[bool, None, None]:
    """Whether nobody refers to a state or reads it, and if so, nobody begins to."""
    with contextlib.ExitStack() as held:
        files = [*state.glob("lock-*"), state / READERS]
        yield all(_hold(file, held) for file in files) or not state.exists()


def _hold(file: Path, held: contextlib.ExitStack) -> bool:
    descriptor = acquire(file)
    if descriptor is not None:
        held.callback(release, descriptor, os.getpid())
    return descriptor is not None
