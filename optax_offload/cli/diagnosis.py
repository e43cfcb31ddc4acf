"""Input and output of `optax-offload doctor`."""

from __future__ import annotations

import pathlib

from rich.console import Console

from optax_offload import _link
from optax_offload._machine import Diagnosis, Here, Saved, diagnose, look

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
    machine: pathlib.Path | None, save: pathlib.Path | None, *, measure_link: bool
) -> Diagnosis:
    """Diagnoses this machine, or one that was saved.

    Args:
      machine: A file that ``--save`` wrote; None for this machine.
      save: The file to write the texts of this machine to; None writes none.
      measure_link: Whether the link of this machine is measured.

    Raises:
      ValueError: The file describes no machine, or the other cannot be made.
      OSError: A file cannot be read or written.
    """
    if machine is not None:
        if save is not None:
            raise ValueError(
                "--machine is a file that --save wrote: give one of the two"
            )
        return diagnose(Saved(machine.read_text(errors="replace")))
    folder = None if save is None else save.absolute().parent
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"--save {save}: there is no directory {folder}; make it first: "
            f"mkdir -p {folder}"
        )
    here = Here()
    here.add_jax(look(here, _link.measure_link if measure_link else None).as_json())
    found = diagnose(here)
    if save is not None:
        save.write_text(here.saved())
    return found


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    """Prints each finding: what was seen, what it means, what to do, its source."""
    for finding in found.findings:
        style = _STYLES[finding.level]
        _line(console, f"[{style}]{finding.level:>6}[/]  [bold]{finding.topic}[/]")
        _line(console, _plain(f"        {finding.seen}"))
        _line(console, _plain(f"        {finding.means}"))
        for line in finding.do:
            _line(console, _plain(f"          $ {line}"))
        if finding.sources:
            sources = _plain("; ".join(finding.sources))
            _line(console, f"        [dim]({sources})[/]")
    if found.offload_helps:
        _line(console, "nothing was found that speaks against offload here")
    else:
        topics = ", ".join(x.topic for x in found.findings if x.level == "stop")
        _line(console, f"offload gains nothing here, or does not work: see {topics}")


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return text.replace("[", r"\[")


def _line(console: Console, text: str) -> None:
    # A line to paste stays one line.
    console.print(text, highlight=False, soft_wrap=True)
