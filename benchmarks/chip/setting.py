"""Where parts are run and how large, what a part is, and what one may say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from optax_offload import aot
from optax_offload._ground.units import GIB

Figures = dict[str, Any]
Case = Callable[[], Figures]


class SkippedError(Exception):
    """A case cannot be run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a part has to know of the machine, and of what was asked for.

    Attributes:
      dry: Whether all is of toy size, to see that it runs.
      target: The name of the chip in `optax_offload.aot`; None if it has none there.
      memory_bytes: Memory of the device.
      host_bytes: Memory of the host that parts may take.
    """

    dry: bool
    target: str | None
    memory_bytes: int
    host_bytes: int

    def check_host(self, peak: aot.Peak) -> None:
        """Says that a case is about to make arrays.

        Raises:
          SkippedError: They need more of the host than it has.
        """
        if peak.host_peak_bytes > self.host_bytes:
            raise SkippedError(
                f"it needs {peak.host_peak_bytes / GIB:.0f} GiB of the host, which has "
                f"{self.host_bytes / GIB:.0f} GiB for it"
            )


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of what is measured: cases that are run one after the other.

    Attributes:
      name: What `--only` calls it.
      minutes: The most that it may take on a chip.
      case_seconds: The most that one of its cases may take.
      cases: The cases in a setting, by name, most valuable first. Called in each
        process, so it must not touch a device.
      each_alone: Whether each case has a process of its own.
      environment: Variables of its processes.
    """

    name: str
    minutes: float
    case_seconds: float
    cases: Callable[[Setting], Mapping[str, Case]]
    each_alone: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
