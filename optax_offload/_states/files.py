"""The files of one state on disk: written, verified on reading, and removed.

A directory holds one state:

    manifest.json             the leaves there are; replaced last, in one rename
    lock                      while a process makes a state known here, or removes one
    state-<token>/lock-<i>    held by process i while its tree refers to these leaves
    state-<token>/readers     shared by those who read them by a template
    state-<token>/<number>/   a Zarr v3 array of a leaf's bytes, each chunk with CRC-32C
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._states import locks, manifest, processes, zarr
from optax_offload._states.checksums import Checksums
from optax_offload._states.manifest import Entry

# Enough files at once to keep a drive busy; what is being written has a copy in memory.
MOST_BYTES_IN_FLIGHT = 128 * 2**20


class StateFiles:
    """The files of one state, which the manifest names when they are complete.

    Args:
      directory: The directory that the user named.
      name: The name of the state's own directory in it.
      numbers: The numbers of the leaves that there are, or will be.

    Attributes:
      directory: The directory that the user named.
      path: The directory of this state's files.
      remaining: The numbers of the leaves that have not been brought back.
    """

    def __init__(self, directory: Path, name: str, numbers: Iterable[int]):
        """Touches no file."""
        self.directory = directory
        self.path = directory / name
        self.remaining = set(numbers)
        self._written: set[int] = set()
        self._arrays: dict[int, Any] = {}
        self._checksums: dict[int, Checksums] = {}
        self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()
        self._bytes_in_flight = 0
        self._abandoned = False
        self._unlock: Callable[[], object] = lambda: None

    def create(self, entries: Iterable[Entry]) -> None:
        """Makes the directory, locked, and starts to open the leaves to be written.

        The lock ends with the last leaf that refers to this, or with the process.
        """
        self.path.mkdir(exist_ok=True)
        descriptor = locks.acquire(self.path / f"lock-{jax.process_index()}")
        assert descriptor is not None, "nobody else knows this name"
        self._hold(descriptor)
        if jax.process_index() == 0:
            (self.path / locks.READERS).touch()
        self.open(entries, create=True)

    def discard(self) -> None:
        """Removes what `create` made."""
        self._unlock()
        if jax.process_index() == 0:
            shutil.rmtree(self.path, ignore_errors=True)

    def share(self) -> None:
        """Keeps all others from removing the files, as long as a leaf refers to this.

        Where that is not possible, as on a file system that cannot be written to, the
        files can be read all the same.
        """
        descriptor = locks.share(self.path)
        if descriptor is not None:
            self._hold(descriptor)

    def _hold(self, descriptor: int) -> None:
        self._unlock = weakref.finalize(self, locks.release, descriptor, os.getpid())

    def open(self, entries: Iterable[Entry], create: bool = False) -> None:
        """Starts to open the leaves, or to make them, which takes a while for each."""
        for entry in entries:
            number = entry.number
            self._arrays[number] = zarr.open_array(self.path, entry, create)
            if number not in self._checksums:
                self._checksums[number] = Checksums(self.path / str(number), entry)

    def write(self, entry: Entry, x: jax.Array) -> Callable[[], None]:
        """Starts to write this process's part of a leaf.

        Returns:
          A function that returns when it is written and synced, or raises.
        """
        data = jax.random.key_data(x) if entry.key else x
        array = self._arrays.pop(entry.number).result()
        checksums = self._checksums[entry.number]
        futures, indices = [], []
        for shard in data.addressable_shards:
            if shard.replica_id:
                continue
            indices.append(shard.index)
            value = zarr.bytes_of(shard.data)
            corner = [
                s.indices(n)[0] for s, n in zip(shard.index, data.shape, strict=True)
            ]
            for part in zarr.chunks(value.shape[:-1], entry.chunk):
                piece = value[part]
                self._make_room(piece.nbytes)
                there = tuple(
                    slice(c + s.start, c + s.stop)
                    for c, s in zip(corner, part, strict=True)
                )
                # The array is not deleted before this is committed.
                future = array[there].write(
                    piece, can_reference_source_data_indefinitely=True
                )
                futures.append(future)
                self._in_flight.append((piece.nbytes, future))
                self._bytes_in_flight += piece.nbytes

        def wait() -> None:
            for future in futures:
                future.result()
            for index in indices:
                checksums.note(index)
            self._written.add(entry.number)

        return wait

    def _make_room(self, nbytes: int) -> None:
        while self._in_flight and self._bytes_in_flight + nbytes > MOST_BYTES_IN_FLIGHT:
            size, future = self._in_flight.popleft()
            self._bytes_in_flight -= size
            future.exception()  # Waits; what is wrong is raised by its own leaf.

    def commit(self, entries: Sequence[Entry], complete: bool) -> None:
        """Names this state in the manifest: from now on it is what is there.

        Raises:
          RuntimeError: Another process could not write its part, or sees no manifest.
        """
        if not complete:
            self._wait_for_writes()
        if not processes.all_fine(complete):
            self._keep_written()
            if complete:
                raise RuntimeError("another process failed to write its part")
            return
        elsewhere = "another process cannot write the manifest; it says why"
        try:
            processes.in_all(lambda: self._make_known(entries), RuntimeError(elsewhere))
        except Exception:
            if jax.process_count() > 1:
                self._keep_written()
            raise
        if not self.path.is_dir() or not (self.directory / manifest.FILE_NAME).exists():
            raise RuntimeError(
                f"{self.directory} is not the same directory in all processes: it has "
                "to be on a file system that they share"
            )
        self._tell_checksums()
        elsewhere = "another process cannot remove the state of before; it says why"
        processes.in_all(self._remove_others, RuntimeError(elsewhere))

    def _make_known(self, entries: Sequence[Entry]) -> None:
        if jax.process_index():
            return
        texts = {number: known.text() for number, known in self._checksums.items()}
        complete = (
            dataclasses.replace(entry, checksums=texts[entry.number])
            for entry in entries
        )
        table = manifest.Manifest(self.path.name, tuple(complete))
        with locks.directory(self.directory):
            manifest.write(table, self.path / manifest.FILE_NAME, self.directory)

    def _tell_checksums(self) -> None:
        """Gives the checksums that the first process knows to all others."""
        if jax.process_count() == 1:
            return
        sizes = {n: known.size_bytes for n, known in self._checksums.items()}
        data = bytes(sum(sizes.values()))
        if jax.process_index() == 0:
            data = bytes.fromhex("".join(x.text() for x in self._checksums.values()))
        parts = io.BytesIO(processes.of_first(data))
        for number, known in self._checksums.items():
            known.add(parts.read(sizes[number]).hex())

    def _remove_others(self) -> None:
        """Removes the states of before, unless somebody still reads them."""
        if jax.process_index():
            return
        with locks.directory(self.directory):
            for other in manifest.states_in(self.directory):
                if other == self.path:
                    continue
                with locks.alone(other) as nobody:
                    if nobody:
                        shutil.rmtree(other)

    def _wait_for_writes(self) -> None:
        """Waits for what is being written, whatever comes of it."""
        while self._in_flight:
            self._in_flight.popleft()[1].exception()

    def _keep_written(self) -> None:
        """Removes the files of leaves that nobody refers to."""
        if jax.process_count() > 1:
            self._written.clear()  # There it is all or none.
        for number in self.remaining - self._written:
            shutil.rmtree(self.path / str(number), ignore_errors=True)
        self.remaining &= self._written
        if not self.remaining:
            self._unlock()
            self._remove()

    def read(
        self, entry: Entry, dtype: Any, sharding: Sharding
    ) -> Callable[[], jax.Array]:
        """Starts to read this process's part of a leaf.

        Returns:
          A function that returns it when it is read and verified, or raises.
        """
        stored = np.dtype("uint32") if entry.key else dtype
        # Not taken out: leaves of one array may be read for several shardings.
        array = self._arrays[entry.number].result()
        indices = {
            str(index): index
            for index in sharding.addressable_devices_indices_map(entry.shape).values()
        }
        futures = {name: array[index].read() for name, index in indices.items()}
        checksums = self._checksums[entry.number]

        def value(index: Any) -> np.ndarray:
            return futures[str(index)].result().view(stored)[..., 0]

        def finish() -> jax.Array:
            x = memory.array_from(entry.shape, sharding, value)
            for index in indices.values():
                checksums.check(index)
            if entry.key:
                x = jax.random.wrap_key_data(x, impl=entry.key)
            if entry.weak_type:
                x = compat.weakly_typed(x)
            return jax.block_until_ready(x)

        return finish

    def is_whole(self, entry: Entry) -> bool:
        """Returns whether all files of a leaf are there, as they were written.

        Their content is not read, but for its checksums.
        """
        try:
            self._checksums[entry.number].check()
        except (OSError, ValueError):
            return False
        return True

    def end_reading(self, complete: bool) -> str | None:
        """Removes the files, if all leaves are back.

        Returns:
          The reason why they stay nevertheless; None if they do not, or are to stay.
        """
        self._arrays.clear()
        if not self.remaining:
            self._unlock()
        if self._abandoned:
            return None
        if not processes.all_fine(complete) and jax.process_count() > 1:
            # From now on processes need not make the same calls, and cannot agree. The
            # next state in the directory removes this one.
            self._abandoned = True
        elif not self.remaining:
            return self._remove()
        return None

    def _remove(self) -> str | None:
        """Removes the files, or returns the reason why they stay."""
        why = None
        if jax.process_index() == 0:
            try:
                with (
                    locks.directory(self.directory),
                    locks.alone(self.path) as nobody,
                ):
                    if nobody:
                        self._remove_alone()
                    else:
                        why = "another tree or process refers to them, or reads them"
            # Of a directory that cannot be written to a state can be read all the same.
            except OSError as e:
                why = f"{type(e).__name__}: {e}"
        processes.all_fine(True)
        return why

    def _remove_alone(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if manifest.read(self.directory).state == self.path.name:
                (self.directory / manifest.FILE_NAME).unlink()
        if self.path.exists():
            shutil.rmtree(self.path)
