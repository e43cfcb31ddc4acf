"""Moving leaves outside jit: few at a time, and nothing lost on the way."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NoReturn

import jax
from jax.sharding import Sharding

from optax_offload import _memory, _trees
from optax_offload._errors import OffloadError, OffloadWarning
from optax_offload._states import disk as _disk

logger = logging.getLogger("optax_offload")

# Of copies that have not ended when the next one starts: enough to hide the latency of
# a transfer, little beside a state. Files take longer.
COPY_WINDOW_BYTES = 64 * 2**20
DISK_WINDOW_BYTES = 256 * 2**20
_SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass
class Record:
    """What is remembered of an array or a placeholder that a call returned.

    Attributes:
      origin: where `reload_states` puts it; None for what came back.
      ref: to it, weak.
      ended: of the work that makes it, where that is done in the background.
      source: what it is made from, until it is known good.
      error: why it could not be made.
    """

    origin: Sharding | None
    ref: weakref.ref[Any]
    ended: futures.Future[None] | None = None
    source: Any = None
    error: BaseException | None = None


# By id: arrays can be referred to weakly, but not hashed.
_records: dict[int, Record] = {}
# One thread, so that a copy of a copy ends after it.
_background = futures.ThreadPoolExecutor(1, "optax_offload")


def record_of(x: Any) -> Record | None:
    record = _records.get(id(x))
    return record if record is not None and record.ref() is x else None


def origin_of(x: Any) -> Sharding | None:
    """Where an array came from, if a call moved it away from there."""
    record = record_of(x)
    return record.origin if record else None


def _remember(x: Any, origin: Sharding | None) -> Record:
    key = id(x)
    record = Record(origin, weakref.ref(x, lambda _: _records.pop(key, None)))
    _records[key] = record
    return record


def settle() -> None:
    """Waits for all that was left to the background, and for it to let go of leaves."""
    _background.submit(lambda: None).result()


class Tree:
    """A tree as its leaves and their paths."""

    def __init__(self, tree: Any):
        flat, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self.paths = [_trees.path_string(keys) for keys, _ in flat]
        self.leaves = [leaf for _, leaf in flat]

    def with_leaves(self, others: dict[int, Any]) -> Any:
        """The tree, some leaves replaced, given by their positions."""
        leaves = [others.get(i, x) for i, x in enumerate(self.leaves)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def named(self, positions: Sequence[int]) -> str:
        return _trees.listed([self.paths[i] for i in positions])


@dataclasses.dataclass(eq=False)
class Move:
    """One array on its way, which may be at several positions of a tree.

    Attributes:
      positions: in the tree.
      source: an array or a placeholder.
      origin: where `reload_states` is to put the result.
      start: starts to make the result, and returns what waits for it. That returns the
        result, or None if it is gone before it was known to be good.
      result: once it is known what it will be, which may be before it is good.
    """

    positions: list[int]
    source: Any
    origin: Sharding | None
    start: Callable[[Move], Callable[[], Any]]
    result: Any = None
    wait: Callable[[], Any] | None = None
    arrived: bool = False

    def __post_init__(self):
        self.nbytes = _memory.nbytes(self.source)


def copy(sharding: Sharding) -> Callable[[Move], Callable[[], Any]]:
    """A move's ``start``: from memory to memory."""

    def start(move: Move) -> Callable[[], Any]:
        # Not donate=True: "Donation across different memory kinds is not implemented."
        move.result = result = jax.device_put(move.source, sharding)

        def wait() -> Any:
            try:
                return jax.block_until_ready(result)
            except RuntimeError:
                if result.is_deleted():  # Donated, to a step that was started since.
                    return None
                raise

        return wait

    return start


def read(sharding: Sharding) -> Callable[[Move], Callable[[], Any]]:
    """A move's ``start``: from disk to memory."""
    return lambda move: move.source.state.read(move.source, sharding)


def write(place: _disk.OnDisk) -> Callable[[Move], Callable[[], Any]]:
    """A move's ``start``: from memory to disk."""

    def start(move: Move) -> Callable[[], Any]:
        wait = place.state.write(place, move.source)
        return lambda: wait() or place

    return start


class Moves:
    """The moves of one call, which knows at any time where every leaf is.

    Args:
      name: of the call, for messages.
      where: where leaves go, for messages.
      commit: called at the end with whether all arrived.
      all_or_none: leaves count as moved, and sources are freed, only after that.
    """

    def __init__(
        self,
        name: str,
        tree: Tree,
        moves: Sequence[Move],
        *,
        where: str,
        donate: bool,
        window_bytes: int,
        commit: Callable[[bool], None] = lambda _: None,
        all_or_none: bool = False,
    ):
        self._name, self._tree, self._moves = name, tree, moves
        self._where, self._donate, self._window = where, donate, window_bytes
        self._commit, self._all_or_none = commit, all_or_none
        self._committed = False
        self._waiting: list[tuple[Move, Any]] = []
        self._users = collections.Counter(_buffer(x) for x in tree.leaves)
        self._log = _Progress(name, sum(m.nbytes for m in moves))
        if donate:
            self._warn_of_shared()

    def in_turn(self) -> Any:
        """Makes all moves, few at a time, each source freed when its copy is good.

        Returns:
          The tree, moved.

        Raises:
          OffloadError: one of them failed.
        """
        try:
            self._in_turn()
        except BaseException as e:
            self._raise(e)
        return self._now()

    def started(self) -> Any:
        """Starts all moves at once, and frees sources in the background.

        Returns:
          The tree, of which some leaves are still on their way.

        Raises:
          OffloadError: one of them could not be started.
        """
        try:
            for move in self._moves:
                move.wait = move.start(move)
        except BaseException as e:
            self._raise(e)
        return self._in_background(self._finish_all)

    def started_in_background(self) -> Any:
        """Leaves all to the background. Results have to be known already."""
        return self._in_background(self._in_turn)

    def _in_turn(self) -> None:
        in_flight: collections.deque[Move] = collections.deque()
        nbytes = 0
        for move in self._moves:
            while in_flight and nbytes + move.nbytes > self._window:
                nbytes -= in_flight[0].nbytes
                self._finish(in_flight.popleft())
            move.wait = move.start(move)
            in_flight.append(move)
            nbytes += move.nbytes
        for move in in_flight:
            self._finish(move)
        self._end(True)
        for move, result in self._waiting:
            self._arrive(move, result)

    def _finish(self, move: Move) -> None:
        """Waits until a result is known to be good, and only then frees its source."""
        if move.wait is None:
            return
        result = move.wait()
        move.wait = None
        if self._all_or_none:
            self._waiting.append((move, result))
        else:
            self._arrive(move, result)

    def _arrive(self, move: Move, result: Any) -> None:
        move.arrived = True
        known = record_of(move.result)
        if known is not None:
            known.source = None
        elif result is not None:
            _remember(result, move.origin)
        move.result = move.result if result is None else result
        if self._donate and result is not None:
            self._free(move)
        self._log.add(move.nbytes)

    def _finish_all(self) -> None:
        """Finishes all that can be; raises the first error of those that cannot."""
        errors = []
        for move in self._moves:
            try:
                self._finish(move)
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def _free(self, move: Move) -> None:
        buffer = _buffer(move.source)
        self._users[buffer] -= len(move.positions)
        if self._users[buffer]:
            return
        if isinstance(move.source, _disk.OnDisk):
            move.source.state.remaining.discard(move.source.entry["number"])
        else:
            move.source.delete()

    def _in_background(self, work: Callable[[], None]) -> Any:
        records = [_remember(move.result, move.origin) for move in self._moves]
        for record, move in zip(records, self._moves, strict=True):
            record.source = move.source

        def run() -> None:
            try:
                work()
            except Exception as e:
                self._stop()
                lost = [i for m in self._moves if not m.arrived for i in m.positions]
                for record, move in zip(records, self._moves, strict=True):
                    record.error = None if move.arrived else e
                logger.error(
                    "%s failed for %s: %s. The next call with these leaves raises, "
                    "and gives them back",
                    self._name,
                    self._tree.named(lost) if lost else "the manifest",
                    one_line(e),
                )

        tree = self._tree.with_leaves(
            {i: move.result for move in self._moves for i in move.positions}
        )
        ended = _background.submit(run)
        for record in records:
            record.ended = ended
        return tree

    def _now(self) -> Any:
        return self._tree.with_leaves(
            {i: m.result for m in self._moves if m.arrived for i in m.positions}
        )

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
        moved = [i for m in self._moves if m.arrived for i in m.positions]
        left = [i for m in self._moves if not m.arrived for i in m.positions]
        message = (
            f"{self._name} stopped: {one_line(error)}. Moved to {self._where}: "
            f"{len(moved)} leaves ({self._tree.named(moved) or 'none'}). Not moved: "
            f"{len(left)} ({self._tree.named(left) or 'none'}). Nothing is lost: this "
            "error's .tree is the tree as it is now. To go on, pass it to the same "
            "call, or to reload_states"
        )
        tree = self._now()
        if isinstance(error, Exception):
            raise OffloadError(message, tree) from error
        error.add_note(message)
        error.tree = tree  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    def _warn_of_shared(self) -> None:
        moved = collections.Counter(
            _buffer(m.source) for m in self._moves for _ in m.positions
        )
        shared = [
            i
            for m in self._moves
            for i in m.positions
            if self._users[_buffer(m.source)] > moved[_buffer(m.source)]
        ]
        if shared:
            warnings.warn(
                f"{self._tree.named(shared)}: the same array is also a leaf that "
                "include does not choose. It is copied, and not freed",
                OffloadWarning,
                stacklevel=4,
            )


class _Progress:
    """Says in the log how far a long move is."""

    def __init__(self, name: str, total: int):
        self._name, self._total, self._done = name, total, 0
        self._begun = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._said > _SECONDS_BETWEEN_LINES:
            self._said = now
            gib = [n / 2**30 for n in (self._done, self._total)]
            rate = gib[0] / (now - self._begun)
            line = "%s: %.1f of %.1f GiB, %.2f GiB/s"
            logger.info(line, self._name, *gib, rate)


def _buffer(x: Any) -> Any:
    """What is freed with a leaf: two arrays may be one buffer, which goes with either.

    As `jax.device_put` to where an array is already returns.
    """
    if isinstance(x, _disk.OnDisk):
        return id(x.state), x.entry["number"]
    if not isinstance(x, jax.Array) or x.is_deleted() or not x.size:
        return id(x)
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    try:
        return "buffer", data.addressable_data(0).unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError:  # Not every plugin has it.
        return id(x)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
