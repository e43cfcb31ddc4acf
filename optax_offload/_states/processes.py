"""Agreements between the processes of a run."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import jax
import numpy as np


def agreed_token() -> str:
    """Sixteen hexadecimal digits that nobody has had, the same in all processes."""
    return of_first(secrets.token_bytes(8)).hex()


def of_first(data: bytes) -> bytes:
    """The bytes of the first process, in all; each gives as many."""
    if jax.process_count() == 1:
        return data
    from jax.experimental import multihost_utils

    parts = np.frombuffer(data, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(parts)))


def in_all(work: Callable[[], object], elsewhere: Exception) -> None:
    """Does some work in all processes, and raises in all if it fails in one.

    Raises:
      Exception: What the work raised here; or ``elsewhere``, if it failed in another
        process.
    """
    error = None
    try:
        work()
    except Exception as e:
        error = e
    if not all_fine(error is None):
        raise error or elsewhere


def all_fine(fine: bool) -> bool:
    """Waits for all processes, and says whether all of them are fine."""
    if jax.process_count() == 1:
        return fine
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))
