"""Text for people: bytes in their units, short values."""

from __future__ import annotations

import fractions
import html
import re
from collections.abc import Collection, Sequence
from typing import Any

# The unit of the tables that people read.
MIB = 2**20
# The unit of device memory, as chips are sold with.
GIB = 2**30


def size_text(size_bytes: int) -> str:
    """Bytes for a person to read.

    Args:
      size_bytes: A number of bytes; it may be negative, as differences are.

    Returns:
      The number in the largest unit that it fills, up to TiB, with two decimals.

    Example:
      >>> size_text(16911433728), size_text(512)
      ('15.75 GiB', '512 B')
    """
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{size_bytes} B"
    return f"{size_bytes / 1024**power:.2f} {'KMGT'[power - 1]}iB"


def milliseconds(seconds: float) -> str:
    """A time for a person to read, to three digits at least; short ones in us.

    Example:
      >>> milliseconds(0.25), milliseconds(0.0012345), milliseconds(12.3456)
      ('250 ms', '1.23 ms', '12346 ms')
      >>> milliseconds(0.00032), milliseconds(0.0000012)
      ('320 us', '1.20 us')
    """
    unit = "ms" if seconds >= 1e-3 or not seconds else "us"
    found = seconds * (1e3 if unit == "ms" else 1e6)
    digits = next((n for n, least in enumerate((100, 10)) if found >= least), 2)
    return f"{found:.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time of some seconds for a person to read; one under a second as it is.

    Example:
      >>> seconds_text(104.2), seconds_text(0.25)
      ('104 s', '250 ms')
    """
    return f"{seconds:.0f} s" if seconds >= 1 else milliseconds(seconds)


class Printed:
    """A value whose text is for people: a line at a prompt, and whole where printed."""

    def _headline(self) -> str:
        return str(self).partition("\n")[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}; print it to see all>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_TEXT = "text-align: left; padding: 0 0.5em"
_NUMBER = "text-align: right; padding: 0 0.5em; white-space: nowrap"


def html_table(
    lines: Sequence[Sequence[str]],
    right: Collection[int] = (),
    bold: Collection[int] = (),
) -> str:
    """A table for a notebook, with every cell escaped; a wide one scrolls.

    Args:
      lines: The cells of each line; the first line is the header.
      right: The columns of numbers, which are set to the right.
      bold: The lines to emphasize, of which the first after the header is 0.

    Example:
      >>> html_table([["path", "size"], ["w", "4 B"]], right=[1])  # doctest: +ELLIPSIS
      '<div style="overflow-x: auto"><table><tr><th style="text-align: left; ...
    """

    def line(cells: Sequence[str], tag: str, is_bold: bool) -> str:
        texts = [html.escape(cell) for cell in cells]
        if is_bold:
            texts = [f"<b>{text}</b>" for text in texts]
        return "".join(
            f'<{tag} style="{_NUMBER if i in right else _TEXT}">{text}</{tag}>'
            for i, text in enumerate(texts)
        )

    header, *body = lines
    rows = [
        line(header, "th", False),
        *(line(cells, "td", i in bold) for i, cells in enumerate(body)),
    ]
    inner = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div style="overflow-x: auto"><table>{inner}</table></div>'


def html_paragraph(text: str) -> str:
    """A line of text for a notebook, escaped.

    Example:
      >>> html_paragraph("1 < 2")
      '<p>1 &lt; 2</p>'
    """
    return f"<p>{html.escape(text)}</p>"


def check_bytes(
    name: str, value: Any, least: int, most: int | None = None, also: str = ""
) -> None:
    """Raises unless an argument is a number of bytes.

    Args:
      name: The argument.
      value: What it was given.
      least: The least that it may be, in bytes.
      most: The most; None for no bound.
      also: The end of the message: what else is allowed.

    Raises:
      ValueError: It is no whole number, or out of these bounds.

    Example:
      >>> check_bytes("min_bytes", "1K", 0)
      Traceback (most recent call last):
      ValueError: min_bytes is '1K'; it must be a whole number of bytes, at least 0
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number of bytes, at least "
            f"{least}{also}"
        )


def counted(count: int, noun: str, nbytes: int) -> str:
    """How many of something there are, and of how many bytes."""
    return f"{count} {noun}{'s' * (count != 1)} of {size_text(nbytes)}"


def leaves_text(count: int) -> str:
    """How many leaves there are, for a person to read.

    Example:
      >>> leaves_text(1), leaves_text(2)
      ('1 leaf', '2 leaves')
    """
    return f"{count} {'leaf' if count == 1 else 'leaves'}"


def parse_size(text: str) -> int:
    """The bytes that a person means.

    Args:
      text: A number and its unit: B, K, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti
        (powers of 1024), each with or without a B, in upper or lower case.

    Returns:
      The whole number of bytes; what is less than a byte is dropped.

    Raises:
      ValueError: The text is nothing of the kind.

    Example:
      >>> parse_size("70GiB"), parse_size("24 GB"), parse_size("512B")
      (75161927680, 24000000000, 512)
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write it as 70GiB (2**30 bytes), 24GB (10**9) or "
            "512B"
        )
    number, unit, binary = match.groups()
    if text.strip()[-1].isdigit():
        raise ValueError(
            f"{text!r} has no unit; write {number}GiB (2**30 bytes), {number}GB "
            f"(10**9) or {number}B"
        )
    base = 1024 if binary else 1000
    # A float would round numbers of more than 53 bits.
    exact = fractions.Fraction(number)
    return int(exact * base ** " KMGT".index((unit or " ").upper()))
