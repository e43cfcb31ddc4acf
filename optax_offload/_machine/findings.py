"""Findings about a machine, and the facts that they are made from."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal

from optax_offload._host import host_memory
from optax_offload._host.host_memory import Limit
from optax_offload._host.one_memory import OneMemory, one_memory_of, processor_name
from optax_offload._machine import parse
from optax_offload._machine.accelerators import Accelerator, accelerators
from optax_offload._machine.jax_view import JaxView
from optax_offload._machine.texts import Texts

# "stop": offload gains nothing here, or does not work. "fix": a line makes it better.
# "unseen": the machine does not say.
Level = Literal["good", "note", "fix", "stop", "unseen"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: what was seen of a machine, what it means, and what to do.

    Attributes:
      topic: The subject, such as "host memory".
      level: Whether anything has to be done: "good", "note", "fix", "stop" (offload
        gains nothing here, or does not work), "unseen" (the machine does not say).
      seen: The observation.
      means: The meaning of that for offloading.
      do: Lines to paste into a shell; () where there is nothing to do.
      sources: The pages or measurements that the meaning is from.
    """

    topic: str
    level: Level
    seen: str
    means: str
    do: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


# Coherent with their host, and yet two memories, which are all nodes of one system.
_COHERENT = re.compile(r"\b(GH200|GB200|GB300)\b")


@dataclasses.dataclass(frozen=True)
class Node:
    """A NUMA node.

    Attributes:
      processors: The numbers of its processors; none where it is memory alone.
      memory_bytes: Its memory; None if that is not said.
    """

    processors: frozenset[int]
    memory_bytes: int | None


class MachineFacts:
    """The facts that a machine's texts state, as values.

    Attributes:
      machine: The texts.
      jax: The versions, devices and errors that JAX reports.
      accelerators: The accelerators that the process may use.
      numbers: The number of each of them among all of the machine.
      environment: The variables that JAX and its plugins read.
      processor: The name of the host's processor.
      is_wsl: Whether this is Linux under Windows.
    """

    def __init__(self, machine: Texts):
        """Reads what every finding needs."""
        self.machine = machine
        self.jax = JaxView.from_json(machine.read("jax"))
        self.environment = machine.environment()
        every = accelerators(machine)
        chosen = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        self.numbers = _visible(every, chosen)
        self.accelerators = [every[n] for n in self.numbers]
        self.processor = processor_name(machine.read("proc/cpuinfo"))
        self.is_wsl = parse.is_wsl(machine.read("proc/version"))

    @functools.cached_property
    def limits(self) -> dict[str, Limit]:
        """The limits of host memory, by name."""
        found = host_memory.limits(
            gpu=self.has_gpu,
            pinned_bytes=0,
            read=self.machine.read,
            environment=self.environment,
        )
        return {limit.name: limit for limit in found}

    @functools.cached_property
    def nodes(self) -> dict[int, Node]:
        """The NUMA nodes, by their numbers."""
        prefix = "sys/devices/system/node/node"
        found: dict[int, Node] = {}
        for path in self.machine.paths(f"{prefix}*/cpulist"):
            number = path.removeprefix(prefix).partition("/")[0]
            if number.isdecimal():
                meminfo = self.machine.read(f"{prefix}{number}/meminfo")
                processors = parse.number_set(self.machine.read(path))
                found[int(number)] = Node(processors, parse.node_bytes(meminfo))
        return found

    @property
    def is_coherent(self) -> bool:
        """True if the device's own memory is a NUMA node beside the host's."""
        return _COHERENT.search(self.device_name) is not None

    @property
    def device_memory_bytes(self) -> int:
        """The memory of devices that the kernel counts as the host's."""
        if not self.is_coherent:
            return 0
        without = (x for x in self.nodes.values() if not x.processors)
        return sum(x.memory_bytes or 0 for x in without)

    @property
    def free_bytes(self) -> int | None:
        """The host memory that a process can still get; None if that is not known."""
        free = {name: x.free_bytes for name, x in self.limits.items()}
        free.pop("GPU plugin", None)
        if "machine" in free:
            free["machine"] = max(free["machine"] - self.device_memory_bytes, 0)
        return min(free.values(), default=None)

    @property
    def has_somewhere_to_offload(self) -> bool:
        """True if offload can work: the host has memory of its own that can be pinned.

        False on machines with one memory for host and device, and under WSL.
        """
        return self.one_memory is None and not self.is_wsl

    @property
    def has_gpu(self) -> bool:
        """True if a plugin for GPUs is, or would be, in use."""
        device = self.jax.accelerator
        if device is not None:
            return device.platform == "gpu"
        return any(x.vendor in ("nvidia", "amd") for x in self.accelerators)

    @property
    def device_name(self) -> str:
        """The name of the device that a run would use; "" if there is none."""
        if self.jax.accelerator is not None:
            return self.jax.accelerator.kind
        return self.accelerators[0].name if self.accelerators else ""

    @property
    def device_count(self) -> int:
        """The devices that this process has, or could have."""
        if self.jax.accelerator is not None:
            return self.jax.accelerator.count
        return len(self.accelerators)

    @property
    def one_memory(self) -> OneMemory | None:
        """The kind of machine that this is, if host and device share one memory."""
        names = [self.device_name, *(x.name for x in self.accelerators)]
        found = (one_memory_of(name, self.processor) for name in names)
        return next((kind for kind in found if kind is not None), None)


def _visible(devices: list[Accelerator], chosen: str) -> list[int]:
    """The devices that a process uses, given ``CUDA_VISIBLE_DEVICES``, by number."""
    every, numbers = [*range(len(devices))], chosen.split(",")
    if not devices or devices[0].vendor != "nvidia":
        return every
    if not all(x.isdecimal() and int(x) < len(devices) for x in numbers):
        return every  # None are chosen, or by other names.
    return [int(x) for x in numbers]
