"""Lines in the log on how far a long transfer or conversion of a state is."""

from __future__ import annotations

import logging
import time

from optax_offload._ground import units

logger = logging.getLogger("optax_offload")

# At most one line in this time.
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Says in the log how far a call is.

    Args:
      name: The name of the call.
      total_bytes: The bytes that it transfers or converts in all.
    """

    def __init__(self, name: str, total_bytes: int):
        """Starts the clock."""
        self._name, self._total_bytes, self._done_bytes = name, total_bytes, 0
        self._begun = self._said = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Counts what has arrived, and says so if the last line is long ago."""
        self._done_bytes += size_bytes
        now = time.monotonic()
        if now - self._said <= SECONDS_BETWEEN_LINES:
            return
        self._said = now
        done, total = (n / units.GIB for n in (self._done_bytes, self._total_bytes))
        rate = done / (now - self._begun)
        line = "%s: %.1f of %.1f GiB, %.2f GiB/s"
        logger.info(line, self._name, done, total, rate)
