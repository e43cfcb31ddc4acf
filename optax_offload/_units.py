"""Bytes: their units, read and written."""

from __future__ import annotations

import re

MIB = 2**20
GIB = 2**30


def size_text(size_bytes: int) -> str:
    """Bytes for a person to read, as in `15.75 GiB`."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{size_bytes} B"
    return f"{size_bytes / 1024**power:.2f} {'KMGT'[power - 1]}iB"


def parse_size(text: str) -> int:
    """The bytes of `70GiB`, `24 GB` or `1000000`.

    Raises:
      ValueError: it is nothing of the kind.
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise ValueError(
            f"{text!r} is no size; write it as 70GiB (2**30 bytes), 24GB (10**9) or "
            "bytes"
        )
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index((unit or " ").upper()))
