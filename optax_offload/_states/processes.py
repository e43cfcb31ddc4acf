"""Agreements between the processes of a run."""

from __future__ import annotations

import secrets

import jax
import numpy as np


def agreed_token() -> str:
    """Sixteen hexadecimal digits that nobody has had, the same in all processes."""
    token = secrets.token_bytes(8)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        parts = np.frombuffer(token, np.uint8)
        token = bytes(np.asarray(multihost_utils.broadcast_one_to_all(parts)))
    return token.hex()


def all_fine(fine: bool) -> bool:
    """Waits for all processes, and says whether all of them are fine."""
    if jax.process_count() == 1:
        return fine
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))
