"""The leaves of a tree: their paths, and how messages name them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import jax


def path_string(keys: Sequence[Any]) -> str:
    """The path of a leaf as rules see it, such as ``0/mu/decoder/layers/kernel``.

    Each key is its own text. Two leaves can have the same path, as in
    ``{"a/b": x, "a": {"b": y}}``, and a path can hold a newline.
    """
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


# An encoded leaf is a node of these.
ENCODED_PARTS = ("codes", "scales", "step")


def encoded_leaf(path: str) -> str | None:
    """The path of the leaf that this may be an encoded part of, if it can be one."""
    leaf, _, name = path.rpartition("/")
    return leaf if leaf and name in ENCODED_PARTS else None


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_string(keys), leaf) for keys, leaf in flat]


def listed(paths: Sequence[str], most: int = 5) -> str:
    """Names leaves in a message: the first ``most``, and how many more there are."""
    rest = len(paths) - most
    shown = ", ".join(map(repr, paths[:most]))
    return shown + (f" and {rest} more" if rest > 0 else "")


def no_match_message(pattern: str, paths: list[str]) -> str:
    """Says that a pattern matches none of the paths, and names the nearest."""
    return f"pattern {pattern!r} matches no leaf. {nearest(pattern, paths)}"


def nearest(pattern: str, paths: list[str], most: int = 5) -> str:
    """Names the ``most`` paths that look most like what a pattern was meant to match.

    A path is near if the words of the pattern are like words of the path.
    """
    if not paths:
        return "The tree has no leaves"
    words = re.findall(r"\w+", re.sub(r"\\.", " ", pattern))

    def likeness(path: str) -> float:
        parts = re.findall(r"\w+", path)
        return sum(
            max(
                (difflib.SequenceMatcher(None, word, p).ratio() for p in parts),
                default=0.0,
            )
            for word in words
        )

    ranked = sorted(dict.fromkeys(paths), key=lambda p: (-likeness(p), p))
    shown = ", ".join(map(repr, ranked[:most]))
    rest = len(ranked) - most
    return f"Nearest paths: {shown}" + (f" ({rest} more)" if rest > 0 else "")
