"""The leaves of a tree: their paths, and how messages name them."""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from optax_offload._ground.units import leaves_text

KeyPath = tuple[Any, ...]

# Classes of frameworks that wrap one value, by module and name. A tree holds one only
# where its framework was imported, so they are looked up among the modules there are.
_LINEN_BOX = ("flax.core.meta", "AxisMetadata")
NNX_VARIABLE = ("flax.nnx.variablelib", "Variable")
NNX_STATE = ("flax.nnx.statelib", "State")
_HALIAX_ARRAY = ("haliax.core", "NamedArray")


def classes(*names: tuple[str, str]) -> tuple[type, ...]:
    """The classes of these names, of modules that were imported."""
    found = (getattr(sys.modules.get(m), name, None) for m, name in names)
    return tuple(cls for cls in found if isinstance(cls, type))


def is_linen_box(x: Any) -> bool:
    """Returns whether a node is a Linen box, as ``nn.LogicallyPartitioned``."""
    return isinstance(x, classes(_LINEN_BOX))


def is_nnx_variable(x: Any) -> bool:
    """Returns whether a node is a variable of Flax NNX, such as ``nnx.Param``."""
    return isinstance(x, classes(NNX_VARIABLE))


def is_of_nnx(x: Any) -> bool:
    """Returns whether a node is of Flax NNX: a variable, or a state of arrays alone."""
    return isinstance(x, classes(NNX_VARIABLE, NNX_STATE))


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """As `jax.tree_util.tree_flatten_with_path`, without the keys of boxes.

    A box holds one value and says something of it, as ``nnx.Param``,
    ``nn.Partitioned`` and haliax's ``NamedArray`` do. Libraries put values into boxes
    and take them out on the way: `flax.nnx.Optimizer` gives an optimizer boxes in
    ``init`` and arrays in ``update``. So the key of the value in its box is no part of
    a path.
    """
    boxes = classes(_LINEN_BOX, NNX_VARIABLE, _HALIAX_ARRAY)
    if not boxes:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf)

    def asked(x: Any) -> bool:
        return is_leaf is not None and is_leaf(x)

    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, lambda x: isinstance(x, boxes) or asked(x)
    )
    flat: list[tuple[KeyPath, Any]] = []
    for keys, node in nodes:
        if not isinstance(node, boxes) or asked(node):
            flat.append((keys, node))
            continue
        inside, _ = jax.tree_util.tree_flatten_with_path(
            node, lambda x, node=node: x is not node
        )
        if inside and inside[0][1] is node:  # A box that JAX takes for a leaf.
            flat.append((keys, node))
            continue
        for key, child in inside:
            above = keys if len(inside) == 1 else (*keys, *key)
            below, _ = flatten_with_path(child, is_leaf)
            flat += [((*above, *k), x) for k, x in below]
    return flat, jax.tree.structure(tree, is_leaf)


def map_with_path(
    fn: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """As `jax.tree_util.tree_map_with_path`, without the keys of boxes."""
    flat, structure = flatten_with_path(tree, is_leaf)
    others = [structure.flatten_up_to(other) for other in rest]
    made = [fn(keys, x, *xs) for (keys, x), *xs in zip(flat, *others, strict=True)]
    return jax.tree.unflatten(structure, made)


def path_string(keys: Sequence[Any]) -> str:
    """The path of a leaf as rules see it, such as ``0/mu/decoder/layers/kernel``.

    Each key is its own text. Two leaves can have the same path, as in
    ``{"a/b": x, "a": {"b": y}}``, and a path can hold a newline.
    """
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def tails(path: str) -> list[str]:
    """The ends of a path, the whole of it first and the empty one last."""
    parts = path.split("/") if path else []
    return ["/".join(parts[i:]) for i in range(len(parts) + 1)]


# An encoded leaf is a node of codes, whose name begins so and ends with their form, and
# of some of the others.
CODES = "codes_"
ENCODED_PARTS = ("scales", "tops", "step")


def encoded_leaf(path: str) -> str | None:
    """The path of the leaf that this may be an encoded part of, if it can be one."""
    leaf, _, name = path.rpartition("/")
    is_part = name in ENCODED_PARTS or name.startswith(CODES)
    return leaf if leaf and is_part else None


def matches(regex: re.Pattern[str], path: str) -> bool:
    """Returns whether a pattern matches the path of a leaf, or what it is a part of."""
    leaf = encoded_leaf(path)
    return bool(regex.fullmatch(path) or (leaf and regex.fullmatch(leaf)))


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path."""
    flat, _ = flatten_with_path(tree)
    return [(path_string(keys), leaf) for keys, leaf in flat]


def listed(paths: Sequence[str], most: int = 5) -> str:
    """Names leaves in a message: the first ``most``, and how many more there are."""
    rest = len(paths) - most
    shown = ", ".join(map(repr, paths[:most]))
    return shown + (f" and {rest} more" if rest > 0 else "")


def no_match_message(pattern: re.Pattern[str], paths: list[str]) -> str:
    """Says that a pattern matches none of the paths, and what to write instead."""
    return (
        f"pattern {literal(pattern.pattern)} matches no leaf. {remedy(pattern, paths)}"
    )


def nothing_under_message(under: str, paths: list[str]) -> str:
    """Says that no path begins with another, and names the nearest."""
    return f"under={under!r}: no leaf is there. {nearest(under, paths)}"


def under_no_rules_message(under: str) -> str:
    """Says that a path is given without the rules whose paths begin there."""
    return (
        f"under={under!r} says where the paths of rules begin, and there are no rules: "
        "give them too"
    )


def beginning(pattern: re.Pattern[str], paths: Iterable[str]) -> str:
    r"""The path below which a pattern matches the most leaves; "" if below none.

    Of a pattern that begins with a position in a chain, as those of state do. Others
    lack that.

    Example:
      >>> pattern = re.compile(r"\d+/mu/.*")
      >>> beginning(pattern, ["state/1/0/mu/w", "state/1/0/nu/w", "step"])
      'state/1'
    """
    found: Counter[str] = Counter()
    for path in paths if re.match(r"\\d|\d", pattern.pattern) else ():
        names = path.split("/")
        for at in range(1, len(names)):
            if pattern.fullmatch("/".join(names[at:])):
                found["/".join(names[:at])] += 1
    return max(found, default="", key=lambda path: (found[path], -len(path)))


# A message names no more paths than these that are near a pattern.
_MOST_NEAR = 5
# What people leave out of a pattern, or have in it from where boxes were in paths.
_BOX_KEYS = re.compile(r"/(value|array)$")


def remedy(pattern: re.Pattern[str], paths: list[str]) -> str:
    """Suggests patterns instead of one that matches none of the paths."""
    regex = pattern.pattern
    unboxed = _BOX_KEYS.sub("", regex)
    for core in dict.fromkeys((regex, unboxed, _respelled(regex, paths))):
        for begin, end in (("", ""), (".*/", ""), ("", "/.*"), (".*/", "/.*")):
            apart = _has_alternatives(core) and (begin or end)
            whole = f"(?:{core})" if apart else core
            proposed = begin + whole + end
            count = _count_matches(proposed, pattern.flags, paths)
            if count:
                why = ""
                if core == unboxed != regex:
                    why = (
                        "The box of a framework, such as nnx.Variable, is not part of "
                        "a path. "
                    )
                return (
                    f"{why}Write {literal(proposed)}, which matches "
                    f"{leaves_text(count)}. {nearest(regex, paths)}"
                )
    return nearest(regex, paths)


def literal(regex: str) -> str:
    """A regex as Python writes it, to be pasted: backslashes are not doubled."""
    plain = "'" not in regex and "\\" in regex and regex.isprintable()
    return f"r'{regex}'" if plain else repr(regex)


def _has_alternatives(regex: str) -> bool:
    """Whether a ``|`` is outside of all groups."""
    plain = re.sub(r"\\.|\[[^\]]*\]", "", regex)
    while plain != (plain := re.sub(r"\([^()]*\)", "", plain)):
        pass
    return "|" in plain


def _respelled(regex: str, paths: list[str]) -> str:
    """The regex with words that are in no path made those that are most like them.

    One without a number becomes all that differ in theirs: ``layers`` those of each
    layer, as Linen names them.
    """
    known = {word for path in paths for word in re.findall(r"\w+", path)}

    def like(word: re.Match[str]) -> str:
        near = difflib.get_close_matches(word[0], known, 1, 0.7)
        if word[0] in known or not near:
            return word[0]
        numbered = re.sub(r"\d+", r"\\d+", near[0])
        alike = [x for x in known if re.fullmatch(numbered, x)]
        means_all = len(alike) > 1 and not re.search(r"\d", word[0])
        return numbered if means_all else near[0]

    return re.sub(r"(?<!\\)\b[^\W\d]\w*", like, regex)


def _count_matches(regex: str, flags: int, paths: list[str]) -> int:
    try:
        compiled = re.compile(regex, flags)
    except re.error:  # Such as flags that are no longer at its beginning.
        return 0
    found = {
        leaf
        for path in paths
        if compiled.fullmatch(leaf := encoded_leaf(path) or path)
        or compiled.fullmatch(path)
    }
    return len(found)


def nearest(pattern: str, paths: list[str]) -> str:
    """Names the paths that look most like what a pattern was meant to match.

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
    # Of layers in a list the first is enough; the position in a chain says more.
    alike = {re.sub(r"(?<=[/_])\d+", "", p): p for p in reversed(ranked)}
    near = [p for p in ranked if p in {*alike.values()}][:_MOST_NEAR]
    shown, rest = ", ".join(map(repr, near)), len(ranked) - len(near)
    return f"Nearest paths: {shown}" + (f" ({rest} more)" if rest > 0 else "")
