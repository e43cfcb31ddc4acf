"""Input and output of `optax-offload doctor`."""

from __future__ import annotations

import pathlib

from rich.console import Console
from rich.text import Text

from optax_offload._host import link
from optax_offload._machine import Diagnosis, Here, Saved, diagnose, look, look_at
from optax_offload.cli.errors import check_can_write
from optax_offload.cli.text import say

_STYLES = {
    "good": "green",
    "note": "blue",
    "fix": "yellow",
    "stop": "bold red",
    "unseen": "dim",
}


# The exit code where offload gains nothing, or does not work.
NO_GAIN = 5


def diagnosis_of(
    machine: pathlib.Path | None,
    save: pathlib.Path | None,
    *,
    directory: str | None,
    measure_link: bool,
) -> Diagnosis:
    """Diagnoses this machine, or one that was saved.

    Args:
      machine: A file that ``--save`` wrote; None for this machine.
      save: The file to write the texts of this machine to; None writes none.
      directory: A directory of this machine to measure; None for none.
      measure_link: Whether the link of this machine is measured.

    Raises:
      ValueError: The file describes no machine, or the other cannot be made.
      OSError: A file cannot be read or written.
    """
    if machine is not None:
        if save is not None:
            raise ValueError(
                "give either --machine, which reads a file, or --save, which writes one"
            )
        if directory is not None:
            raise ValueError(
                "give either --machine, or --directory: a file has the directory that "
                "was given when it was saved"
            )
        return diagnose(Saved(machine.read_text(errors="replace")))
    if save is not None:
        check_can_write("--save", save, "machine.txt")
    here = Here()
    measured = link.measure_link if measure_link else None
    here.seen["jax"] = look(here, measured).as_json()
    if directory is not None:
        here.seen["directory"] = look_at(directory).as_json()
    found = diagnose(here)
    if save is not None:
        save.write_text(here.saved())
    return found


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    """Prints each finding: what was seen, what it means, what to do, its source."""
    for finding in found.findings:
        title = Text.assemble(
            (f"{finding.level:>6}", _STYLES[finding.level]),
            "  ",
            (finding.topic, "bold"),
        )
        console.print(title, soft_wrap=True)
        say(console, finding.seen, mark=" " * 8)
        say(console, finding.means, mark=" " * 8)
        for line in finding.do:
            # A line to paste stays one line.
            console.print(Text(f"          $ {line}"), soft_wrap=True)
        if finding.sources:
            say(console, f"({'; '.join(finding.sources)})", "dim", mark=" " * 8)
    if found.offload_helps and found.unseen:
        say(
            console,
            "no accelerator here, so nothing is said of offloading: plan for another "
            "machine with optax-offload fit --target",
        )
    elif found.offload_helps:
        say(console, "no problems found: offloading helps on this machine")
    else:
        topics = ", ".join(x.topic for x in found.findings if x.level == "stop")
        say(console, f"offloading gains nothing here, or doesn't work: see {topics}")
