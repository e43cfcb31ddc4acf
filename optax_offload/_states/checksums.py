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
        for number, file in self._chunks(index):
            self._known[number] = _checksum(file)

    def text(self) -> str:
        """The checksums of all chunks, for a manifest."""
        for number, file in self._chunks(self._everything()):
            if number not in self._known:  # Another process wrote it.
                self._known[number] = _checksum(file)
        return "".join(self._known[number] for number in sorted(self._known))

    def check(self, index: Index | None = None) -> None:
        """Compares the files of a part, or of all, with what was written.

        Raises:
          OSError: A file is missing or cannot be read.
          ValueError: A file is not the one that was written.
        """
        for number, file in self._chunks(index or self._everything()):
            found = _checksum(file)
            if self._known.get(number, found) != found:
                raise ValueError(
                    f"{file} is whole, but not what was written there: it is a part of "
                    "another leaf, or of an older state"
                )

    def _everything(self) -> Index:
        return [slice(0, length) for length in self._entry.shape]

    def _chunks(self, index: Index) -> Iterator[tuple[int, Path]]:
        """The number of each chunk in a part, in row-major order, and its file."""
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
            # The last axis is that of a number's bytes.
            yield number, self._leaf / ".".join(map(str, ("c", *place, 0)))


def _checksum(file: Path) -> str:
    with open(file, "rb") as f:
        f.seek(-CHECKSUM_BYTES, os.SEEK_END)
        return f.read().hex()
