"""Peaks of whole steps: of the device's own count, beside what the program says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from benchmarks.chip.machine import host_memory
from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import Training, counted_peak, halved
from benchmarks.common.workloads import WORKLOADS, Workload, decoder, gated
from optax_offload import aot

# Modes by the workload they are measured in, most valuable first.
MEASURED = {
    "decoder_scanned": [
        *("no offload", "ours", "fused", "parameters", "residuals", "recipe"),
        *("fused twice", "fused stored", "int8 fused", "least"),
    ],
    "gated": ["no offload", "ours", "fused", "residuals", "six bytes"],
}


def workload(name: str, dry: bool) -> Workload:
    """One of the benchmarks' workloads, or a toy of its kind."""
    if not dry:
        return WORKLOADS[name]()
    if name == "gated":
        return gated(tokens=32, layers=3, width=64, inner=256, vocabulary=128)
    return decoder(True, 3, width=64, heads=2, vocabulary=128, batch=2, context=32)


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each workload and mode; of toys not all, as each is a process."""
    modes = MEASURED
    if setting.dry:
        modes = {"gated": ["no offload", "residuals"]}
    return {
        f"{name}/{mode}": functools.partial(measure, setting, name, mode)
        for name in modes
        for mode in modes[name]
    }


def measure(setting: Setting, name: str, mode: str) -> Figures:
    """Two steps in a fresh process: what is counted since it began."""
    work = workload(name, setting.dry)
    if mode.startswith("six bytes"):
        work = halved(work)
    if setting.on_paper:
        return predicted(aot.peak(setting.compiled(work, mode)))
    resident, free = resident_bytes("VmRSS"), host_memory()[0]
    training = Training(work, mode)
    training.make()
    making = counted_peak()
    training.run(2)
    counted = counted_peak()
    return {
        **predicted(training.peak()),
        "measured_bytes": counted,
        "making_bytes": making,
        "measured_host_bytes": free - host_memory()[0],
        "resident_bytes": resident_bytes("VmHWM") - resident,
        "finite": training.is_finite(),
        "made_by": training.made_by,
    }


def predicted(peak: aot.Peak) -> Figures:
    """What `aot.peak` says."""
    return {
        "predicted_bytes": peak.peak_bytes,
        "predicted_host_bytes": peak.host_peak_bytes,
    }


def resident_bytes(name: str) -> int:
    """A size of this process by the kernel, without what a driver pinned for it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


PEAKS = Part(
    "peaks",
    minutes=6,
    case_seconds=120,
    cases=cases,
    each_alone=True,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.9"},
    compiles=True,
)
