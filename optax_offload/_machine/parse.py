"""Parsers for texts of a machine. Each function knows one format.

Facts that a text does not state, or states in an unknown way, are None or missing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from optax_offload._ground.units import MIB

# Gigatransfers per second and lane, and of 130 bits so many that are data, from version
# 3.0 of PCI Express on; of 10 bits before it.
_ENCODINGS = {2.5: 8 / 10, 5.0: 8 / 10}
_LATER_ENCODING = 128 / 130


def is_wsl(version: str) -> bool:
    """Returns whether the kernel of a ``/proc/version`` is that of WSL2.

    Example:
      >>> is_wsl("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c8) ...")
      True
      >>> is_wsl("Linux version 6.8.0-1021-azure (buildd@lcy02) ...")
      False
    """
    kernel = version.lower().split(" (")[0]
    return "microsoft" in kernel


def locked_bytes(limits: str) -> int | float | None:
    """The soft limit of locked memory in a ``/proc/self/limits``, in bytes.

    Example:
      >>> locked_bytes("Max locked memory      8388608    unlimited     bytes")
      8388608
    """
    match = re.search(r"^Max locked memory\s+(\d+|unlimited)\s", limits, re.MULTILINE)
    if match is None:
        return None
    return float("inf") if match[1] == "unlimited" else int(match[1])


def number_set(text: str) -> frozenset[int]:
    """The numbers of a kernel's list, as of processors or of NUMA nodes.

    Example:
      >>> sorted(number_set("0-2,5"))
      [0, 1, 2, 5]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        # A kernel has at most some thousand processors; what says more is no list.
        if match and int(match[2] or match[1]) < 2**20:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def status_list(status: str, name: str) -> frozenset[int]:
    """The numbers of a list in a ``/proc/self/status``, such as Cpus_allowed_list."""
    match = re.search(rf"^{name}:\s*(\S+)", status, re.MULTILINE)
    return number_set(match[1]) if match else frozenset()


def node_bytes(meminfo: str) -> int | None:
    """The memory of a NUMA node, from its ``meminfo``."""
    match = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
    return int(match[1]) * 1024 if match else None


def variables(text: str) -> dict[str, str]:
    """A file of ``NAME=value`` lines, as a device's ``uevent``."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip() for name, equals, value in pairs if equals}


def properties(text: str) -> dict[str, int]:
    """A file of a name and a number in each line, as those of ``/sys/class/kfd``."""
    lines = (line.split() for line in text.splitlines())
    return {
        words[0]: int(words[1])
        for words in lines
        if len(words) == 2 and words[1].isdecimal()
    }


def fields(text: str) -> dict[str, str]:
    """A file of ``Name: value`` lines, as NVIDIA's driver and Apple's sysctl write."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def driver_version(version: str) -> str:
    """The version in a ``/proc/driver/nvidia/version``; "" if none is in it.

    Example:
      >>> driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ")
      '570.86.15'
    """
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", version)
    return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class SmiRow:
    """One GPU's row in the output of nvidia-smi.

    Attributes:
      address: Its PCI address, as the kernel writes it.
      name: Its name.
      memory_bytes: Its memory; None where it has none of its own.
      driver: The version of its driver.
    """

    address: str
    name: str
    memory_bytes: int | None
    driver: str


# What `smi_rows` reads.
SMI_COMMAND = (
    "nvidia-smi --query-gpu=pci.bus_id,name,memory.total,driver_version "
    "--format=csv,noheader"
)


def smi_rows(text: str) -> list[SmiRow]:
    """The GPUs in what `SMI_COMMAND` prints.

    Example:
      >>> smi_rows("00000000:19:00.0, NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15")
      [SmiRow(address='0000:19:00.0', name='NVIDIA H100 80GB HBM3', \
memory_bytes=85520809984, driver='570.86.15')]
    """
    found: list[SmiRow] = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        address = re.fullmatch(
            r"[0-9A-Fa-f]*([0-9A-Fa-f]{4}(?::\w\w){2}\.\w)", words[0]
        )
        if len(words) == 4 and address:
            memory = re.fullmatch(r"(\d+) MiB", words[2])
            nbytes = int(memory[1]) * MIB if memory else None
            found.append(SmiRow(address[1].lower(), words[1], nbytes, words[3]))
    return found


@dataclasses.dataclass(frozen=True)
class Slot:
    """The PCI Express link of a device.

    Attributes:
      bytes_per_second: Its bandwidth each way, when the device is at work.
      lanes: The lanes that it has.
      most_lanes: The lanes that the device could use.
    """

    bytes_per_second: float
    lanes: int
    most_lanes: int


def slot(files: Mapping[str, str]) -> Slot | None:
    """The link of a device, from the files of its directory.

    The speed is the greatest, since a GPU that rests lowers it.

    Example:
      >>> slot({"max_link_speed": "32.0 GT/s PCIe", "current_link_width": "16",
      ...       "max_link_width": "16"}).lanes
      16
    """
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", files.get("max_link_speed", ""))
    widths = [files.get(f"{k}_link_width", "").strip() for k in ("current", "max")]
    if not speed or not all(width.isdecimal() for width in widths):
        return None
    lanes, most_lanes = map(int, widths)
    # A device behind no link says 0 or 255 lanes.
    if not 0 < lanes <= most_lanes <= 32:
        return None
    transfers = float(speed[1])
    data = _ENCODINGS.get(transfers, _LATER_ENCODING)
    return Slot(transfers * 1e9 * data * lanes / 8, lanes, most_lanes)
