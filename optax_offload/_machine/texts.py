"""The texts that describe a machine: files, output of commands, variables, JAX.

A machine is texts by name, read where it is or from one file that was saved there, so
that tests know machines that nobody here has.
"""

from __future__ import annotations

import abc
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

# What is kept of the environment.
_VARIABLES = re.compile(r"XLA_\w+|JAX_PLATFORMS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES")
_HEADING = re.compile(r"^== (.+)$", re.MULTILINE)
_COMMAND_SECONDS = 20


class Texts(abc.ABC):
    """The texts of a machine, by name.

    A name is a path below the root, ``$ command``, ``environment`` (the variables that
    JAX and its plugins read), ``jax`` (what JAX says of the machine, as JSON) or
    ``directory`` (what was measured of one, as JSON).
    """

    @abc.abstractmethod
    def read(self, name: str) -> str:
        """The text of a name; "" if there is none."""

    @abc.abstractmethod
    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""

    def output(self, command: str) -> str:
        """Returns the output of a command; "" if it does not exist, or fails."""
        return self.read(f"$ {command}")

    def environment(self) -> Mapping[str, str]:
        """The variables of the process that JAX and its plugins read."""
        lines = self.read("environment").splitlines()
        return {k: v for k, equals, v in (x.partition("=") for x in lines) if equals}


class Here(Texts):
    """This machine.

    Attributes:
      seen: The texts that were read or added so far, by name.
    """

    def __init__(self, root: Path = Path("/")):
        """Reads nothing yet.

        Args:
          root: The root of its file system.
        """
        self._root = root
        self.seen: dict[str, str] = {}

    def read(self, name: str) -> str:
        """The text of a name; "" if there is none."""
        if name in ("jax", "directory"):
            return self.seen.get(name, "")
        if name == "environment":
            found = {k: v for k, v in os.environ.items() if _VARIABLES.fullmatch(k)}
            lines = (f"{k}={' '.join(v.splitlines())}\n" for k, v in found.items())
            text = "".join(lines)
        else:
            command = name.removeprefix("$ ")
            text = _file(self._root / name) if command == name else _output(command)
        if text is None:
            return ""
        if name == "proc/cpuinfo":
            text = text.partition("\n\n")[0]  # The first of many alike.
        self.seen[name] = text.replace("\0", "")
        return self.seen[name]

    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""
        found = sorted(self._root.glob(pattern))
        return [path.relative_to(self._root).as_posix() for path in found]

    def saved(self) -> str:
        """Returns all that was read so far as one text, for `Saved`."""
        return "".join(
            f"== {name}\n{text.rstrip()}\n" for name, text in self.seen.items()
        )


def _file(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _output(command: str) -> str | None:
    """The output of a command; None if it does not exist, or fails."""
    words = command.split()
    # On Linux there is another sysctl, which knows no such names.
    if words[0] == "sysctl" and platform.system() != "Darwin":
        return None
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


class Saved(Texts):
    """A saved machine, which has only what its text says."""

    def __init__(self, text: str):
        """Takes the text apart.

        Args:
          text: Sections that begin with a line ``== name``.

        Raises:
          ValueError: There is no section.
        """
        _, *parts = _HEADING.split(text)
        if not parts:
            raise ValueError(
                "this file describes no machine. `optax-offload doctor --save FILE` "
                "writes one that does; its sections begin with lines such as "
                "'== proc/meminfo'"
            )
        self._texts = {
            name: text.removeprefix("\n")
            for name, text in zip(parts[::2], parts[1::2], strict=True)
        }

    def read(self, name: str) -> str:
        """The text of a name; "" if there is none."""
        return self._texts.get(name, "")

    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""
        regex = re.compile("[^/]*".join(map(re.escape, pattern.split("*"))))
        return sorted(path for path in self._texts if regex.fullmatch(path))
