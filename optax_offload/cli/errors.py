"""Errors of the command: files that cannot be written, and any error as one line."""

from __future__ import annotations

import os
import pathlib
import sysconfig
import traceback

# The package itself, and what is installed: a user's mistake is in neither.
_PACKAGE = pathlib.Path(__file__).parent.parent
_INSTALLED = tuple(
    pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")
)
# What the library and the command raise on purpose, with messages that say all.
_SAYS_ALL = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def check_can_write(option: str, path: pathlib.Path, name: str) -> None:
    """Raises a ValueError for a file that is a directory, or cannot be made.

    Args:
      option: The option that names the file.
      path: The file.
      name: The name of such a file, for an example.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(
            f"{option} {path}: the directory {folder} does not exist. Make it first: "
            f"mkdir -p {folder}"
        )
    if path.is_dir():
        raise ValueError(
            f"{option} {path} is a directory; name a file in it, such as {path / name}"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(
            f"{option} {path}: you may not write this file. Name another, or change "
            f"the permissions of {folder}"
        )


def error_line(error: Exception) -> str:
    """The text to print for an error instead of its traceback.

    An error of the library is its message. One that comes from the user's files, such
    as a step factory that raises, is named with its type and its place in them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if frames and isinstance(error, _SAYS_ALL) and _is_ours(frames[-1].filename):
        return str(error)
    theirs = [f for f in frames if _is_users(f.filename)]
    name = type(error).__name__
    first_line = str(error).strip().partition("\n")[0]
    named = f"{name}: {first_line}" if first_line else name
    if theirs:
        file = pathlib.Path(theirs[-1].filename)
        if file.is_relative_to(pathlib.Path.cwd()):
            file = file.relative_to(pathlib.Path.cwd())
        return f"{file}, line {theirs[-1].lineno}: {named}"
    return str(error) if isinstance(error, _SAYS_ALL) else named


def _is_ours(file: str) -> bool:
    return pathlib.Path(file).is_relative_to(_PACKAGE)


def _is_users(file: str) -> bool:
    path = pathlib.Path(file)
    inside = (_PACKAGE, *_INSTALLED)
    # Frozen modules and what is executed from text have no file.
    return path.exists() and not any(path.is_relative_to(x) for x in inside)
