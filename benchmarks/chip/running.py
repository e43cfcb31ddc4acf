"""Running parts: each in processes of its own, with limits of time, in any state."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chip import record
from benchmarks.chip.setting import Part, Setting, SkippedError
from benchmarks.common import alone
from benchmarks.common.alone import ROOT

# A process that is asked to end has so long to do it.
GRACE_SECONDS = 5.0
# Of what a process wrote last, for the reason of a failure.
LOG_CHARACTERS = 1500


def run_cases(part: Part, setting: Setting, names: Sequence[str], lines: Path) -> None:
    """Runs cases in this process, and writes a line when each begins and ends."""
    cases = part.cases(setting)
    for name in names:
        record.append(
            lines, {"case": name, "outcome": "started", "began": record.now()}
        )
        started = time.perf_counter()
        entry: record.Entry = {"case": name, "outcome": "done"}
        try:
            entry["figures"] = cases[name]()
        except SkippedError as error:
            entry |= {"outcome": "skipped", "reason": str(error)}
        except NotImplementedError as error:
            entry |= {"outcome": "skipped", "reason": f"refused: {error}"}
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                entry |= {"outcome": "skipped", "reason": f"does not fit: {error}"}
            else:
                traceback.print_exc()
                entry |= {"outcome": "failed", "reason": repr(error)}
        if "reason" in entry:
            entry["reason"] = entry["reason"][:LOG_CHARACTERS]
        entry["seconds"] = round(time.perf_counter() - started, 3)
        record.append(lines, entry)


def part_of(name: str) -> Part:
    """A part, by its name: that of its module."""
    return importlib.import_module(f"benchmarks.chip.{name}").PART


def run_named(
    part: str, setting: dict[str, Any], names: Sequence[str], lines: str
) -> None:
    """The same, in the process of a part."""
    run_cases(part_of(part), Setting(**setting), names, Path(lines))


def run_part(part: Part, setting: Setting, kept: record.Record, seconds: float) -> None:
    """Runs the cases of a part that are missing, whatever happens in one of them.

    Args:
      part: The part.
      setting: For its cases.
      kept: Where lines go.
      seconds: The most that it may take, if that is less than its own limit.
    """
    names = list(part.cases(setting))
    lines = kept.lines(part.name)
    limit = float("inf") if setting.dry else 60 * part.minutes
    deadline = time.monotonic() + min(seconds, limit)
    tried: set[str] = set()
    while time.monotonic() < deadline:
        left = [n for n in kept.missing(part.name, names) if n not in tried]
        if not left:
            return
        # What toys take is not counted.
        asked = left[:1] if part.each_alone and not setting.dry else left
        before = lines.stat().st_size if lines.exists() else 0
        ended = _in_a_process(part, asked, setting, kept, deadline)
        wrote = record.entries(lines, after=before)
        begun = [n for n, e in wrote.items() if e["outcome"] == "started"]
        # One that was begun and did not end; all of them if it did not get that far.
        for name in begun if wrote else asked:
            outcome = "unfinished" if ended == _NO_TIME else "failed"
            entry = {"case": name, "outcome": outcome, "reason": ended}
            record.append(lines, entry)
        tried |= wrote.keys() | ({*asked} if not wrote else set())


_NO_TIME = "the time was up"


def _in_a_process(
    part: Part,
    names: Sequence[str],
    setting: Setting,
    kept: record.Record,
    deadline: float,
) -> str:
    """Runs cases in a process of its own, until it ends or takes too long; says how."""
    lines = kept.lines(part.name)
    options = {"part": part.name, "setting": dataclasses.asdict(setting)}
    options |= {"names": names, "lines": str(lines.resolve())}
    log = kept.folder / f"{part.name}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            alone.command(run_named, options),
            cwd=ROOT,
            env=environment(part, setting),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            told = _watch(process, lines, deadline, part.case_seconds)
        finally:
            _end(process)
    if told:
        return told
    tail = log.read_bytes()[-LOG_CHARACTERS:].decode(errors="replace")
    return f"its process ended with code {process.returncode}: ...{tail}"


def _watch(
    process: subprocess.Popen[bytes], lines: Path, deadline: float, case_seconds: float
) -> str:
    """Waits; says why it waited no longer, if the process did not end by itself."""
    began = time.time()
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return _NO_TIME
        last = max(began, lines.stat().st_mtime if lines.exists() else 0.0)
        if time.time() - last > case_seconds:
            return f"it took longer than {case_seconds:.0f} s"
        time.sleep(0.1)
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, if it still runs, and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def environment(part: Part, setting: Setting) -> dict[str, str]:
    """Variables of a part's processes; those that are set already stay."""
    own = dict(os.environ)
    if setting.dry:
        toy = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return {**own, **toy}
    gib = max(1, setting.host_bytes // 2**30)
    found = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(gib), **part.environment}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in own:
        # JAX refuses both names of it.
        found.pop("XLA_CLIENT_MEM_FRACTION", None)
    return {**found, **own}
