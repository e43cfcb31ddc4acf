"""A small mistake, which a test has to find: `mutants.py` makes them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
      file: The file of the package that has it.
      old: The text that is replaced; it is there once.
      new: What it is replaced by.
      tests: The tests that are to find it.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
