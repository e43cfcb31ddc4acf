"""Peaks of whole steps: of the device's own count, beside what the program says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax

import optax_offload as oo
from benchmarks.chip.machine import free_bytes
from benchmarks.chip.setting import Case, Figures, Part, Setting
from benchmarks.chip.training import Training, counted_peak, gated_or_toy, halved
from benchmarks.common.workloads import WORKLOADS, Workload
from examples import models

LLAMA = "the shape of Llama 3 8B"
# Modes by the workload they are measured in, most valuable first.
MEASURED = {
    "decoder_scanned": [
        *("no offload", "ours", "fused", "parameters", "residuals", "recipe"),
        *("fused twice", "fused stored", "int8 fused", "least"),
    ],
    "gated": ["no offload", "ours", "fused", "residuals", "six bytes"],
    LLAMA: ["six bytes"],
}
# Of toys not all, as each is a process.
TOYS = {"gated": ["no offload", "six bytes"], LLAMA: ["ours"]}


def workload(name: str, mode: str, dry: bool) -> Workload:
    """One of the benchmarks' workloads, or a model people know; or a toy of it."""
    if name == LLAMA:
        return llama(dry)
    work = gated_or_toy(dry) if dry else WORKLOADS[name]()
    return halved(work) if mode == "six bytes" else work


def llama(dry: bool) -> Workload:
    """The model of `examples/models.py`, with random weights in bfloat16."""
    shape = models.Shape(3, 64, 4, 2, 16, 128, 256) if dry else models.LLAMA3_8B
    tokens = jax.ShapeDtypeStruct((1, (32 if dry else 4096) + 1), "int32")
    module: Any = models.Decoder(shape)
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(1.0), oo.master_weights(optax.adamw(3e-4))
    )
    return Workload(
        lambda params, tokens: module.apply({"params": params}, tokens),
        models.parameter_shapes(module, (tokens,)),
        tokens,
        optimizer,
    )


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each workload and mode."""
    return {
        f"{name}/{mode}": functools.partial(measure, setting, name, mode)
        for name, modes in (TOYS if setting.dry else MEASURED).items()
        for mode in modes
    }


def measure(setting: Setting, name: str, mode: str) -> Figures:
    """Two steps in a fresh process: what is counted since it began."""
    work = workload(name, mode, setting.dry)
    free = free_bytes()
    training = Training(work, mode)
    peak = training.peak()
    setting.check_host(peak)
    training.make()
    making = counted_peak()
    training.run(1)
    seconds = training.run(1)
    counted = counted_peak()
    return {
        "predicted_bytes": peak.peak_bytes,
        "predicted_host_bytes": peak.host_peak_bytes,
        "measured_bytes": counted,
        "making_bytes": making,
        "measured_host_bytes": free - free_bytes(),
        "seconds": seconds,
        "finite": training.is_finite(),
    }


PART = Part(
    "peaks",
    minutes=6,
    case_seconds=120,
    cases=cases,
    each_alone=True,
    environment={"XLA_CLIENT_MEM_FRACTION": "0.9"},
)
