"""Findings about the host: its memory, how much may be pinned, and NUMA."""

from __future__ import annotations

from collections.abc import Iterator

from optax_offload._ground.units import GIB, size_text
from optax_offload._host.host_memory import PLUGIN_HEADROOM_PERCENT, PLUGIN_LIMIT
from optax_offload._machine import parse
from optax_offload._machine.accelerators import Accelerator, apple_memory_bytes
from optax_offload._machine.findings import Finding, MachineFacts

# Of the host's free memory: what allows so much of it to be pinned is left alone.
_ENOUGH_PERCENT = 80
_PROC = "docs.kernel.org/filesystems/proc.html"
_CGROUPS = "docs.kernel.org/admin-guide/cgroup-v2.html"
_PLUGIN = "github.com/openxla/xla, xla/pjrt/gpu/gpu_helpers.cc"
_WSL = "docs.nvidia.com/cuda/wsl-user-guide"
_WSL_REPORTS = (
    "github.com/microsoft/WSL/issues/14078",
    "github.com/NVIDIA/nvidia-docker/issues/1725",
)
_VFIO = "github.com/kubevirt/kubevirt/issues/8472"
_TPU_IMAGE = "docs.cloud.google.com/tpu/docs/custom-os-image"
_MEMLOCK_REPORTS = (
    "github.com/cupy/cupy/issues/4775",
    "github.com/microsoft/WSL/issues/14078",
)
_NUMA = "github.com/pytorch/torchtitan/pull/3519"
_NUMA_PINNED = "github.com/pytorch/pytorch/issues/160420"
_BINDING = "slurm.schedmd.com/sbatch.html"
_NODES_OF_GPUS = "github.com/NVIDIA/mlperf-common/pull/16"


def about_host(facts: MachineFacts) -> Iterator[Finding]:
    """The findings about the host."""
    yield _host_memory(facts)
    if facts.is_wsl:
        yield _wsl(facts)
    if not facts.has_somewhere_to_offload:
        return
    if facts.has_gpu:
        yield _pinned_memory(facts)
    yield _locked_memory(facts)
    yield _numa(facts)


def _host_memory(facts: MachineFacts) -> Finding:
    topic, sources = "host memory", (_PROC, _CGROUPS)
    free = facts.free_bytes
    if free is None:
        total = apple_memory_bytes(facts.machine)
        seen = f"{size_text(total)} in all" if total else "its size is not known"
        means = "it is not known how much is free, or allowed to this process"
        return Finding(topic, "unseen", seen, means, sources=sources)
    rooms = [
        f"the {limit.name} has {size_text(limit.free_bytes)} free of "
        f"{size_text(limit.total_bytes)}"
        for name, limit in facts.limits.items()
        if name != "GPU plugin"
    ]
    if facts.device_memory_bytes:
        rooms.append(f"{size_text(facts.device_memory_bytes)} of it is the device's")
    means = f"{size_text(free)} are left for offloaded state and for this process"
    cgroup, machine = facts.limits.get("cgroup"), facts.limits.get("machine")
    if cgroup and machine and cgroup.free_bytes < machine.free_bytes // 2:
        means += ". The cgroup sets this bound; the machine has more"
        line = _more_memory(facts, gib=machine.free_bytes * 9 // 10 // GIB)
        return Finding(topic, "fix", "; ".join(rooms), means, (line,), sources)
    return Finding(topic, "good", "; ".join(rooms), means, sources=sources)


def _more_memory(facts: MachineFacts, gib: int) -> str:
    """A line that asks the creator of the cgroup for more memory."""
    groups = facts.machine.read("proc/self/cgroup")
    if "slurm" in groups:
        return f"sbatch --mem={gib}G ..."
    if "kubepods" in groups:
        return f"kubectl set resources pod/... --limits=memory={gib}Gi"
    return f"docker run --memory={gib}g ..."


def _pinned_memory(facts: MachineFacts) -> Finding:
    topic, sources = "pinned memory", (_PLUGIN,)
    limit = facts.limits["GPU plugin"]
    value = facts.environment.get(PLUGIN_LIMIT, "")
    how = f"{PLUGIN_LIMIT}={value}" if value else f"{PLUGIN_LIMIT} is not set"
    seen = f"XLA pins at most {size_text(limit.total_bytes)} for one process ({how})"
    if facts.free_bytes is None:
        means = "it is not known whether the host has that much"
        return Finding(topic, "unseen", seen, means, sources=sources)
    most = max(facts.free_bytes * (100 - PLUGIN_HEADROOM_PERCENT) // 100 // GIB, 1)
    line = f"export {PLUGIN_LIMIT}={most}"
    unread = bool(value) and not value.isdecimal()
    if limit.total_bytes > facts.free_bytes and value and not unread:
        means = (
            f"the host has only {size_text(facts.free_bytes)} free, so it runs out "
            "before XLA refuses"
        )
        return Finding(topic, "fix", seen, means, (line,), sources)
    enough = facts.free_bytes * _ENOUGH_PERCENT // 100
    if unread or limit.total_bytes < enough:
        means = (
            "more state than that raises an out-of-memory error, however much the "
            "host has. Set the variable before JAX starts. If every GPU has a process "
            "of its own, divide the number by the number of processes"
        )
        if unread:
            means = f"XLA reads whole numbers only, so it ignores {value!r}; {means}"
        return Finding(topic, "fix", seen, means, (line,), sources)
    means = "that is about as much as the host has, or more"
    return Finding(topic, "good", seen, means, sources=sources)


def _wsl(facts: MachineFacts) -> Finding:
    seen = "this is WSL2 (Linux under Windows)"
    means = (
        "NVIDIA documents that pinned memory is limited under WSL2. Users report 0.5 "
        "to 1 GiB for a process, and no setting raises it, so offload does not work "
        "here. Train on Linux itself"
    )
    sources = (_WSL, *_WSL_REPORTS)
    return Finding("WSL2", "stop", seen, means, sources=sources)


def _locked_memory(facts: MachineFacts) -> Finding:
    topic = "locked memory"
    limit = parse.locked_bytes(facts.machine.read("proc/self/limits"))
    if limit is None:
        means = "/proc/self/limits could not be read"
        return Finding(topic, "unseen", "ulimit -l is not known", means)
    unlimited = limit == float("inf")
    seen = f"ulimit -l is {'unlimited' if unlimited else size_text(int(limit))}"
    if unlimited:
        means = "nothing is bounded by it"
        return Finding(topic, "good", seen, means, sources=(_PROC,))
    if any(x.vendor == "google" and x.name != "TPU v4" for x in facts.accelerators):
        means = (
            "TPUs since v5 use VFIO, and then the kernel counts pinned memory against "
            "this limit"
        )
        lines = ("ulimit -l unlimited", "docker run --ulimit memlock=-1 ...")
        return Finding(topic, "fix", seen, means, lines, (_VFIO, _TPU_IMAGE))
    if facts.has_gpu:
        means = (
            "a GPU's driver pins memory itself, and users saw no change when they "
            "raised this limit. It does bind RDMA libraries"
        )
        return Finding(topic, "good", seen, means, sources=_MEMLOCK_REPORTS)
    means = "it bounds the memory that TPUs pin, and this machine has none"
    return Finding(topic, "note", seen, means, sources=(_VFIO,))


def _numa(facts: MachineFacts) -> Finding:
    topic = "NUMA"
    nodes = facts.nodes
    with_processors = sorted(n for n, node in nodes.items() if node.processors)
    without = sorted(nodes.keys() - set(with_processors))
    if not with_processors:
        means = "it is not known whether memory is at several nodes"
        seen = "/sys/devices/system/node has no node with processors"
        return Finding(topic, "unseen", seen, means, sources=(_PROC,))
    if len(with_processors) == 1 and without and facts.is_coherent:
        seen = f"one NUMA node has processors; {_numbers(without)} have none"
        means = (
            "the others are the device's memory, and host programs may allocate there"
        )
        line = f"numactl --membind={with_processors[0]} python train.py"
        return Finding(topic, "fix", seen, means, (line,), (_NODES_OF_GPUS,))
    if len(with_processors) == 1:
        means = "all host memory is equally near to the devices"
        return Finding(topic, "good", "one NUMA node has processors", means)
    seen = f"{len(with_processors)} NUMA nodes have processors"
    if not facts.accelerators:
        seen += ", and no device was found"
        return Finding(topic, "note", seen, "this does not matter without a device")
    if any(x.node is None for x in facts.accelerators):
        seen += "; the firmware does not say which are near the devices"
        means = "memory of the wrong node is slower; the driver may know which is near"
        lines = ("nvidia-smi topo -m",) if facts.has_gpu else ()
        return Finding(topic, "unseen", seen, means, lines, (_NUMA,))
    return _numa_of_devices(facts)


def _numa_of_devices(facts: MachineFacts) -> Finding:
    """Compares the NUMA nodes of devices with those where this process may run."""
    topic, sources = "NUMA", (_NUMA, _NUMA_PINNED)
    status = facts.machine.read("proc/self/status")
    allowed = parse.status_list(status, "Cpus_allowed_list")
    here = sorted(n for n, node in facts.nodes.items() if node.processors & allowed)
    places: dict[int, list[int]] = {}
    for number, device in enumerate(facts.accelerators):
        assert device.node is not None
        places.setdefault(device.node, []).append(number)
    where = "; ".join(
        f"{_devices(facts.accelerators, numbers)} at node {node}"
        for node, numbers in sorted(places.items())
    )
    if not here:
        means = "it is not known where this process may run"
        return Finding(topic, "unseen", where, means, sources=(_PROC,))
    seen = f"{where}; this process may run on {_numbers(here)}"
    if here == sorted(places) and len(here) == 1:
        return Finding(topic, "good", seen, "host memory is near", sources=sources)
    means = (
        "host memory belongs to the node whose processor first writes it, and stays "
        "there once it is pinned. From the other node a GB200 loads 115 GB/s instead "
        "of 330"
    )
    out_of_reach = sorted(places.keys() - set(here))
    if out_of_reach:
        means += f". This process may not run on {_numbers(out_of_reach)}"
        lines = _ask_for_processors(facts, out_of_reach)
        sources = (*sources, _BINDING)
        return Finding(topic, "fix", seen, means, lines, sources)
    lines = tuple(
        f"{_choose(facts, places, node)}numactl --cpunodebind={node} "
        f"--preferred={node} python train.py"
        for node in sorted(places)
    )
    if len(places) == 1:
        return Finding(topic, "fix", seen, means, lines, sources)
    if facts.accelerators[0].vendor == "google":
        means += ". One process drives all chips of a host, so you cannot choose"
        return Finding(topic, "note", seen, means, (), sources)
    means += ". Start one process for each node, so that its memory is near"
    return Finding(topic, "note", seen, means, lines, sources)


def _ask_for_processors(facts: MachineFacts, wanted: list[int]) -> tuple[str, ...]:
    """Lines that ask for processors of the wanted nodes."""
    if "slurm" in facts.machine.read("proc/self/cgroup"):
        return ("sbatch --gres-flags=enforce-binding ...",)
    path = "/sys/devices/system/node/node"
    names = ",".join(f"$(cat {path}{node}/cpulist)" for node in wanted)
    memories = ",".join(map(str, wanted))
    return (f"docker run --cpuset-cpus={names} --cpuset-mems={memories} ...",)


def _choose(facts: MachineFacts, places: dict[int, list[int]], node: int) -> str:
    """The variable that gives a process the devices of a node; "" if it has all."""
    if len(places) == 1:
        return ""
    numbers = ",".join(str(facts.numbers[i]) for i in places[node])
    vendor = facts.accelerators[0].vendor
    if vendor == "nvidia":
        return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers} "
    return f"HIP_VISIBLE_DEVICES={numbers} " if vendor == "amd" else ""


def _devices(devices: list[Accelerator], numbers: list[int]) -> str:
    names = ", ".join(devices[n].address or str(n) for n in numbers)
    return f"{len(numbers)} device{'s' * (len(numbers) > 1)} ({names})"


def _numbers(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
