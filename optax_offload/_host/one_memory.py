"""Machines whose host and device are one memory, where offloading gains nothing."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax

from optax_offload._ground.errors import warn
from optax_offload._host import host_memory


@dataclasses.dataclass(frozen=True)
class OneMemory:
    """A kind of machine whose host and device share one memory.

    Attributes:
      name: Its usual name.
      device: A regex of the names that its device alone has, in JAX or in its driver.
      vague: A regex of names that its device shares with others; "" if it has none.
      processor: A regex of its host's processor, which decides where a name is vague.
      source: The page that documents that the memory is one.
    """

    name: str
    device: str
    source: str
    vague: str = ""
    processor: str = ""


KNOWN = (
    OneMemory(
        "DGX Spark (GB10)",
        r"\bGB10\b",
        "build.nvidia.com/spark/nemotron/troubleshooting",
    ),
    OneMemory(
        "Jetson",
        r"^(NVIDIA )?(Jetson|Xavier|Orin|Thor)\b",
        "docs.nvidia.com/cuda/cuda-for-tegra-appnote",
    ),
    OneMemory(
        "MI300A",
        r"\bMI300A\b",
        "rocm.docs.amd.com/projects/HIP/en/docs-6.2.0/how-to/unified_memory.html",
        # An MI300X has the same instructions.
        vague=r"\bgfx942\b",
        processor=r"\bMI300A\b",
    ),
    OneMemory(
        "Strix Halo (Ryzen AI Max)",
        r"\bRadeon 80[456]0S\b|\bgfx1151\b",
        "rocm.docs.amd.com/en/docs-7.14.0/reference/system-optimization/rdna3-5.html",
        # What the driver calls any GPU that it has no name for.
        vague=r"^AMD Radeon Graphics$",
        processor=r"\bRYZEN AI MAX\b",
    ),
    OneMemory(
        "Apple silicon",
        r"^Apple M\d|^Metal$",
        "ml-explore.github.io/mlx/build/html/usage/unified_memory.html",
    ),
)


def one_memory_of(device: str, processor: str = "") -> OneMemory | None:
    """The kind of machine that a device belongs to, if host and device share memory.

    Args:
      device: The name of the device.
      processor: The name of the host's processor; "" where it is not known.

    Example:
      >>> one_memory_of("NVIDIA GB10").name
      'DGX Spark (GB10)'
      >>> one_memory_of("NVIDIA GH200 480GB") is None
      True
    """
    for kind in KNOWN:
        if re.search(kind.device, device):
            return kind
        vague = kind.vague and re.search(kind.vague, device)
        if vague and re.search(kind.processor, processor):
            return kind
    return None


def processor_name(cpuinfo: str) -> str:
    """The name of the first processor in a text of ``/proc/cpuinfo``; "" if none."""
    match = re.search(r"^model name\s*:\s*(.*?)\s*$", cpuinfo, re.MULTILINE)
    return match[1] if match else ""


@functools.cache
def warn_if_one_memory() -> None:
    """Warns, once in a process, if its devices and its host share one memory."""
    device = jax.local_devices()[0].device_kind
    found = one_memory_of(device, processor_name(host_memory.read_file("proc/cpuinfo")))
    if found is not None:
        warn(
            f"{device} and its host share one memory ({found.source}): state in host "
            "memory frees nothing here, and is copied within it. Leave "
            "optax_offload.offload out; updates in the backward pass and codecs still "
            "save memory. `optax-offload doctor` says more"
        )
