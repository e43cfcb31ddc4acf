"""All findings of a machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from optax_offload._machine.devices import about_devices, about_fit
from optax_offload._machine.directories import about_directory
from optax_offload._machine.findings import Finding, MachineFacts
from optax_offload._machine.host import about_host
from optax_offload._machine.texts import Texts


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings about a machine.

    Attributes:
      findings: The findings, in the order in which they are read.
    """

    findings: tuple[Finding, ...]

    @property
    def offload_helps(self) -> bool:
        """True if no finding says that offload gains nothing here, or does not work."""
        return all(x.level != "stop" for x in self.findings)

    @property
    def unseen(self) -> bool:
        """True if there is no accelerator that anything could be said of."""
        return any((x.topic, x.level) == ("devices", "unseen") for x in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        return {
            "offload_helps": self.offload_helps,
            "findings": [dataclasses.asdict(x) for x in self.findings],
        }


def diagnose(machine: Texts) -> Diagnosis:
    r"""Says what a machine can do for offloading.

    Args:
      machine: Its texts: `Here`, or `Saved`.

    Example:
      >>> from optax_offload._machine import Saved, diagnose
      >>> version = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x)"
      >>> found = diagnose(Saved(f"== proc/version\n{version}"))
      >>> [x.topic for x in found.findings if x.level == "stop"]
      ['WSL2']
    """
    facts = MachineFacts(machine)
    found = (*about_devices(facts), *about_host(facts), *about_directory(machine))
    return Diagnosis((*found, about_fit(facts)))
