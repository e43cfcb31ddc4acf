"""What was measured: a line for each case as it ends, and one JSON of all parts."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
# What is not run again.
ENDED = ("done", "skipped")


def now() -> str:
    """The time, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def append(path: Path, entry: Entry) -> None:
    """Writes a line, and has it on the disk before it returns."""
    with path.open("a") as file:
        # A kill may have cut off the line before; the first character ends it.
        file.write("\n" + json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def entries(path: Path, after: int = 0) -> dict[str, Entry]:
    """The last line of each case. A line that a kill cut off is none.

    Args:
      path: The file of lines, which need not exist.
      after: So many bytes of it are passed over.
    """
    found: dict[str, Entry] = {}
    if not path.exists():
        return found
    for line in path.read_bytes()[after:].decode().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[entry["case"]] = entry
    return found


def done(cases: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """The figures of the cases that have some."""
    return {name: e["figures"] for name, e in cases.items() if e.get("figures")}


def write(path: Path, text: str) -> None:
    """Replaces a file, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def slug(text: str) -> str:
    """As a part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


class Record:
    """The figures of one device and one commit.

    Lines are in a folder that is no part of the repository; the JSON is made of them.
    """

    def __init__(self, folder: Path, path: Path, head: dict[str, Any]):
        self.head = head
        self.folder = folder
        self.path = path
        self.folder.mkdir(parents=True, exist_ok=True)

    def lines(self, part: str) -> Path:
        """The file that a part's lines go to."""
        return self.folder / f"{part}.jsonl"

    def missing(self, part: str, cases: Iterable[str]) -> list[str]:
        """The cases of a part that did not end, or failed."""
        known = entries(self.lines(part))
        return [x for x in cases if known.get(x, {}).get("outcome") not in ENDED]

    def save(self, parts: Iterable[str]) -> None:
        """Writes the JSON."""
        found = {part: entries(self.lines(part)) for part in parts}
        table = {**self.head, "parts": {k: v for k, v in found.items() if v}}
        write(self.path, json.dumps(table, indent=1) + "\n")
