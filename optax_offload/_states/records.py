"""Records of arrays between calls, and work that is left to a thread."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterable
from concurrent import futures
from typing import Any

import jax
from jax.sharding import Sharding

from optax_offload._places import memory
from optax_offload._states.placeholder import OnDisk


@dataclasses.dataclass
class Record:
    """The record of an array or a placeholder that a call returned.

    Attributes:
      origin: The sharding that `reload_states` gives it; None once it came back.
      ref: A weak reference to it.
      ended: Ends with the work that makes it, where a thread does that.
      source: The value that it is made from, until it is known to be good.
      error: The reason why it could not be made.
    """

    origin: Sharding | None
    ref: weakref.ref[Any]
    ended: futures.Future[None] | None = None
    source: Any = None
    error: BaseException | None = None


# By id: arrays can be referred to weakly, but not hashed.
_records: dict[int, Record] = {}
# Sources that calls which are still running will free, by id.
_being_freed: dict[int, Any] = {}
# One thread, so that a copy of a copy ends after it.
_background = futures.ThreadPoolExecutor(1, "optax_offload")


def remember(x: Any, origin: Sharding | None) -> Record:
    """Remembers where a result came from, as long as it lives."""
    key = id(x)
    record = Record(origin, weakref.ref(x, lambda _: _records.pop(key, None)))
    _records[key] = record
    return record


def record_of(x: Any) -> Record | None:
    """Returns the record of an array or a placeholder."""
    record = _records.get(id(x))
    return record if record is not None and record.ref() is x else None


def origin_of(x: Any) -> Sharding | None:
    """Returns the origin of an array, if a call moved it."""
    record = record_of(x)
    return record.origin if record else None


def in_background(work: Any) -> futures.Future[None]:
    """Leaves work to the thread, after all that was left to it before."""
    return _background.submit(work)


def settle() -> None:
    """Waits for all that was left to the thread, and for it to let go of leaves."""
    _background.submit(lambda: None).result()


def settle_freeing() -> None:
    """Waits for calls that still free something, so that no call runs ahead of them."""
    if _being_freed:
        settle()


def start_freeing(sources: Iterable[Any]) -> None:
    """Says that a call that goes on in the background will free these arrays."""
    _being_freed.update((id(x), x) for x in sources)


def end_freeing(sources: Iterable[Any]) -> None:
    """Says that the call has ended: these arrays are freed, or are kept."""
    for x in sources:
        _being_freed.pop(id(x), None)


def is_gone(x: Any) -> bool:
    """Returns whether a leaf is deleted, or will be by a running call.

    Leaves on disk are when all leaves of their state are back: not before, for until
    then their files are there.
    """
    if isinstance(x, OnDisk):
        return not x.files.remaining
    if not isinstance(x, jax.Array):
        return False
    return x.is_deleted() or _being_freed.get(id(x)) is x


def buffer_of(x: Any) -> Hashable:
    """Returns the buffer that is freed with a leaf.

    Two arrays may be one buffer, as `jax.device_put` to where an array is already
    makes them; and deleting either deletes both (F41).
    """
    if isinstance(x, OnDisk):
        return id(x.files), x.entry.number
    if not isinstance(x, jax.Array) or x.is_deleted() or not x.size:
        return id(x)
    data = jax.random.key_data(x) if memory.is_key(x) else x
    try:
        return "buffer", data.addressable_data(0).unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError:  # Not every plugin has it.
        return id(x)
