"""Transfers of leaves outside jit: few at a time, and nothing lost on the way."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import Sharding

from optax_offload._ground.errors import OffloadError, OffloadWarning
from optax_offload._ground.progress import Progress, logger
from optax_offload._places import memory
from optax_offload._states import records
from optax_offload._states.leaves import Leaves, one_line
from optax_offload._states.placeholder import OnDisk


@dataclasses.dataclass(eq=False)
class ArrayTransfer:
    """One array on its way, which may be at several positions of a tree.

    Attributes:
      positions: The positions of the array among the tree's leaves.
      source: The array or the placeholder that is transferred.
      origin: The sharding that `reload_states` is to give to the result.
      start: Starts to make the result, and returns a function that waits for it. That
        returns the result, or None if it is gone before it was known to be good.
      result: The result, once it is known what it will be, which may be before it is
        good.
      wait: The function that waits for the result, between its start and its end.
      arrived: Whether the result is good.
      failed: Whether the result could not be made.
    """

    positions: list[int]
    source: Any
    origin: Sharding | None
    start: Callable[[ArrayTransfer], Callable[[], Any]]
    result: Any = None
    wait: Callable[[], Any] | None = None
    arrived: bool = False
    failed: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the array, over all devices together."""
        return memory.nbytes(self.source)


def copy(sharding: Sharding) -> Callable[[ArrayTransfer], Callable[[], Any]]:
    """A transfer's ``start``: from memory to memory."""

    def start(transfer: ArrayTransfer) -> Callable[[], Any]:
        # Not donate=True: it is not implemented between memory kinds (F39).
        transfer.result = result = jax.device_put(transfer.source, sharding)

        def wait() -> Any:
            try:
                return jax.block_until_ready(result)
            except RuntimeError:
                if result.is_deleted():  # Donated, to a step that was started since.
                    return None
                raise

        return wait

    return start


def read(sharding: Sharding) -> Callable[[ArrayTransfer], Callable[[], Any]]:
    """A transfer's ``start``: from disk to memory."""

    def start(transfer: ArrayTransfer) -> Callable[[], Any]:
        place = transfer.source
        return place.files.read(place.entry, place.dtype, sharding)

    return start


def write(place: OnDisk) -> Callable[[ArrayTransfer], Callable[[], Any]]:
    """A transfer's ``start``: from memory to disk."""

    def start(transfer: ArrayTransfer) -> Callable[[], Any]:
        wait = place.files.write(place.entry, transfer.source)
        return lambda: wait() or place

    return start


@dataclasses.dataclass(frozen=True)
class StatesCall:
    """The request of a call about its leaves.

    Attributes:
      name: The name of the call, for messages.
      where: The place that leaves go to, for messages.
      donate: Whether each source is freed once its result is good.
      window_bytes: The most bytes of results that are waited for at once; one result
        may be larger.
      all_or_none: Whether leaves count as transferred, and sources are freed, only
        when all results are good, in all processes.
    """

    name: str
    where: str
    donate: bool
    window_bytes: int
    all_or_none: bool = False


class Transfers:
    """The transfers of one call, which knows at any time where every leaf is.

    Args:
      call: The request to the call.
      leaves: The leaves of the tree that it was given.
      transfers: The transfers to make, in their order.
      commit: Called once at the end, with whether all results are good.
    """

    def __init__(
        self,
        call: StatesCall,
        leaves: Leaves,
        transfers: Sequence[ArrayTransfer],
        commit: Callable[[bool], None] = lambda _: None,
    ):
        """Starts nothing; warns of arrays that cannot be freed."""
        self._call, self._leaves, self._transfers = call, leaves, transfers
        self._commit, self._committed = commit, False
        self._waiting: list[tuple[ArrayTransfer, Any]] = []
        # How many leaves still use each buffer, and how many of those go.
        self._users = collections.Counter(records.buffer_of(x) for x in leaves.leaves)
        self._going = collections.Counter(
            records.buffer_of(t.source) for t in transfers for _ in t.positions
        )
        self._progress = Progress(call.name, sum(t.nbytes for t in transfers))
        if call.donate:
            self._warn_of_shared()

    def run(self) -> Any:
        """Makes all transfers, few at a time; each source is freed as its copy is good.

        Returns:
          The tree, with all results.

        Raises:
          OffloadError: One of the transfers failed.
        """
        try:
            self._run()
        except BaseException as e:
            self._raise(e)
        return self._leaves.with_leaves(self._arrived())

    def start(self) -> Any:
        """Makes all transfers but the last few, which end in the background.

        Returns:
          The tree, of which some leaves are still on their way.

        Raises:
          OffloadError: One of the transfers failed, or could not be started.
        """
        # Where nothing is freed, nothing is gained by waiting.
        window = self._call.window_bytes if self._call.donate else math.inf
        try:
            self._start_all(window)
        except BaseException as e:
            self._raise(e)
        return self._in_background(self._finish_all)

    def start_in_background(self) -> Any:
        """Leaves all to the background. Results have to be known already.

        Returns:
          The tree, of which some leaves are still on their way.
        """
        return self._in_background(self._run)

    def _run(self) -> None:
        for transfer in self._start_all(self._call.window_bytes):
            self._finish(transfer)
        self._end(True)
        for transfer, result in self._waiting:
            self._arrive(transfer, result)

    def _start_all(self, window_bytes: float) -> collections.deque[ArrayTransfer]:
        """Starts all transfers, and finishes all but those that are left in flight."""
        in_flight: collections.deque[ArrayTransfer] = collections.deque()
        nbytes = 0
        for transfer in self._transfers:
            while in_flight and nbytes + transfer.nbytes > window_bytes:
                nbytes -= in_flight[0].nbytes
                self._finish(in_flight.popleft())
            self._begin(transfer)
            in_flight.append(transfer)
            nbytes += transfer.nbytes
        return in_flight

    def _begin(self, transfer: ArrayTransfer) -> None:
        transfer.failed = True
        transfer.wait = transfer.start(transfer)
        transfer.failed = False

    def _finish(self, transfer: ArrayTransfer) -> None:
        """Waits until a result is known to be good, and only then frees its source."""
        if transfer.wait is None:
            return
        transfer.failed = True
        result = transfer.wait()
        transfer.failed = False
        transfer.wait = None
        if self._call.all_or_none:
            self._waiting.append((transfer, result))
        else:
            self._arrive(transfer, result)

    def _arrive(self, transfer: ArrayTransfer, result: Any) -> None:
        transfer.arrived = True
        known = records.record_of(transfer.result)
        if known is not None:
            known.source = None
        elif result is not None:
            records.remember(result, transfer.origin)
        transfer.result = transfer.result if result is None else result
        if self._call.donate and result is not None:
            self._free(transfer)
        self._progress.add(transfer.nbytes)

    def _finish_all(self) -> None:
        """Finishes all that can be; raises the first error of those that cannot."""
        errors: list[Exception] = []
        for transfer in self._transfers:
            try:
                self._finish(transfer)
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def _free(self, transfer: ArrayTransfer) -> None:
        buffer = records.buffer_of(transfer.source)
        self._users[buffer] -= len(transfer.positions)
        if self._users[buffer]:
            return
        if isinstance(transfer.source, OnDisk):
            transfer.source.files.remaining.discard(transfer.source.entry.number)
        else:
            transfer.source.delete()

    def _in_background(self, work: Callable[[], None]) -> Any:
        going_on = [t for t in self._transfers if not t.arrived]
        results = [records.remember(t.result, t.origin) for t in going_on]
        for record, transfer in zip(results, going_on, strict=True):
            record.source = transfer.source
        sources = [t.source for t in going_on if self._is_freed(t)]

        def run() -> None:
            try:
                work()
            except Exception as e:
                self._stop()
                for record, transfer in zip(results, going_on, strict=True):
                    record.error = None if transfer.arrived else e
                not_moved = self._not_arrived()
                logger.error(
                    "%s failed for %s: %s. The next call with these leaves raises, "
                    "and gives them back",
                    self._call.name,
                    self._leaves.named(not_moved) if not_moved else "the manifest",
                    one_line(e),
                )
            finally:
                records.end_freeing(sources)

        tree = self._leaves.with_leaves(
            {i: t.result for t in self._transfers for i in t.positions}
        )
        records.start_freeing(sources)
        ended = records.in_background(run)
        for record in results:
            record.ended = ended
        return tree

    def _arrived(self) -> dict[int, Any]:
        """The results that are good, by their positions."""
        return {i: t.result for t in self._transfers if t.arrived for i in t.positions}

    def _not_arrived(self) -> list[int]:
        return [i for t in self._transfers if not t.arrived for i in t.positions]

    def _is_freed(self, transfer: ArrayTransfer) -> bool:
        """Returns whether no leaf that stays uses the buffer of a transfer's source."""
        buffer = records.buffer_of(transfer.source)
        return self._call.donate and self._users[buffer] <= self._going[buffer]

    def _stop(self) -> None:
        """Ends what was started."""
        with contextlib.suppress(Exception):
            self._finish_all()
        with contextlib.suppress(Exception):
            self._end(False)

    def _end(self, complete: bool) -> None:
        """Commits, once: processes wait for each other there."""
        if not self._committed:
            self._committed = True
            self._commit(complete)

    def _raise(self, error: BaseException) -> NoReturn:
        self._stop()
        results = self._arrived()
        moved, left = list(results), self._not_arrived()
        unread = [
            i
            for t in self._transfers
            if isinstance(t.source, OnDisk) and not t.arrived
            # Of what was not tried it is seen whether it can be read.
            if t.failed or not t.source.files.is_whole(t.source.entry)
            for i in t.positions
        ]
        message = (
            f"{self._call.name} stopped: {one_line(error)}. Moved to "
            f"{self._call.where}: {len(moved)} leaves "
            f"({self._leaves.named(moved) or 'none'}). Not moved: {len(left)} "
            f"({self._leaves.named(left) or 'none'}). "
            f"{self._leaves.what_is_lost(results, unread)}: this error's .tree is the "
            "tree as it is now. To go on, pass it to the same call, or to reload_states"
        )
        tree = self._leaves.with_leaves(results)
        if isinstance(error, Exception):
            raise OffloadError(message, tree) from error
        error.add_note(message)
        error.tree = tree  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    def _warn_of_shared(self) -> None:
        shared = [
            i for t in self._transfers if not self._is_freed(t) for i in t.positions
        ]
        if shared:
            warnings.warn(
                f"{self._leaves.named(shared)}: the same array is also a leaf that "
                "include does not choose. It is copied, and not freed",
                OffloadWarning,
                stacklevel=5,
            )
