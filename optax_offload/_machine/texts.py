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
    """The texts of a machine."""

    @abc.abstractmethod
    def read(self, path: str) -> str:
        """The text of a file, by its path below the root; "" if there is none."""

    @abc.abstractmethod
    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""

    @abc.abstractmethod
    def output(self, command: str) -> str:
        """Returns the output of a command; "" if it does not exist, or fails."""

    @abc.abstractmethod
    def environment(self) -> Mapping[str, str]:
        """The variables of the process that JAX and its plugins read."""

    @abc.abstractmethod
    def jax(self) -> str:
        """Returns what JAX says of the machine, as JSON; "" where it was not asked."""

    @abc.abstractmethod
    def directory(self) -> str:
        """The directory that was measured, as JSON; "" where none was given."""


class Here(Texts):
    """This machine.

    Attributes:
      seen: The texts that were read so far, by name.
    """

    def __init__(self, root: Path = Path("/")):
        """Reads nothing yet.

        Args:
          root: The root of its file system.
        """
        self._root = root
        self.seen: dict[str, str] = {}

    def read(self, path: str) -> str:
        """The text of a file, by its path below the root; "" if there is none."""
        try:
            text = (self._root / path).read_text(errors="replace")
        except OSError:
            return ""
        if path == "proc/cpuinfo":
            text = text.partition("\n\n")[0]  # The first of many alike.
        self.seen[path] = text.replace("\0", "")
        return self.seen[path]

    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""
        found = sorted(self._root.glob(pattern))
        return [path.relative_to(self._root).as_posix() for path in found]

    def output(self, command: str) -> str:
        """Returns the output of a command; "" if it does not exist, or fails."""
        words = command.split()
        if shutil.which(words[0]) is None:
            return ""
        # On Linux there is another sysctl, which knows no such names.
        if words[0] == "sysctl" and platform.system() != "Darwin":
            return ""
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_COMMAND_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode != 0:
            return ""
        self.seen[f"$ {command}"] = done.stdout
        return done.stdout

    def environment(self) -> Mapping[str, str]:
        """The variables of the process that JAX and its plugins read."""
        found = {k: v for k, v in os.environ.items() if _VARIABLES.fullmatch(k)}
        self.seen["environment"] = "".join(f"{k}={v}\n" for k, v in found.items())
        return found

    def jax(self) -> str:
        """Returns what JAX says of the machine, as JSON; "" where it was not asked."""
        return self.seen.get("jax", "")

    def directory(self) -> str:
        """The directory that was measured, as JSON; "" where none was given."""
        return self.seen.get("directory", "")

    def add_directory(self, text: str) -> None:
        """Keeps what was measured of a directory, as JSON."""
        self.seen["directory"] = text

    def add_jax(self, text: str) -> None:
        """Keeps what JAX said, as JSON."""
        self.seen["jax"] = text

    def saved(self) -> str:
        """Returns all that was read so far as one text, for `Saved`."""
        return "".join(
            f"== {name}\n{text.rstrip()}\n" for name, text in self.seen.items()
        )


class Saved(Texts):
    """A saved machine, which has only what its text says."""

    def __init__(self, text: str):
        """Takes the text apart.

        Args:
          text: Sections that begin with a line ``== name``. A name is a path below the
            root, ``$ command``, ``environment``, ``jax`` or ``directory``.

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

    def read(self, path: str) -> str:
        """The text of a file, by its path below the root; "" if there is none."""
        return self._texts.get(path, "")

    def paths(self, pattern: str) -> list[str]:
        """The paths that match a pattern in which ``*`` stands for any name."""
        regex = re.compile("[^/]*".join(map(re.escape, pattern.split("*"))))
        return sorted(path for path in self._texts if regex.fullmatch(path))

    def output(self, command: str) -> str:
        """Returns the output of a command; "" if it does not exist, or fails."""
        return self._texts.get(f"$ {command}", "")

    def environment(self) -> Mapping[str, str]:
        """The variables of the process that JAX and its plugins read."""
        lines = self._texts.get("environment", "").splitlines()
        return {k: v for k, equals, v in (x.partition("=") for x in lines) if equals}

    def jax(self) -> str:
        """Returns what JAX says of the machine, as JSON; "" where it was not asked."""
        return self._texts.get("jax", "")

    def directory(self) -> str:
        """The directory that was measured, as JSON; "" where none was given."""
        return self._texts.get("directory", "")
