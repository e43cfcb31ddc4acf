"""What the commands share: flags, running, and the JSON that they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from benchmarks.common.steps import MODES
from benchmarks.common.workloads import WORKLOADS

# Flags that are defined here are those of the program that asks for them, in `--help`.
flags.disclaim_key_flags()
SHARED = {
    "targets": "Chips to compile for.",
    "workloads": f"Of {', '.join(WORKLOADS)}.",
    "modes": f"Of {', '.join(MODES)}.",
}


def define_shared(**defaults: Sequence[str]) -> None:
    """Defines flags that several commands have, with their defaults here."""
    for name, default in defaults.items():
        flags.DEFINE_list(name, list(default), SHARED[name])


def run(main: Callable[[], None], out: str | None = None) -> None:
    """Runs a command.

    Args:
      main: All of it.
      out: The default of its flag `--out`; None if it writes no JSON.
    """

    def checked(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"not a flag: {' '.join(argv[1:])}")
        main()

    if out is not None:
        flags.DEFINE_string("out", out, "Where the .json goes.")
    app.run(checked)


def write(**found: Any) -> None:
    """Writes figures to the `--out` of a command, with the version of JAX."""
    path = Path(flags.FLAGS.out).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"jax": jax.__version__, **found}, indent=1)
    path.write_text(text + "\n")
    print(f"also in {path}")


def print_header(texts: Sequence[str], figures: Sequence[str]) -> None:
    """Prints the names of a table's columns."""
    print("".join(f"{x:19s}" for x in texts), *(f"{x:>10s}" for x in figures))


def print_row(
    texts: Sequence[str], figures: Sequence[float | None], digits: int = 2
) -> None:
    """Prints a line of a table, with a dash for None."""
    shown = ("-" if x is None else f"{x:.{digits}f}" for x in figures)
    print("".join(f"{x:19s}" for x in texts), *(f"{x:>10s}" for x in shown), flush=True)
