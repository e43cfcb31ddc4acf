"""Rules in files: TOML, with the names of the arguments as keys."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from optax_offload._places.rules import STATE_CODECS, OffloadConfig, Rule, check_codecs
from optax_offload._places.step_options import Options


def load_config(path: str | os.PathLike[str]) -> OffloadConfig:
    r"""Reads an `OffloadConfig` from a TOML file.

    The file has a ``[[rules]]`` table for each rule of the optimizer's state, with the
    names of `Rule`'s arguments as keys; and, each if it is wanted, ``window_bytes``, a
    ``[[parameters]]`` table for each rule of parameters, and a ``[step]`` table of what
    `jit` is given. ``slice_axis = "none"`` stands for None, which TOML cannot say.

    Args:
      path: The file.

    Returns:
      The configuration. `offload` takes it for its ``rules``, `place` its
      ``parameters``, and `jit` its ``step``.

    Raises:
      OSError: The file cannot be read. The message names it.
      ValueError: The file is not TOML, or a key or value is wrong. The message names
        the file, the key, what was found and what is allowed.

    Example:
      >>> import pathlib, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "adam.toml"
      >>> rules = "[[rules]]\npattern = '.*/(mu|nu)/.*'\n"
      >>> _ = file.write_text("[step]\nresiduals = 'host'\n" + rules)
      >>> config = load_config(file)
      >>> config.rules[0].regex, config.step["residuals"]
      ('.*/(mu|nu)/.*', 'host')
    """
    file = os.fspath(path)
    try:
        with open(file, "rb") as f:
            table = tomllib.load(f)
    except OSError as e:
        raise type(e)(
            f"{file}: {e.strerror}. It must be a rule file, such as `optax-offload fit "
            "--out rules.toml` writes"
        ) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        quotes = ". Write patterns in single quotes, which keep backslashes"
        hint = quotes * ("\\" in str(e))
        raise ValueError(f"{file}: not a TOML file: {e}{hint}") from e
    _check_keys(file, "", table, OffloadConfig)
    parameters = _rules_of(file, "parameters", table.get("parameters", []))
    step = _step(file, table.get("step", {}))
    tables = table.get("rules")
    if not isinstance(tables, list):
        what = "there are no rules" if tables is None else f"rules is {tables!r}"
        raise ValueError(
            f"{file}: {what}; the file needs one [[rules]] table, or more, each with a "
            "pattern. To offload no state, pattern = '.*' and memory_kind = 'device'"
        )
    rules = _rules_of(file, "rules", tables)
    try:
        check_codecs("rules", rules, STATE_CODECS)
        return OffloadConfig(rules, table.get("window_bytes"), parameters, step)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def _rules_of(file: str, name: str, tables: Any) -> list[Rule]:
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ValueError(f"{file}: {name} is {tables!r}; write [[{name}]] tables")
    rules: list[Rule] = []
    for position, entries in enumerate(tables):
        where = f"{name}[{position}]"
        _check_keys(file, f"{where}.", entries, Rule)
        if "pattern" not in entries:
            raise ValueError(f"{file}: {where} has no pattern")
        if entries.get("slice_axis") == "none":
            entries = entries | {"slice_axis": None}
        try:
            rules.append(Rule(**entries))
        except (TypeError, ValueError) as e:
            raise ValueError(f"{file}: {where}.{e}") from e
    return rules


def _step(file: str, table: Any) -> Options:
    if not isinstance(table, dict):
        raise ValueError(f"{file}: step is {table!r}; write a [step] table")
    _check_keys(file, "step.", table, Options)
    try:
        return Options(**table)
    except ValueError as e:
        raise ValueError(f"{file}: step.{e}") from e


def _check_keys(file: str, prefix: str, table: dict[str, Any], cls: type) -> None:
    allowed = [f.name for f in dataclasses.fields(cls) if f.name != "_"]
    unknown = [key for key in table if key not in allowed]
    if unknown:
        raise ValueError(
            f"{file}: unknown key "
            + ", ".join(f"{prefix}{key}" for key in unknown)
            + f"; allowed are {', '.join(allowed)}"
        )


def config_text(
    config: OffloadConfig,
    head: Sequence[str],
    comments: Sequence[Sequence[str]],
    placed: Sequence[str] = ("params",),
    jitting: str = "oo.jit(train_step, **config.step)",
) -> str:
    """The text of a file that `load_config` reads as a configuration.

    Args:
      config: The configuration.
      head: Lines of comment on the whole.
      comments: Lines of comment on each rule of the optimizer's state.
      placed: The names of the trees that rules of parameters are for.
      jitting: The call that jits the step.
    """
    lines = [_commented(line) for line in head]
    if config.window_bytes is not None:
        lines += ["", f"window_bytes = {config.window_bytes}"]
    step = [*_given(config.step, Options())]
    if step:
        comment = f"What the step is jitted with: {jitting}."
        lines += ["", _commented(comment), "[step]", *step]
    for rule, comment in zip(config.rules, comments, strict=True):
        lines += ["", *map(_commented, comment), "[[rules]]", *_rule(rule)]
    for position, rule in enumerate(config.parameters):
        place = f"Parameters: {'; '.join(map(placing, placed))}."
        comment = [] if position else [_commented(place)]
        lines += ["", *comment, "[[parameters]]", *_rule(rule)]
    return "\n".join(lines) + "\n"


def placing(name: str) -> str:
    """The line of a script that places parameters of such a name."""
    return f"{name} = oo.place({name}, config.parameters)"


def _commented(line: str) -> str:
    # TOML allows no control characters, not even there.
    return "# " + "".join(c if c.isprintable() else "?" for c in line)


def _rule(rule: Rule) -> Iterator[str]:
    # A literal string needs no escapes, but cannot hold these.
    if rule.regex.isprintable() and "'" not in rule.regex:
        yield f"pattern = '{rule.regex}'"
    else:
        # JSON's escapes are TOML's, but for one character.
        text = json.dumps(rule.regex, ensure_ascii=False).replace("\x7f", "\\u007f")
        yield f"pattern = {text}"
    yield from _given(rule, Rule(rule.pattern))


def _given(value: Any, default: Any) -> Iterator[str]:
    """The fields that are not what they are by default, as keys of a table."""
    for name in (field.name for field in dataclasses.fields(value)):
        found = getattr(value, name)
        if name != "_" and found != getattr(default, name):
            yield f"{name} = {json.dumps('none' if found is None else found)}"
