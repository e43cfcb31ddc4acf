"""What a figure was measured on: device, driver, versions, commit, host.

The machine is read as `optax-offload doctor` reads it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import jax

from benchmarks.common.alone import ROOT
from benchmarks.common.steps import digest_of
from optax_offload import aot
from optax_offload._machine import Here
from optax_offload._machine.devices import chip_of
from optax_offload._machine.findings import MachineFacts

PACKAGES = [
    *("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt", "libtpu"),
    *("optax", "optax-offload", "flax", "numpy"),
    *("torch", "torchao", "bitsandbytes", "deepspeed"),
]
# Of what the host has free, for pinned memory and all else.
HOST_SHARE = 0.85


def describe() -> dict[str, Any]:
    """All of it but the commit; takes the device, so it is asked in a process alone."""
    device = jax.devices()[0]
    facts = MachineFacts(Here())
    driver = facts.accelerators[0].driver if facts.accelerators else ""
    limits = facts.limits.values()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "target": target_of(device.device_kind),
        "memory_bytes": memory_bytes(device, facts),
        "driver": {"driver_version": driver} if driver else {},
        "host": {
            "processor": facts.processor or platform.machine(),
            "cores": os.cpu_count(),
            "free_bytes": free_bytes(),
            "total_bytes": min((limit.total_bytes for limit in limits), default=0),
            "numa_nodes": {
                str(number): len(node.processors)
                for number, node in facts.nodes.items()
            },
        },
        "versions": versions(),
    }


def target_of(device_kind: str) -> str | None:
    """The name of a chip in `optax_offload.aot`, given JAX's; None if it has none."""
    chip, _ = chip_of(device_kind)
    return None if chip is None else chip.name


def memory_bytes(device: Any, facts: MachineFacts) -> int:
    """What the device has; of a CPU, which does not say, what a toy may have."""
    if facts.accelerators and facts.accelerators[0].memory_bytes:
        return facts.accelerators[0].memory_bytes
    name = target_of(device.device_kind)
    if name is not None:
        return aot.CHIPS[name].memory_bytes
    return (device.memory_stats() or {}).get("bytes_limit", 2**30)


def free_bytes() -> int:
    """What is left of the host's memory."""
    return MachineFacts(Here()).free_bytes or 0


def processors_of_nodes() -> dict[int, list[int]]:
    """The processors of each NUMA node; a node may have none."""
    nodes = MachineFacts(Here()).nodes
    return {number: sorted(node.processors) for number, node in nodes.items()}


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """The commit that is checked out, and a digest of the files if they differ from it.

    Where there is no repository, as in a copy of its files, the digest alone.
    """
    digest = digest_of("optax_offload", "benchmarks")
    git = shutil.which("git")
    if git is None:
        return f"files-{digest}"
    asked = ["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"]
    head, changed = (
        subprocess.run(
            [git, "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )
        for words in asked
    )
    if head.returncode:
        return f"files-{digest}"
    changes = [x for x in changed.stdout.splitlines() if x.endswith(".py")]
    return head.stdout.strip()[:10] + (f"-{digest}" if changes else "")
