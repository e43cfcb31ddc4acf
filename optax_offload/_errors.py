"""What the library raises and warns of, beside Python's own errors."""

from __future__ import annotations

from typing import Any


class OffloadWarning(UserWarning):
    """Something asked for was not, or not fully, done."""


class OffloadError(RuntimeError):
    """A move of a state stopped half way. Nothing is lost.

    Attributes:
      tree: the whole tree as it is now, with what was moved and what was not.
    """

    def __init__(self, message: str, tree: Any):
        super().__init__(message)
        self.tree = tree


class MemoryKindError(RuntimeError):
    """State is not where it was planned to be."""
