"""A machine as JAX sees it: versions, devices, and the measured link."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Generator, Mapping
from importlib import metadata
from typing import Any

import jax

from optax_offload._machine import parse
from optax_offload._machine.accelerators import accelerators
from optax_offload._machine.texts import Texts

# Distributions whose versions matter: JAX's own, its plugins, and libtpu.
_DISTRIBUTIONS = re.compile(r"jax(lib|[-_](cuda|rocm|metal|oneapi).*)?|libtpu|optax")
# Plugins of devices that `accelerators` may not find: JAX has to be asked.
_OTHER_PLUGINS = re.compile(r"jax[-_](?!cuda|rocm).*")


@dataclasses.dataclass(frozen=True)
class Device:
    """Devices of one kind, as JAX has them.

    Attributes:
      kind: JAX's name of such a device.
      platform: JAX's name of its platform, as "gpu".
      count: The number of them that this process has.
      memory_kinds: The memories that each can address.
      grid: The chips of a TPU's slice along each axis; () for others.
    """

    kind: str
    platform: str
    count: int
    memory_kinds: tuple[str, ...]
    grid: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class JaxView:
    """A machine as JAX sees it.

    Attributes:
      versions: The version of each distribution that matters.
      devices: The devices that this process uses by default, a row for each kind.
      error: The reason why JAX has no devices; "" if it has some.
      link_bytes_per_second: The measured bandwidth, each way; None if not measured.
      link_error: The reason why nothing was measured; "" if nobody tried.
    """

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    error: str = ""
    link_bytes_per_second: float | None = None
    link_error: str = ""

    @property
    def accelerator(self) -> Device | None:
        """The first devices that are no CPU."""
        return next((d for d in self.devices if d.platform != "cpu"), None)

    def as_json(self) -> str:
        """A text for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> JaxView:
        """Reads what `as_json` wrote; any other text gives a view without facts."""
        try:
            says: Any = json.loads(text)
            devices = tuple(
                Device(
                    str(d["kind"]),
                    str(d["platform"]),
                    int(d["count"]),
                    tuple(map(str, d["memory_kinds"])),
                    tuple(map(int, d.get("grid", ()))),
                )
                for d in says["devices"]
            )
            link = says.get("link_bytes_per_second")
            return cls(
                {str(k): str(v) for k, v in says["versions"].items()},
                devices,
                str(says.get("error", "")),
                None if link is None else float(link),
                str(says.get("link_error", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()


def look(machine: Texts, measure: Callable[[], float] | None) -> JaxView:
    """Asks JAX, which takes the devices for this process.

    Args:
      machine: This machine.
      measure: Measures the link of the first device; None if that is not asked for.
    """
    versions = _versions()
    others = any(map(_OTHER_PLUGINS.fullmatch, versions))
    if not (accelerators(machine) or others or "JAX_PLATFORMS" in os.environ):
        # Plugins without a device would fill the terminal.
        jax.config.update("jax_platforms", "cpu")
    try:
        with _errors_of_plugins() as errors:
            devices = jax.local_devices()
    except RuntimeError as error:  # A plugin that found its device in use, say.
        return JaxView(versions, error=_first_line(error))
    found = JaxView(versions, tuple(_kinds(devices)), "; ".join(errors))
    if measure is None or found.accelerator is None:
        return found
    if parse.is_wsl(machine.read("proc/version")):
        # What it pins may be all that can be pinned.
        return dataclasses.replace(found, link_error="not under WSL2")
    try:
        return dataclasses.replace(found, link_bytes_per_second=measure())
    # Whatever a plugin or a driver raises where it has no memory to pin.
    except Exception as error:
        return dataclasses.replace(found, link_error=_first_line(error))


@contextlib.contextmanager
def _errors_of_plugins() -> Generator[list[str], None, None]:
    """Collects errors of plugins, which JAX only logs when it starts."""
    errors: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raised = record.exc_info[1] if record.exc_info else None
            if isinstance(raised, Exception):
                errors.append(_first_line(raised))

    logger, keep = logging.getLogger("jax"), Keep()
    propagate = logger.propagate
    logger.addHandler(keep)
    logger.propagate = False
    try:
        yield errors
    finally:
        logger.removeHandler(keep)
        logger.propagate = propagate


def _versions() -> dict[str, str]:
    names = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {
        name: names[name] for name in sorted(names) if _DISTRIBUTIONS.fullmatch(name)
    }


def _kinds(devices: list[Any]) -> list[Device]:
    of_kind: dict[tuple[str, str], list[Any]] = {}
    for device in devices:
        of_kind.setdefault((device.device_kind, device.platform), []).append(device)
    return [
        Device(
            kind,
            platform,
            len(alike),
            tuple(sorted(m.kind for m in alike[0].addressable_memories())),
            _grid(alike[0]),
        )
        for (kind, platform), alike in of_kind.items()
    ]


def _grid(device: Any) -> tuple[int, ...]:
    """The chips along each axis of a TPU's slice, other hosts' included."""
    every = [getattr(d, "coords", None) for d in jax.devices(device.platform)]
    known = [tuple(coords) for coords in every if coords is not None]
    return tuple(max(axis) + 1 for axis in zip(*known, strict=True))


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
