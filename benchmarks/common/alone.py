"""Calling a function in a process of its own, which gives back all that it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
# If the host's memory is short, this process is killed, and not its parent.
CODE = """\
import contextlib, importlib, json, pathlib, sys
with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
module, name, options = sys.argv[1:]
function = getattr(importlib.import_module(module), name)
print(json.dumps(function(**json.loads(options))))
"""


def command(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """The command of a process that calls a function, and prints its result.

    Args:
      function: A function of a module; its result goes through JSON.
      options: Its keywords, which do too.
    """
    # What is called by `python -m` would be another module of the same file.
    spec = sys.modules[function.__module__].__spec__
    module = spec.name if spec else function.__module__
    arguments = [module, function.__name__, json.dumps(options)]
    return [sys.executable, "-c", CODE, *arguments]


class AloneError(Exception):
    """A process did not end well; the message says how."""


def call(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Any:
    """What a function returns in a fresh process, which may die of it.

    Args:
      function: As of `command`.
      options: As of `command`.
      environment: Variables beside those that are set here.
      seconds: The most that it may take.

    Raises:
      AloneError: It raised, was killed, or took too long.
    """
    try:
        done = subprocess.run(
            command(function, options),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise AloneError(f"it took longer than {seconds} s") from None
    if done.returncode:
        raise AloneError(f"code {done.returncode}: ...{done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])
