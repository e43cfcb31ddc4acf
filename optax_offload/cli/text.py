"""Text that terminals of any width break between words only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

# Longer lines are hard to read, however wide a terminal is.
_WIDEST = 80


class Breakable:
    """A table's cell that is broken after slashes, bars and spaces only.

    Paths and regexes have no spaces, so rich would break them anywhere, in the middle
    of a name or a number.
    """

    def __init__(self, text: str):
        """Takes the text as it is: it may look like markup.

        Args:
          text: The text of the cell.
        """
        self._pieces = re.findall(r"[^/| ]*[/| ]?", text)[:-1]

    def lines(self, width: int) -> Iterator[str]:
        """The lines of the text, of so many columns where its pieces allow it."""
        line = ""
        for piece in self._pieces:
            if line and len(line) + len(piece.rstrip()) > width:
                yield line.rstrip()
                line = ""
            line += piece
        yield line.rstrip()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Draws it, for rich."""
        yield Text("\n".join(self.lines(options.max_width)), overflow="fold")

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        """The least and the most columns that it takes, for rich."""
        longest = max((len(piece.rstrip()) for piece in self._pieces), default=0)
        whole = sum(map(len, self._pieces))
        return Measurement(longest, whole).with_maximum(options.max_width)


def say(console: Console, line: str, style: str = "", *, mark: str = "") -> None:
    """Prints a line; a terminal gets it wrapped between words.

    Args:
      console: The console. A pipe gets the line in one piece, and a terminal at most
        80 columns.
      line: The line, in which nothing is markup.
      style: The style that all of it has.
      mark: The text before the line. Spaces take its place before lines after that.
    """
    if console.is_terminal:
        line = textwrap.fill(
            line,
            max(min(console.width, _WIDEST) - len(mark), 20),
            break_long_words=False,
            break_on_hyphens=False,
        )
    line = mark + line.replace("\n", "\n" + " " * len(mark))
    console.print(Text(line, style), highlight=False, soft_wrap=True)


def paste(console: Console, line: str) -> None:
    """Prints a line to paste, which no terminal breaks."""
    console.print(Text(f"  {line}"), highlight=False, soft_wrap=True)
