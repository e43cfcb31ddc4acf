"""What a figure was measured on: device, driver, versions, commit, host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from optax_offload import _host_memory, aot

ROOT = Path(__file__).parent.parent.parent
PACKAGES = [
    *("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt", "libtpu"),
    *("optax", "flax", "numpy", "torch", "torchao", "bitsandbytes", "deepspeed"),
]
# What `device_kind` says of the chips that `optax_offload.aot` knows.
CHIPS = {
    r"TPU v4": "v4",
    r"TPU v5 ?(lite|e)": "v5e",
    r"TPU v5p?$": "v5p",
    r"TPU v6": "v6e",
    r"TPU ?7x|TPU v7": "tpu7x",
    r"A100.*40": "a100-40",
    r"A100": "a100-80",
    r"H200": "h200",
    r"H100": "h100",
    r"B200": "b200",
    r"NVIDIA L4$": "l4",
    r"RTX 4090": "rtx4090",
}
DRIVER_FIELDS = "name,driver_version,memory.total,pcie.link.gen.max,power.limit"
# Of what the host has free, for pinned memory and all else.
HOST_SHARE = 0.85
NODES = Path("/sys/devices/system/node")


def describe() -> dict[str, Any]:
    """All of it but the commit; takes the device, so it is asked in a process alone."""
    device = jax.devices()[0]
    driver = nvidia_smi(DRIVER_FIELDS)
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "target": target_of(device.device_kind),
        "memory_bytes": memory_bytes(device, driver),
        "driver": driver,
        "host": host(),
        "versions": versions(),
    }


def target_of(device_kind: str) -> str | None:
    """The name of a chip in `optax_offload.aot`, given JAX's; None if it has none."""
    for pattern, name in CHIPS.items():
        if re.search(pattern, device_kind, re.IGNORECASE):
            return name
    return None


def memory_bytes(device: Any, driver: dict[str, str]) -> int:
    """What the device has; of a CPU, which does not say, what a toy may have."""
    if "memory.total" in driver:
        return int(driver["memory.total"].split()[0]) * 2**20
    name = target_of(device.device_kind)
    if name is not None:
        return aot.CHIPS[name].memory_bytes
    return (device.memory_stats() or {}).get("bytes_limit", 2**30)


def nvidia_smi(fields: str) -> dict[str, str]:
    """What NVIDIA's tool says of the first GPU; nothing where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    values = done.stdout.strip().split(", ")
    names = fields.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def host() -> dict[str, Any]:
    """Processor, memory and NUMA nodes of the machine."""
    free, total = host_memory()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "free_bytes": free,
        "total_bytes": total,
        "numa_nodes": {str(node): len(cpus) for node, cpus in numa_nodes().items()},
    }


def host_memory() -> tuple[int, int]:
    """What is left of it, and all of it."""
    found = _host_memory.limits(gpu=False, pinned_bytes=0)
    free = min((limit.free_bytes for limit in found), default=0)
    return free, min((limit.total_bytes for limit in found), default=0)


def processor() -> str:
    """Its name, as Linux has it."""
    with contextlib.suppress(OSError):
        names = re.findall(
            r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def numa_nodes() -> dict[int, list[int]]:
    """The processors of each NUMA node; a node may have none."""
    found = {}
    for path in sorted(NODES.glob("node[0-9]*")):
        text = (path / "cpulist").read_text().strip()
        found[int(path.name.removeprefix("node"))] = cpus_of(text)
    return found


def cpus_of(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it, such as ``0-3,8``."""
    found: list[int] = []
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


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
    digest = files_digest()
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


def files_digest() -> str:
    """A digest of the package and of the benchmarks."""
    digest = hashlib.sha256()
    for folder in ("optax_offload", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
