"""States on disk: through tensorstore, verified on reading, whole or not there at all.

A directory holds one state:

    manifest.json             the leaves there are; replaced last, in one rename
    state-<name>/lock-<i>     held by process i while its tree refers to these leaves
    state-<name>/<number>/    a Zarr v3 array of a leaf's bytes, each chunk with CRC-32C

Nothing here but the manifest is of our making, and that is JSON with a hash.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from optax_offload import _compat, _memory

# A chunk is a file and a checksum, and what is copied at once to be encoded.
MOST_CHUNK_BYTES = 16 * 2**20
# Enough files at once to keep a drive busy; what is being written has a copy in memory.
MOST_BYTES_IN_FLIGHT = 128 * 2**20

_MANIFEST = "manifest.json"
_STATE = re.compile(r"state-[0-9a-f]{16}")


class OnDisk(jax.ShapeDtypeStruct):
    """The place of a leaf that is on disk: its shape, dtype, sharding, and where.

    Attributes:
      path: its path in the tree that was offloaded.
      directory: where `offload_states` was told to put it.
    """

    def __init__(
        self, like: Any, sharding: Sharding, state: State, entry: dict[str, Any]
    ):
        super().__init__(
            like.shape, like.dtype, sharding=sharding, weak_type=entry["weak_type"]
        )
        for name, value in {"state": state, "entry": entry}.items():
            object.__setattr__(self, name, value)

    state: State
    entry: dict[str, Any]
    memory_kind = "disk"

    @property
    def path(self) -> str:
        return self.entry["path"]

    @property
    def directory(self) -> str:
        return str(self.state.directory)

    def __repr__(self) -> str:
        return (
            f"OnDisk({self.path!r}, {self.dtype}{list(self.shape)}, {self.directory!r})"
        )

    __str__ = __repr__

    # As structs compare, two leaves of the same shape would be the same leaf.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            f"{self!r} has no value in memory: bring it back with "
            "optax_offload.reload_states(tree)"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to its process. In another, make a template with "
            "optax_offload.eval_shape(...), and call optax_offload.reload_states("
            f"template, directory={self.directory!r})"
        )

    def __copy__(self) -> OnDisk:
        return self

    def __deepcopy__(self, _: Any) -> OnDisk:
        return self


class State:
    """The files of one call: a directory that is named in the manifest when complete.

    Attributes:
      directory: what the user named.
      remaining: the numbers of the leaves that have not come back.
    """

    def __init__(self, directory: Path, name: str, numbers: Iterable[int]):
        self.directory = directory
        self.path = directory / name
        self.remaining = set(numbers)
        self._written: set[int] = set()
        self._stores: dict[int, Any] = {}
        self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()
        self._bytes_in_flight = 0
        self._left = False
        self._unlock: Callable[[], object] = lambda: None

    def lock(self) -> None:
        """Takes a lock that ends with the last leaf that refers to this, or with us."""
        descriptor = _locked(self.path / f"lock-{jax.process_index()}")
        assert descriptor is not None, "nobody else knows this name"
        self._unlock = weakref.finalize(self, os.close, descriptor)

    def open(self, leaves: Iterable[OnDisk], create: bool = False) -> None:
        """Starts to open what will be written or read, which takes a while for each."""
        self._stores = {
            leaf.entry["number"]: _open(self.path, leaf.entry, create)
            for leaf in leaves
        }

    def write(self, leaf: OnDisk, x: jax.Array) -> Callable[[], None]:
        """Starts to write this process's part of a leaf.

        Returns:
          A function that returns when it is written and synced, or raises.
        """
        data = jax.random.key_data(x) if leaf.entry["key"] else x
        store = self._stores.pop(leaf.entry["number"]).result()
        chunk = leaf.entry["chunk"]
        futures = []
        for shard in data.addressable_shards:
            if shard.replica_id:
                continue
            value = _bytes_of(shard.data)
            corner = [
                s.indices(n)[0] for s, n in zip(shard.index, data.shape, strict=True)
            ]
            for part in _chunks(value.shape[:-1], chunk):
                piece = value[part]
                self._make_room(piece.nbytes)
                there = tuple(
                    slice(c + s.start, c + s.stop)
                    for c, s in zip(corner, part, strict=True)
                )
                # The array is not deleted before this is committed.
                future = store[there].write(
                    piece, can_reference_source_data_indefinitely=True
                )
                futures.append(future)
                self._in_flight.append((piece.nbytes, future))
                self._bytes_in_flight += piece.nbytes

        def wait() -> None:
            for future in futures:
                future.result()
            self._written.add(leaf.entry["number"])

        return wait

    def _make_room(self, nbytes: int) -> None:
        while self._in_flight and self._bytes_in_flight + nbytes > MOST_BYTES_IN_FLIGHT:
            size, future = self._in_flight.popleft()
            self._bytes_in_flight -= size
            future.exception()  # Waits; what is wrong is raised by its own leaf.

    def commit(self, leaves: Sequence[OnDisk], complete: bool) -> None:
        """Names this state in the manifest: from now on it is what is there.

        Raises:
          RuntimeError: another process could not write its part, or sees no manifest.
        """
        if not complete:
            self._give_up()
        if not _everywhere(complete):
            self._keep_written()
            if complete:
                raise RuntimeError("another process failed to write its part")
            return
        table = {"state": self.path.name, "leaves": [leaf.entry for leaf in leaves]}
        manifest = self.directory / _MANIFEST
        if jax.process_index() == 0:
            temporary = self.path / _MANIFEST
            with open(temporary, "w") as f:
                json.dump(table | {"sha256": _hash(table)}, f, indent=1)
                f.flush()
                os.fsync(f.fileno())
            for directory in (self.path, self.directory):
                _sync(directory)
            os.replace(temporary, manifest)
            _sync(self.directory)
        _everywhere(True)
        if not self.path.is_dir() or not manifest.exists():
            raise RuntimeError(
                f"{self.directory} is not the same directory in all processes: it has "
                "to be on a file system that they share"
            )
        if jax.process_index() == 0:
            for other in _states(self.directory):
                if other != self.path and not _in_use(other):
                    shutil.rmtree(other)
        _everywhere(True)

    def _give_up(self) -> None:
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

    def read(self, leaf: OnDisk, sharding: Sharding) -> Callable[[], jax.Array]:
        """Starts to read this process's part of a leaf.

        Returns:
          A function that returns it when it is read and verified, or raises.
        """
        entry = leaf.entry
        shape = tuple(entry["shape"])
        dtype = np.dtype("uint32") if entry["key"] else leaf.dtype
        store = self._stores.pop(entry["number"]).result()
        indices = sharding.addressable_devices_indices_map(shape).values()
        futures = {str(index): store[index].read() for index in indices}

        def value(index: Any) -> np.ndarray:
            return futures[str(index)].result().view(dtype)[..., 0]

        def finish() -> jax.Array:
            x = _memory.array_from(shape, sharding, value)
            if entry["key"]:
                x = jax.random.wrap_key_data(x, impl=entry["key"])
            if entry["weak_type"]:
                x = _compat.weakly_typed(x)
            return jax.block_until_ready(x)

        return finish

    def tidy(self, complete: bool) -> None:
        """Removes the files, if all leaves are back."""
        if not self.remaining:
            self._unlock()
        if self._left:
            return
        if not _everywhere(complete) and jax.process_count() > 1:
            # From now on processes need not make the same calls, and cannot agree. The
            # next state in the directory removes this one.
            self._left = True
        elif not self.remaining:
            self._remove()

    def _remove(self) -> None:
        if jax.process_index() == 0:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if _manifest(self.directory)["state"] == self.path.name:
                    (self.directory / _MANIFEST).unlink()
            shutil.rmtree(self.path, ignore_errors=True)
        _everywhere(True)


def begin(
    directory: str | os.PathLike[str],
    leaves: Sequence[tuple[str, jax.Array, Sharding]],
) -> list[OnDisk]:
    """Prepares a directory for leaves, as (path, array, sharding to come back to).

    Returns:
      For each leaf its place, which is still to be written.

    Raises:
      ImportError: tensorstore is missing.
      ValueError: the directory holds leaves of a tree that is still in use.
      OSError: it cannot be written to, or has too little space.
    """
    _tensorstore()
    root = Path(os.path.abspath(directory))
    name = _agreed_name()
    error = None
    try:
        _prepare(root, sum(x.nbytes for _, x, _ in leaves))
    except (OSError, ValueError) as e:
        error = e
    fine = _everywhere(error is None)
    if error is not None:
        raise error
    if not fine:
        raise OSError(f"another process cannot write to {root}; it says why")
    state = State(root, name, range(len(leaves)))
    state.path.mkdir(exist_ok=True)
    state.lock()
    places = [
        OnDisk(x, sharding, state, _entry(number, path, x))
        for number, (path, x, sharding) in enumerate(leaves)
    ]
    state.open(places, create=True)
    return places


def _prepare(root: Path, needed: int) -> None:
    """Checks that a directory can be written to, and removes what was left half way."""
    root.mkdir(parents=True, exist_ok=True)
    committed = None
    with contextlib.suppress(FileNotFoundError, ValueError):
        committed = _manifest(root)["state"]
    # One process looks: to look is to lock.
    for other in _states(root) if jax.process_index() == 0 else ():
        if _in_use(other):
            raise ValueError(
                f"{root} holds leaves that offload_states put there and that a tree "
                "still refers to. Reload them first, drop that tree, or give each "
                "state a directory of its own"
            )
        if other.name != committed:
            shutil.rmtree(other)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise OSError(
            f"{root} has {free} bytes free; {needed} are needed. Nothing was moved. "
            "Make room, choose fewer leaves with include, or another directory"
        )


def find(
    directory: str | os.PathLike[str], template: Sequence[tuple[str, Any]]
) -> tuple[list[OnDisk], list[str]]:
    """The places of leaves that another process wrote, for structs with shardings.

    Returns:
      A place for each struct, and the paths in the directory that none asks for.

    Raises:
      FileNotFoundError: the directory holds no complete state.
      ValueError: its manifest is damaged, or a struct is not as the leaf on disk.
    """
    root = Path(os.path.abspath(directory))
    table = _manifest(root)
    entries = {entry["path"]: entry for entry in table["leaves"]}
    state = State(root, table["state"], [e["number"] for e in table["leaves"]])
    places, wrong = [], []
    for path, struct in template:
        entry = entries.pop(path, None)
        sharding = struct.sharding
        if entry is None:
            wrong.append(f"{path!r} is not there")
        elif _kind(struct) != (found := (entry["dtype"], entry["global_shape"])):
            wrong.append(f"{path!r} is {found[0]}{found[1]} there, not {struct}")
        elif sharding is None:
            wrong.append(f"{path!r} has no sharding in the template")
        else:
            places.append(OnDisk(struct, sharding, state, entry))
    if wrong:
        raise ValueError(
            f"the state in {root} does not fit the tree: {'; '.join(wrong)}. Make the "
            "template as the state was made, with optax_offload.eval_shape(...); give "
            "values for what was no jax.Array"
        )
    return places, list(entries)


def _kind(x: Any) -> tuple[str, list[int]]:
    return str(x.dtype), list(x.shape)


def _entry(number: int, path: str, x: jax.Array) -> dict[str, Any]:
    """What the manifest says of a leaf."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    dtype, shape = _kind(x)
    itemsize = np.dtype(data.dtype).itemsize
    return {
        "path": path,
        "number": number,
        "dtype": dtype,
        "global_shape": shape,
        "weak_type": bool(jax.typeof(x).weak_type) if not is_key else False,
        "key": str(jax.random.key_impl(x)) if is_key else None,
        "shape": list(data.shape),
        "itemsize": itemsize,
        "chunk": _chunk_shape(data.sharding.shard_shape(data.shape), itemsize),
    }


def _chunk_shape(shard: Sequence[int], itemsize: int) -> list[int]:
    """A chunk that divides a shard, so that no two processes write the same one."""
    chunk = [max(n, 1) for n in shard]
    for axis, length in enumerate(chunk):
        size = itemsize * math.prod(chunk)
        if size <= MOST_CHUNK_BYTES:
            break
        parts = (n for n in range(1, length + 1) if length % n == 0)
        chunk[axis] = next(
            (length // n for n in parts if size // n <= MOST_CHUNK_BYTES), 1
        )
    return chunk


def _chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    axes = [
        [slice(start, start + step) for start in range(0, length, step)]
        for length, step in zip(shape, chunk, strict=True)
    ]
    return itertools.product(*axes)


def _bytes_of(x: jax.Array) -> np.ndarray:
    """The bytes of an array that is on one device, as a last axis.

    As bytes every dtype is the same, and negative zeros and NaNs are what they are.
    """
    # JAX keeps the NumPy copy of an array with it. This one is let go of at once.
    x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
    value = np.asarray(x, order="C")
    return value.reshape(*value.shape, 1).view(np.uint8)


def _open(state: Path, entry: dict[str, Any], create: bool) -> Any:
    metadata = {
        "shape": [*entry["shape"], entry["itemsize"]],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [*entry["chunk"], entry["itemsize"]]},
        },
        # All files of a leaf in one directory: of many small leaves, directories are
        # what takes longest to remove.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(state / str(entry["number"]))},
        # On reading, metadata that says otherwise is an error.
        "metadata": metadata,
        # A chunk that is missing is an error, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return _tensorstore().open(spec, open=True, create=create, context=_context())


@functools.cache
def _context() -> Any:
    # Metadata is read again each time: a directory of the same name may be another.
    return _tensorstore().Context({"cache_pool": {"total_bytes_limit": 0}})


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as e:
        raise ImportError(
            "states go to disk through tensorstore, which is not installed: "
            'pip install "optax-offload[disk]"'
        ) from e
    return tensorstore


def _manifest(directory: Path) -> dict[str, Any]:
    file = directory / _MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"{directory} holds no complete state: there is no {file}"
        ) from e
    try:
        table = json.loads(text)
        if table.pop("sha256") == _hash(table):
            return table
    except (ValueError, AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"{file} is damaged: its hash is not that of what it says")


def _hash(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _states(directory: Path) -> list[Path]:
    return [p for p in directory.iterdir() if _STATE.fullmatch(p.name)]


def _locked(file: Path) -> int | None:
    """Opens a file and locks it, for as long as it is open; None if it is locked."""
    import fcntl  # Not on every platform that JAX runs on.

    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # Just removed by who had it.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _in_use(state: Path) -> bool:
    """Whether a tree of this process, or of another that lives, refers to a state."""
    for file in state.glob("lock-*"):
        descriptor = _locked(file)
        if descriptor is None:
            return True
        os.close(descriptor)
    return False


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _agreed_name() -> str:
    """A name that nobody has had, the same in all processes."""
    name = secrets.token_bytes(8)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        parts = np.frombuffer(name, np.uint8)
        name = bytes(np.asarray(multihost_utils.broadcast_one_to_all(parts)))
    return f"state-{name.hex()}"


def _everywhere(fine: bool) -> bool:
    """Waits for all processes, and says whether all are fine."""
    if jax.process_count() == 1:
        return fine
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))
