"""Figures of compiled programs, kept on disk so that none is compiled twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from optax_offload.aot import compilers
from optax_offload.aot.compile import compile_lowered, lower
from optax_offload.aot.peak import DoesNotFitError, Peak, peak
from optax_offload.aot.step_times import Assumption, StepTime, step_time
from optax_offload.aot.targets import Target

# What a compiler, and so a peak, depends on beside the program.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of a program that was compiled.

    Attributes:
      used_bytes: Device memory that it needs, on each device; where the compiler
        refused the program, its own number.
      peak: The memory in parts; None where the compiler refused the program.
      time: The modeled time of a run; None where the compiler refused the program.
      was_kept: Whether this was read from disk, and nothing was compiled.
      program: A digest of the program, of its target and of the compilers' versions.
    """

    used_bytes: int
    peak: Peak | None
    time: StepTime | None
    was_kept: bool = False
    program: str = dataclasses.field(default="", compare=False)


# The options of `jax.jit` have the names that they have there.
def measure(  # noqa: PLR0913
    fn: Callable[..., Any],
    *args: Any,
    target: Target,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    jit: Callable[..., Any] = jax.jit,
    link_bytes_per_second: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    known: MutableMapping[str, Measured] | None = None,
) -> Measured:
    """Compiles a function, and reads its peak and its modeled time.

    A program that needs more than its target has is no error here.

    Args:
      fn: As of `compile`.
      *args: As of `compile`.
      target: As of `compile`.
      out_shardings: As of `compile`.
      donate_argnums: As of `compile`.
      jit: The function that jits a function that is not jitted, such as `jit` of the
        library.
      link_bytes_per_second: As of `step_time`.
      folder: The folder that keeps the figures, by a digest of the program, the target
        and the versions of the compilers. A program that is found there is not
        compiled. None keeps nothing.
      known: The figures of programs that were compiled before, by their digests; those
        of this one are added. None looks for none.

    Returns:
      The figures of the program.

    Raises:
      ImportError: The compiler's wheel is not installed; says how to install it.
      ValueError: As of `compile`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_offload import aot
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> found = aot.measure(jnp.tanh, x, target=aot.Target("h100"))  # doctest: +SKIP
      >>> found.used_bytes  # doctest: +SKIP
      8388608
    """
    lowered = lower(
        fn,
        args,
        target,
        {"out_shardings": out_shardings, "donate_argnums": donate_argnums},
        jit=jit,
    )
    digest = _digest(lowered, target, link_bytes_per_second)
    known = {} if known is None else known
    if digest in known:
        return known[digest]
    file = None if folder is None else Path(folder) / f"{digest}.json"
    found = None if file is None else _read(file)
    if found is None:
        found = _measured(lowered, target, link_bytes_per_second)
        if file is not None:
            _write(file, found)
    known[digest] = dataclasses.replace(found, program=digest)
    return known[digest]


def _measured(
    lowered: jax.stages.Lowered, target: Target, link_bytes_per_second: float | None
) -> Measured:
    try:
        compiled = compile_lowered(lowered, target, {})
    except DoesNotFitError as error:
        return Measured(error.used_bytes, None, None)
    found = peak(compiled)
    time = step_time(compiled, target, link_bytes_per_second=link_bytes_per_second)
    return Measured(found.peak_bytes, found, time)


def _digest(lowered: jax.stages.Lowered, target: Target, link: float | None) -> str:
    digest = hashlib.sha256()
    options = sorted(compilers.own_options(lowered).items())
    of_target = target.name, target.memory_bytes, link
    about = [*of_target, _versions(), _own_digest(), options]
    for text in (json.dumps(about, default=repr), lowered.as_text()):
        digest.update(text.encode())
    return digest.hexdigest()[:32]


@cache
def _versions() -> tuple[str, ...]:
    found: list[str] = []
    for name in _COMPILERS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return (*found, os.environ.get("XLA_FLAGS", ""))


@cache
def _own_digest() -> str:
    """A digest of this wing, which reads the programs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> Measured | None:
    """Reads the figures in a file; None if it does not exist or is damaged."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        time = table["time"]
        if time is not None:
            assumptions = tuple(Assumption(*x) for x in time.pop("assumptions"))
            time = StepTime(assumptions=assumptions, **time)
        parts = None if table["peak"] is None else Peak(**table["peak"])
        return Measured(int(table["used_bytes"]), parts, time, was_kept=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, measured: Measured) -> None:
    """Keeps what was read; whole or not at all, as several processes may do so."""
    table = dataclasses.asdict(measured)
    del table["was_kept"], table["program"]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with open(handle, "w", encoding="utf-8") as f:
            json.dump(table, f)
        os.replace(name, file)
    except OSError:
        return  # A full disk, or one that may not be written: compiled again next time.
