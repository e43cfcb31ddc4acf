"""The checksum of each chunk of a leaf, as its file ends in it.

A chunk whose checksum is right may still be one of another leaf, or of an older state.
So the manifest has the checksums of all chunks, and each is compared on reading.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from optax_offload._states.manifest import CHECKSUM_BYTES, Entry

Index = Sequence[slice]


class Checksums:
    """The checksums of a leaf's chunks, as far as they are known.

    Args:
      leaf: The directory of the leaf's files.
      entry: The entry of the leaf. What it says of checksums is known.
    """

    def __init__(self, leaf: Path, entry: Entry):
        """Reads no file."""
        self._leaf, self._entry = leaf, entry
        self._counts = entry.chunk_counts
        self._known: dict[int, str] = {}
        self.add(entry.checksums or "")

    @property
    def size_bytes(self) -> int:
        """The bytes of the checksums of all chunks."""
        return math.prod(self._counts) * CHECKSUM_BYTES

    def add(self, text: str) -> None:
        """Adds all that a manifest says."""
        starts = range(0, len(text), digits := 2 * CHECKSUM_BYTES)
        self._known |= {
            number: text[start : start + digits] for number, start in enumerate(starts)
        }

    def note(self, index: Index) -> None:
        """Reads the checksums of a part that was just written."""
        for number, place in self._chunks(index):
            self._known[number] = self._read(place)

    def text(self) -> str:
        """The checksums of all chunks, for a manifest."""
        return "".join(
            # What is not known here another process wrote.
            self._known.get(number) or self._read(place)
            for number, place in self._chunks(self._everything())
        )

    def check(self, index: Index | None = None) -> None:
        """Compares the files of a part, or of all, with what was written.

        Raises:
          OSError: A file is missing or cannot be read.
          ValueError: A file is not the one that was written.
        """
        for number, place in self._chunks(index or self._everything()):
            found = self._read(place)
            if self._known.get(number, found) != found:
                raise ValueError(
                    f"{self._file(place)} is whole, but not what was written there: it "
                    "is a part of another leaf, or of an older state"
                )

    def _everything(self) -> Index:
        return [slice(0, length) for length in self._entry.shape]

    def _chunks(self, index: Index) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The number of each chunk in a part, in row-major order, and its place."""
        axes = []
        for part, step, length in zip(
            index, self._entry.chunk, self._entry.shape, strict=True
        ):
            start, stop, _ = part.indices(length)
            axes.append(range(start // step, -(-stop // step)) if stop > start else ())
        for place in itertools.product(*axes):
            number = 0
            for position, count in zip(place, self._counts, strict=True):
                number = number * count + position
            yield number, place

    def _file(self, place: tuple[int, ...]) -> str:
        # The last axis is that of a number's bytes.
        return f"{self._leaf}/{'.'.join(map(str, ('c', *place, 0)))}"

    def _read(self, place: tuple[int, ...]) -> str:
        """The last bytes of a chunk's file, without a buffer for the others."""
        file = os.open(self._file(place), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.lseek(file, -CHECKSUM_BYTES, os.SEEK_END)
            return os.read(file, CHECKSUM_BYTES).hex()
        finally:
            os.close(file)
