"""Limits of pinned memory: the machine, its cgroup, the GPU plugin's limit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from optax_offload._ground.units import GIB, size_text

# Where the kernel's own files are; tests have others.
ROOT = Path("/")

# XLA (xla/pjrt/gpu/gpu_helpers.cc) reads the first as whole GiB, an unreadable value as
# none, and lowers its default where the second makes it allocate all of it at once
# (F53).
PLUGIN_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PLUGIN_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
PLUGIN_DEFAULT_BYTES = 64 * GIB
PLUGIN_PREALLOCATED_BYTES = 16 * GIB
# Batches on their way and results are pinned beside the state: so much more is asked
# for, and so near its default the plugin is still left alone.
PLUGIN_HEADROOM_PERCENT = 10


@dataclasses.dataclass(frozen=True)
class Limit:
    """Something that bounds the host memory of a process.

    Attributes:
      name: The source of the bound: "machine", "cgroup" or "GPU plugin".
      total_bytes: The bytes that it allows in all.
      free_bytes: The bytes of them that are left.
    """

    name: str
    total_bytes: int
    free_bytes: int

    def fix(self, total_bytes: int) -> str:
        """The line that makes room for ``total_bytes`` of pinned memory."""
        gib = -(-total_bytes // GIB)
        if self.name == "GPU plugin":
            return f"Set this before JAX starts: export {PLUGIN_LIMIT}={gib}"
        if self.name == "cgroup":
            return (
                f"Give the job {gib} GiB for this, and what else it needs: "
                "docker run --memory=..., sbatch --mem=..., or the resources of a pod"
            )
        return (
            "Offload less (configs/second_moment.toml is half of Adam's state), or "
            "shard the state over more hosts"
        )


def read_file(path: str) -> str:
    """The text of a file of this machine; "" where it cannot be read."""
    try:
        return (ROOT / path).read_text(errors="replace")
    except OSError:
        return ""


def limits(
    *,
    gpu: bool,
    pinned_bytes: int,
    read: Callable[[str], str] = read_file,
    environment: Mapping[str, str] = os.environ,
) -> list[Limit]:
    """The limits that are known of a machine.

    Args:
      gpu: Whether the state belongs to GPUs, whose plugin has a cap of its own.
      pinned_bytes: The bytes that the process has in pinned memory already.
      read: The text of a file of the machine, by its path below the root.
      environment: The variables of the process.
    """
    plugin = _plugin(pinned_bytes, environment) if gpu else None
    found = [_machine(read), _cgroup(read), plugin]
    return [limit for limit in found if limit is not None]


def gpu_plugin_settings(pinned_bytes: int) -> dict[str, str]:
    """The variables that let the GPU plugin pin so much; none where its default does.

    Args:
      pinned_bytes: The bytes that one process is to have in pinned memory.
    """
    if 100 * pinned_bytes <= (100 - PLUGIN_HEADROOM_PERCENT) * PLUGIN_DEFAULT_BYTES:
        return {}
    gib = math.ceil(pinned_bytes * (100 + PLUGIN_HEADROOM_PERCENT) / 100 / GIB)
    return {PLUGIN_LIMIT: str(gib)}


def _machine(read: Callable[[str], str]) -> Limit | None:
    lines = read("proc/meminfo").splitlines()
    sizes = {
        name: int(rest.split()[0]) * 1024  # all in kB
        for name, _, rest in (line.partition(":") for line in lines)
        if rest.split()[:1] and rest.split()[0].isdecimal()
    }
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return None
    return Limit("machine", sizes["MemTotal"], sizes["MemAvailable"])


def _cgroup(read: Callable[[str], str]) -> Limit | None:
    """The tightest of the groups that this process is in."""
    found = [_limit_of(group, read) for group in _groups(read("proc/self/cgroup"))]
    known = [limit for limit in found if limit is not None]
    return min(known, key=lambda limit: limit.free_bytes, default=None)


def _groups(memberships: str) -> Iterator[PurePosixPath]:
    """The directories of a process' memory cgroups, and of those they are in.

    In a container the path may be the host's, and the container's own group at the root
    of the file system: what does not exist is passed over.
    """
    mount = PurePosixPath("sys/fs/cgroup")
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            base = mount
        elif "memory" in controllers.split(","):
            base = mount / "memory"
        else:
            continue
        group = base / path.lstrip("/")
        yield from (p for p in (group, *group.parents) if p.is_relative_to(base))


def _limit_of(group: PurePosixPath, read: Callable[[str], str]) -> Limit | None:
    names = ("memory.max", "memory.current", "inactive_file")
    if not read(f"{group}/{names[0]}"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names += ("total_inactive_file",)
    total, used = (_number(read(f"{group}/{name}")) for name in names[:2])
    # Without a limit version 2 says "max", version 1 a number beyond any machine.
    if total is None or used is None or total >= 2**62:
        return None
    lines = [line.split() for line in read(f"{group}/memory.stat").splitlines()]
    statistics = {words[0]: words[1] for words in lines if len(words) == 2}
    # The kernel drops cached file pages, those not in use first, before it refuses.
    used -= _number(statistics.get(names[2], "")) or 0
    return Limit("cgroup", total, max(total - used, 0))


def _plugin(pinned_bytes: int, environment: Mapping[str, str]) -> Limit:
    preallocate = environment.get(PLUGIN_PREALLOCATE, "").lower() in ("1", "true")
    value = environment.get(PLUGIN_LIMIT, "")
    default = PLUGIN_PREALLOCATED_BYTES if preallocate else PLUGIN_DEFAULT_BYTES
    total = GIB * int(value) if value.isdecimal() else default
    return Limit("GPU plugin", total, max(total - pinned_bytes, 0))


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Host memory that a tree takes of this process, and what its limits leave.

    Attributes:
      needed_bytes: For each kind of host memory, the bytes that the tree takes where
        it is planned to be, or is, of the devices of this process.
      missing_bytes: For each kind, the bytes that are still to be allocated.
      limits: The limits of this machine; none for devices that are not attached.
      distinct_bytes: For each kind, the bytes of ``needed_bytes`` with all copies of a
        part, which a replicated leaf has for each device, counted as one.
      copies: For each kind, the most copies of a leaf.
    """

    needed_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    missing_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    distinct_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    copies: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def shortages(self) -> list[str]:
        """A message for each limit that is too low, with the line that fixes it."""
        messages = []
        for limit in self.limits:
            # The plugin allocates pinned memory alone.
            kinds = [
                kind
                for kind in self.needed_bytes
                if kind == "pinned_host" or limit.name != "GPU plugin"
            ]
            missing = sum(self.missing_bytes.get(kind, 0) for kind in kinds)
            if missing > limit.free_bytes:
                used = limit.total_bytes - limit.free_bytes
                messages.append(
                    f"this process still needs {size_text(missing)} of host memory "
                    f"({'; '.join(kinds)}), but the {limit.name} has only "
                    f"{size_text(limit.free_bytes)} left of "
                    f"{size_text(limit.total_bytes)}. {limit.fix(used + missing)}"
                )
        return messages

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        return {
            "needed_bytes": dict(self.needed_bytes),
            "missing_bytes": dict(self.missing_bytes),
            "distinct_bytes": dict(self.distinct_bytes),
            "copies": dict(self.copies),
            "limits": [dataclasses.asdict(limit) for limit in self.limits],
            "shortages": self.shortages,
        }

    def __str__(self) -> str:
        needs = [
            f"{kind} of this process: {size_text(nbytes)}, "
            f"{size_text(self.missing_bytes.get(kind, 0))} of it not allocated yet"
            for kind, nbytes in self.needed_bytes.items()
        ]
        copies = [
            f"{kind} has {copies} copies of a leaf, one for each device that uses all "
            f"of it; with one it would take {size_text(self.distinct_bytes[kind])}: "
            "optax_offload.spread"
            for kind, copies in self.copies.items()
            if copies > 1
        ]
        rooms = [
            f"{limit.name}: {size_text(limit.free_bytes)} free of "
            f"{size_text(limit.total_bytes)}"
            for limit in self.limits
        ]
        return "\n".join(
            [*needs, *copies, *rooms, *(f"(!) {s}" for s in self.shortages)]
        )
