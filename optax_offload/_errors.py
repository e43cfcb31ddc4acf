"""What the library raises and warns of, beside Python's own errors."""

from __future__ import annotations

from typing import Any


class OffloadWarning(UserWarning):
    """Something asked for was not, or not fully, done."""


class OffloadError(RuntimeError):
    """A transfer of a state stopped half way. Its message says what is lost, if any is.

    Args:
      message: What stopped the transfer, and what to do.
      tree: The whole tree as it is now.

    Attributes:
      tree: The whole tree as it is now, with the leaves that were transferred where
        they were to go, and all others where they were.
    """

    def __init__(self, message: str, tree: Any):
        """Keeps the tree beside the message."""
        super().__init__(message)
        self.tree = tree


class MemoryKindError(RuntimeError):
    """State is not where it was planned to be."""
