"""Findings about the devices, their memory, the link and `fit`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from optax_offload import _plan
from optax_offload._ground.units import GIB, size_text
from optax_offload._machine.findings import Finding, MachineFacts
from optax_offload.aot import CHIPS, GPUS_PER_HOST, Chip, Target

_INSTALL = "docs.jax.dev/en/latest/installation.html"
_GPU_MEMORY = "docs.jax.dev/en/latest/201/gpu-memory.html"
_COPIES = "github.com/openxla/xla/issues/46231"
# Of `pcie.link.width.current`, in `nvidia-smi --help-query-gpu`.
_LANES = "github.com/netdata/netdata/issues/10362"
_C2C = "arxiv.org/abs/2408.11556"
# JAX's CUDA 13 wheels need this driver, those for CUDA 12 an older one.
_CUDA_13_DRIVER = 580
# For each vendor: what JAX_PLATFORMS calls its devices, a regex of its plugins' names,
# and the extra of jax that installs them.
_PLUGINS = {
    "nvidia": ({"cuda", "gpu"}, r"jax[-_]cuda\d+[-_]plugin", "cuda13"),
    "google": ({"tpu"}, "libtpu", "tpu"),
    "amd": ({"rocm", "gpu"}, r"jax[-_]rocm\d+[-_]plugin", "rocm7-local"),
}
_COPIES_SINCE = (0, 11, 1)
# Of a link's documented bandwidth so much is measured, or something is wrong.
_USUAL_SHARE = 0.6
_TPU_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# How clouds lay out the chips of one host.
_GRIDS_OF_HOSTS = {
    2: {1: (1, 1), 4: (2, 2), 8: (2, 4)},
    3: {1: (1, 1, 1), 4: (2, 2, 1)},
}


def about_devices(facts: MachineFacts) -> Iterator[Finding]:
    """The findings about the devices."""
    yield _devices(facts)
    yield _versions(facts)
    if facts.device_name:
        yield _memories(facts)
        if facts.one_memory is None:
            yield _link(facts)


def about_fit(facts: MachineFacts) -> Finding:
    """The finding about what `optax-offload fit` would assume of this machine."""
    topic = "fit"
    if not facts.has_somewhere_to_offload:
        seen = "offloading does not help on this machine"
        means = "you can still plan for other machines here"
        return Finding(topic, "note", seen, means, (_fit("h100"),), ())
    target, exact = target_of(facts)
    if target is None:
        seen = "no device was found"
        if facts.device_name:
            seen = f"fit does not know {facts.device_name}"
        means = "name the chip to plan for; it need not be attached"
        lines = ("optax-offload targets", _fit("h100"))
        return Finding(topic, "note", seen, means, lines)
    options = ""
    free = facts.free_bytes
    if free is not None and free >= 2 * GIB:
        options += f" --host-memory {free * 9 // 10 // GIB}GiB"
    if facts.jax.link_bytes_per_second is not None:
        options += " --measure-link"
    budget = size_text(_plan.default_budget_bytes(target))
    chip = target.chip
    link = facts.jax.link_bytes_per_second or chip.link.bytes_per_second
    seen = (
        f"target {target.name}, {budget} on each device, a link of "
        f"{_gb_per_second(link)}"
    )
    means = "fit would plan for this machine with these figures"
    if not exact:
        means = (
            f"fit does not know {facts.device_name}. The most similar chip is "
            f"{chip.name}, with {size_text(chip.memory_bytes)}. Add --budget if yours "
            "has less"
        )
    lines = (_fit(target.name, options),)
    return Finding(topic, "good" if exact else "note", seen, means, lines)


def target_of(facts: MachineFacts) -> tuple[Target | None, bool]:
    """The target that stands for this machine's devices, and whether it is theirs."""
    chip, exact = chip_of(facts.device_name)
    if chip is None:
        return None, False
    if chip.platform == "gpu":
        count = min(max(facts.device_count, 1), GPUS_PER_HOST)
        return Target(f"{chip.name}:{count}"), exact
    one = Target(chip.name)
    dimensions = len(one.name.partition(":")[2].split("x"))
    chips = facts.device_count // one.device_count
    device = facts.jax.accelerator
    grid = device.grid[:dimensions] if device is not None else ()
    if len(grid) != dimensions or math.prod(grid) < chips:
        grid = _GRIDS_OF_HOSTS[dimensions].get(chips, (1,) * dimensions)
    return Target(f"{chip.name}:{'x'.join(map(str, grid))}"), exact


def chip_of(kind: str) -> tuple[Chip | None, bool]:
    """The chip of that name, or else the most similar one."""
    if kind in _TPU_KINDS:
        return CHIPS[_TPU_KINDS[kind]], True
    gpus = {
        getattr(c, "description", ""): c for c in CHIPS.values() if c.platform == "gpu"
    }
    named = [
        c for name, c in gpus.items() if name == kind or name.startswith(f"{kind} ")
    ]
    if named:
        return named[0], True
    for name, chip in gpus.items():
        # Of "NVIDIA A100-SXM4-40GB" the A100; a card's size tells two apart.
        model = re.search(r"RTX \d+|\b[A-Z]+\d+\b", name)
        size = re.search(r"\d+ ?GB", name)
        alike = model and re.search(rf"\b{model[0]}\b", kind)
        if alike and (size is None or "A100" not in name or size[0] in kind):
            return chip, False
    return None, False


def _fit(target: str, options: str = "") -> str:
    return f"optax-offload fit my_steps:make_step --target {target}{options}"


def _devices(facts: MachineFacts) -> Finding:
    topic = "devices"
    device = facts.jax.accelerator
    if not facts.device_name:
        seen = "no accelerator was found (NVIDIA, AMD, TPU or Apple)"
        means = (
            "you can still try offload here, because JAX on the CPU has both memory "
            "kinds, and plan for other machines"
        )
        if facts.jax.error:
            means += f". JAX found no devices: {facts.jax.error}"
        return Finding(topic, "unseen", seen, means, sources=(_INSTALL,))
    first = facts.accelerators[0] if facts.accelerators else None
    memory = first.memory_bytes if first else None
    each = f", {size_text(memory)} on each" if memory else ""
    driver = f", driver {first.driver}" if first and first.driver else ""
    seen = f"{facts.device_count} x {facts.device_name}{each}{driver}"
    if device is None:
        return _unused(facts, seen)
    kinds = ", ".join(device.memory_kinds)
    if "pinned_host" not in device.memory_kinds:
        means = f"JAX uses it, but it has no pinned_host to offload to, only {kinds}"
        return Finding(topic, "stop", seen, means, sources=(_INSTALL,))
    means = f"JAX uses {'them' if device.count > 1 else 'it'}; memory kinds: {kinds}"
    return Finding(topic, "good", seen, means)


def _unused(facts: MachineFacts, seen: str) -> Finding:
    """A device that JAX does not use, or was not asked about."""
    topic = "devices"
    if not facts.jax.devices and not facts.jax.error:
        means = "JAX was not asked"
        return Finding(topic, "unseen", seen, means, sources=(_INSTALL,))
    why = f" ({facts.jax.error})" if facts.jax.error else ""
    first = facts.accelerators[0]
    if first.vendor == "apple":
        means = f"JAX does not use its GPU{why}, so training runs on the CPU"
        return Finding(topic, "note", seen, means, sources=(_INSTALL,))
    platforms, plugin, extra = _PLUGINS[first.vendor]
    chosen = facts.environment.get("JAX_PLATFORMS", "")
    if chosen and not platforms & set(chosen.split(",")):
        lines = ("unset JAX_PLATFORMS",)
        means = f"JAX does not use it, because JAX_PLATFORMS={chosen} forbids it"
        return Finding(topic, "fix", seen, means, lines, (_INSTALL,))
    if any(re.match(plugin, name) for name in facts.jax.versions):
        means = f"JAX does not use it, although its plugin is installed{why}"
        ask = "python -c 'import jax; print(jax.devices())'"
        lines = (f"JAX_PLATFORMS={min(platforms)} {ask}",)
        return Finding(topic, "fix", seen, means, lines, (_INSTALL,))
    major = first.driver.partition(".")[0]
    if extra == "cuda13" and major.isdecimal() and int(major) < _CUDA_13_DRIVER:
        extra = "cuda12"
    lines = (f'pip install -U "jax[{extra}]"',)
    means = f"JAX does not use it, because its plugin is not installed{why}"
    return Finding(topic, "fix", seen, means, lines, (_INSTALL,))


def _versions(facts: MachineFacts) -> Finding:
    topic = "JAX"
    versions = facts.jax.versions
    if "jax" not in versions:
        means = "its version is not known"
        return Finding(topic, "unseen", "JAX was not asked", means)
    seen = ", ".join(f"{name} {version}" for name, version in versions.items())
    numbers = tuple(int(x) for x in re.findall(r"\d+", versions["jax"])[:3])
    if facts.has_gpu and numbers < _COPIES_SINCE:
        means = (
            "with this version kernels move rows of host memory on GPUs, and nothing "
            "else computes meanwhile. From 0.11.1 on (Python 3.12) copy engines do"
        )
        return Finding(topic, "fix", seen, means, ("pip install -U jax",), (_COPIES,))
    means = "everything in this library works with it"
    return Finding(topic, "good", seen, means)


def _memories(facts: MachineFacts) -> Finding:
    topic, name = "memories", facts.device_name
    one = facts.one_memory
    if one is not None:
        seen = f"{name} ({one.name}): host and device share one memory"
        means = (
            "offloading only copies state within it and frees nothing, so leave it "
            "out. Updates in the backward pass (oo.jit) and codecs still save memory. "
            "Memory that JAX preallocates is missing on the host"
        )
        lines = ("export XLA_PYTHON_CLIENT_PREALLOCATE=false",) * facts.has_gpu
        sources = (one.source, *((_GPU_MEMORY,) if facts.has_gpu else ()))
        return Finding(topic, "stop", seen, means, lines, sources)
    if facts.is_coherent:
        seen = f"{name} has its own memory, coherent with the host's"
        means = "offloading frees it, over a link several times as fast as PCI Express"
        return Finding(topic, "good", seen, means, sources=(_C2C,))
    # nvidia-smi says of no GPU that shares its host's memory how much it has.
    has_own = any(x.memory_bytes for x in facts.accelerators)
    if has_own or chip_of(name)[0] is not None:
        seen = f"{name} has its own memory"
        return Finding(topic, "good", seen, "offloading frees it")
    seen = f"{name} may share the host's memory; this command does not know it"
    means = "if it does, offload gains nothing"
    return Finding(topic, "unseen", seen, means)


def _link(facts: MachineFacts) -> Finding:
    topic = "link"
    chip, exact = chip_of(facts.device_name)
    documented = ""
    sources: tuple[str, ...] = ()
    if chip is not None:
        of = "it" if exact else chip.name
        per_second = _gb_per_second(chip.link.bytes_per_second)
        documented = f"{per_second} are documented for {of}"
        sources = (chip.link_source,)
    # Memory of a coherent device is not reached through its slot.
    devices = [] if facts.is_coherent else facts.accelerators
    slots = [x.slot for x in devices if x.slot is not None]
    narrow = next((x for x in slots if x.lanes < x.most_lanes), None)
    measured = facts.jax.link_bytes_per_second
    parts = [documented] if documented else []
    if slots:
        width = f"its slot of {slots[0].lanes} lanes carries "
        parts.append(width + _gb_per_second(slots[0].bytes_per_second))
    if measured is None:
        why = facts.jax.link_error
        seen = f"not measured ({why})" if why else "not measured"
    else:
        seen = f"{_gb_per_second(measured)}, measured with loads and stores at once"
    lanes = f"{narrow.lanes} of its {narrow.most_lanes} lanes" if narrow else ""
    level = "good"
    if measured is None:
        level = "unseen"
        if lanes:
            parts.append(f"only {lanes} are in use, perhaps because it is idle")
            sources = (*sources, _LANES)
    elif chip and measured < _USUAL_SHARE * chip.link.bytes_per_second:
        level = "fix"
        causes = "check NUMA, and whether something else uses the link"
        if lanes:
            causes = f"only {lanes} are in use; {causes}"
        parts.append(f"less than usual: {causes}")
    means = "; ".join(parts) or "no documented bandwidth is known for it"
    return Finding(topic, level, seen, means, sources=sources)


def _gb_per_second(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.0f} GB/s each way"
