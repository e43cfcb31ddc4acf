"""A plan as a rule file that `load_config` reads, with a comment on each rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from optax_offload import _rules
from optax_offload._plan.patterns import LeafPattern
from optax_offload._units import size_text


def rule_file_text(
    config: _rules.OffloadConfig,
    moved: Sequence[LeafPattern],
    kept: Sequence[LeafPattern],
    summary: Sequence[str],
) -> str:
    """The file.

    Args:
      config: The rules: those given, of what is moved, of what is encoded where it is.
      moved: What the rules after those given move, in their order.
      kept: What the last rules encode and do not move.
      summary: Lines about the whole, for the head of the file.
    """
    head = ["Rules for optax_offload.offload, found by `optax-offload fit`:", *summary]
    lines = [_commented(line) for line in head]
    if config.window_bytes is not None:
        lines += ["", f"window_bytes = {config.window_bytes}"]
    given = len(config.rules) - len(moved) - len(kept)
    comments = [["Given."] if moved or len(config.rules) > 1 else []] * given
    if not moved and config.rules == (_rules.Rule(".*", "device"),):
        comments = [["Everything fits: all state stays on the device."]]
    comments += [_comment(pattern) for pattern in moved]
    comments += [
        [f"Encodes {_leaves(p)}: {size_text(p.nbytes_per_device)} on each device."]
        for p in kept
    ]
    for rule, comment in zip(config.rules, comments, strict=True):
        lines += ["", *map(_commented, comment), "[[rules]]", *_keys(rule)]
    return "\n".join(lines) + "\n"


def _commented(line: str) -> str:
    # TOML allows no control characters, not even there.
    return "# " + "".join(c if c.isprintable() else "?" for c in line)


def _comment(pattern: LeafPattern) -> list[str]:
    why = {
        (True, True): "stacked layers, updated in slices: all of it leaves the peak",
        (True, False): "updated in slices: all of it leaves the peak",
        (False, True): "stacked layers, but sharded along every axis: updated whole",
        (False, False): "updated whole: the largest leaf comes back for that",
    }[pattern.slice_axis is not None, pattern.stacked]
    size = size_text(pattern.nbytes_per_device)
    return [
        f"Moves {_leaves(pattern)}: {size} off each device.",
        f"Why: {why}.",
    ]


def _leaves(pattern: LeafPattern) -> str:
    count = len(pattern.leaves)
    which = f"{count} leaves, the first" if count > 1 else "the leaf"
    return f"{which} {pattern.leaves[0].path}"


def _keys(rule: _rules.Rule) -> list[str]:
    default = _rules.Rule(rule.pattern)
    names = ("memory_kind", "min_bytes", "slice_axis", "optional", "codec", "signed")
    given = {
        n: getattr(rule, n) for n in names if getattr(rule, n) != getattr(default, n)
    }
    return [f"pattern = {_pattern(rule.regex)}"] + [
        f"{name} = {_value(value)}" for name, value in given.items()
    ]


def _pattern(regex: str) -> str:
    # A literal string needs no escapes, but cannot hold these.
    plain = regex.isprintable() and "'" not in regex
    if plain:
        return f"'{regex}'"
    # JSON's escapes are TOML's, but for one character.
    return json.dumps(regex, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    return json.dumps("none" if value is None else value)
