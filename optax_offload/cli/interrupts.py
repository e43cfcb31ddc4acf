"""Work that Ctrl-C or SIGTERM ends at once, although compilers ignore it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable


def until_interrupted(work: Callable[[], None]) -> bool:
    """Runs something in a thread of its own, until it ends or is interrupted.

    A compiler holds the thread that called it until it is done; so that is not the main
    one, which Ctrl-C interrupts, and SIGTERM as `timeout` and job schedulers send it.

    Args:
      work: The function to run. It is left running if it is interrupted: see `leave`.

    Returns:
      Whether it ended by itself. If not, further signals are ignored: `timeout` sends a
      second one at once, and what there is so far is still to be written.

    Raises:
      Exception: The exception that the work raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # A wait without an end is not interrupted on every platform.
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return False
    signal.signal(signal.SIGTERM, before)
    if raised:
        raise raised[0]
    return True


def leave(code: int) -> None:
    """Ends the process, whatever its threads are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
