"""The chips that `optax_offload.aot` knows: one row each, all that is known about it.

To add a chip, add a row; nothing else in the repository repeats a figure of one. A
figure is a documented peak, which nothing attains: what share of it is reached is the
business of whoever uses it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from optax_offload._ground.units import GIB, MIB
from optax_offload._host.link import LINK, Link
from optax_offload.aot.chip import Architecture, Chip, Gpu, Tpu

# GPUs of one host, which share its memory: as in NVIDIA's DGX and HGX machines, and in
# the machines that clouds lend.
GPUS_PER_HOST = 8


# The compiler's own numbers: the HBM of a device less what its "Total hbm usage" calls
# "reserved", read from programs that are too large by a few KB. They differ a little
# between versions of libtpu (0.0.42 and 0.0.51 tried, the larger reserve taken).
_LIBTPU = "libtpu 0.0.42 and 0.0.51, from a program that is too large"
_SCALING_BOOK = "jax-ml.github.io/scaling-book/tpus"

_ALL_TPUS = (
    Tpu(
        name="v4",
        dimensions=3,
        # One device for each chip, as JAX has it on a real v4; libtpu's default is two.
        topology_options={"chip_config_name": "megacore"},
        memory_bytes=32 * GIB - 1280 * MIB,
        memory_source=_LIBTPU,
        link=Link(16e9, LINK.latency_seconds),
        link_source=_SCALING_BOOK,
        flops_per_second=275e12,
        float32_flops_per_second=275e12,
        flops_source="cloud.google.com/tpu/docs/v4",
        memory_bytes_per_second=1200e9,
        memory_bandwidth_source="cloud.google.com/tpu/docs/v4",
    ),
    Tpu(
        name="v5e",
        dimensions=2,
        one_host_chips=8,
        memory_bytes=16 * GIB - 258 * MIB,
        memory_source=_LIBTPU,
        link=Link(15e9, LINK.latency_seconds),
        link_source=_SCALING_BOOK,
        flops_per_second=197e12,
        float32_flops_per_second=197e12,
        flops_source="cloud.google.com/tpu/docs/v5e",
        memory_bytes_per_second=819e9,
        memory_bandwidth_source="cloud.google.com/tpu/docs/v5e",
    ),
    Tpu(
        name="v5p",
        dimensions=3,
        memory_bytes=96 * GIB - 279 * MIB,
        memory_source=_LIBTPU,
        link=Link(15e9, LINK.latency_seconds),
        link_source=_SCALING_BOOK,
        flops_per_second=459e12,
        float32_flops_per_second=459e12,
        flops_source="cloud.google.com/tpu/docs/v5p",
        memory_bytes_per_second=2765e9,
        memory_bandwidth_source="cloud.google.com/tpu/docs/tpu7x, its column v5p",
    ),
    Tpu(
        name="v6e",
        dimensions=2,
        one_host_chips=8,
        memory_bytes=31 * GIB + 248 * MIB,  # 31.5 GiB less 264 MiB
        memory_source=_LIBTPU,
        link=Link(32e9, LINK.latency_seconds),
        link_source=_SCALING_BOOK,
        flops_per_second=918e12,
        float32_flops_per_second=918e12,
        flops_source="cloud.google.com/tpu/docs/v6e",
        memory_bytes_per_second=1638e9,
        memory_bandwidth_source="cloud.google.com/tpu/docs/tpu7x, its column v6e",
    ),
    Tpu(
        name="tpu7x",
        dimensions=3,
        devices_per_chip=2,
        memory_bytes=95 * GIB - 268 * MIB,
        memory_source=_LIBTPU,
        # A chip has two devices; no document gives its link.
        link=Link(32e9, LINK.latency_seconds),
        link_source="assumed, as of v6e",
        # Half a chip's, as a device is half a chip.
        flops_per_second=2307e12 / 2,
        float32_flops_per_second=2307e12 / 2,
        flops_source="cloud.google.com/tpu/docs/tpu7x",
        memory_bytes_per_second=7380e9 / 2,
        memory_bandwidth_source="cloud.google.com/tpu/docs/tpu7x",
    ),
)

# From the CUDA programming guide, "Technical Specifications per Compute Capability".
_TURING = Architecture((7, 5), 64, 1024, 64 * 1024)
_AMPERE = Architecture((8, 0), 64, 2048, 164 * 1024)
_AMPERE_86 = Architecture((8, 6), 128, 1536, 100 * 1024)
_ADA = Architecture((8, 9), 128, 1536, 100 * 1024)
_HOPPER = Architecture((9, 0), 128, 2048, 228 * 1024)
_BLACKWELL = Architecture((10, 0), 128, 2048, 228 * 1024)
_BLACKWELL_RTX = Architecture((12, 0), 128, 1536, 100 * 1024)

# Half of what NVIDIA gives for both ways together.
_PCIE_3 = Link(16e9, LINK.latency_seconds)
_PCIE_3_SOURCE = "PCIe 3.0 x16, 32 GB/s both ways together"
_PCIE_4 = Link(32e9, LINK.latency_seconds)
_PCIE_4_SOURCE = "PCIe 4.0 x16, 64 GB/s both ways together"
_PCIE_5 = Link(64e9, LINK.latency_seconds)
_PCIE_5_SOURCE = "PCIe 5.0 x16, 128 GB/s both ways together"
_A100 = "nvidia.com/en-us/data-center/a100"
_H100 = "nvidia.com/en-us/data-center/h100"
_H200 = "nvidia.com/en-us/data-center/h200"
_B200 = "nvidia.com/en-us/data-center/dgx-b200"
_HGX = "nvidia.com/en-us/data-center/hgx"
_L4 = "nvidia.com/en-us/data-center/l4"
_L40S = "nvidia.com/en-us/data-center/l40s"
_A10 = "nvidia.com/en-us/data-center/products/a10-gpu"
_T4 = "nvidia.com/en-us/data-center/tesla-t4"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU architecture whitepaper, tables 9 and 10"
_ADA_PAPER = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_BLACKWELL_PAPER = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"
# Where XLA itself describes a chip, memory, its bandwidth, cores, cache and clock are
# those of its description (in openxla/xla), else those of `deviceQuery` on the chip.
_XLA = "openxla/xla, xla/backends/gpu/target_config/specs/"
_DEVICE_QUERY = "deviceQuery on the chip"
# Else memory is what PyTorch's error says that a chip has under Linux, rounded down to
# a hundredth of a GiB, and cores, cache and clock are those of the page or paper that
# is the source of the operations.
_PYTORCH = "PyTorch's error of memory on the chip: "

_ALL_GPUS = (
    Gpu(
        name="a100-40",
        description="NVIDIA A100-SXM4-40GB",
        architecture=_AMPERE,
        core_count=108,
        l2_cache_bytes=40 * MIB,
        clock_ghz=1.41,
        memory_bytes=42331013120,
        memory_source=f"{_XLA}a100_sxm_40.txtpb",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_A100}",
        flops_per_second=312e12,
        float32_flops_per_second=156e12,
        flops_source=_A100,
        memory_bytes_per_second=1555.2e9,
        memory_bandwidth_source=f"{_XLA}a100_sxm_40.txtpb",
    ),
    Gpu(
        name="a100-80",
        description="NVIDIA A100-SXM4-80GB",
        architecture=_AMPERE,
        core_count=108,
        l2_cache_bytes=40 * MIB,
        clock_ghz=1.41,
        memory_bytes=85100068864,
        memory_source=f"{_XLA}a100_sxm_80.txtpb",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_A100}",
        flops_per_second=312e12,
        float32_flops_per_second=156e12,
        flops_source=_A100,
        memory_bytes_per_second=2039.0e9,
        memory_bandwidth_source=f"{_XLA}a100_sxm_80.txtpb",
    ),
    Gpu(
        name="h100",
        description="NVIDIA H100 80GB HBM3",
        architecture=_HOPPER,
        core_count=132,
        l2_cache_bytes=50 * MIB,
        clock_ghz=1.98,
        memory_bytes=84942979072,
        memory_source=f"{_XLA}h100_sxm.txtpb",
        link=_PCIE_5,
        link_source=f"{_PCIE_5_SOURCE}: {_H100}",
        flops_per_second=989e12,
        float32_flops_per_second=495e12,
        flops_source=_H100,
        memory_bytes_per_second=3352.3e9,
        memory_bandwidth_source=f"{_XLA}h100_sxm.txtpb",
    ),
    Gpu(
        name="h200",
        description="NVIDIA H200 141GB HBM3e",
        architecture=_HOPPER,
        core_count=132,
        l2_cache_bytes=50 * MIB,
        clock_ghz=1.98,
        memory_bytes=151397597184,
        memory_source=f"{_XLA}h200.txtpb",
        link=_PCIE_5,
        link_source=f"{_PCIE_5_SOURCE}: {_H200}",
        flops_per_second=989e12,
        float32_flops_per_second=495e12,
        flops_source=_H200,
        memory_bytes_per_second=4800.0e9,
        memory_bandwidth_source=f"{_XLA}h200.txtpb",
    ),
    Gpu(
        name="b200",
        description="NVIDIA B200",
        architecture=_BLACKWELL,
        core_count=148,
        l2_cache_bytes=round(126.5 * MIB),
        clock_ghz=1.965,
        memory_bytes=191514411008,
        memory_source=f"{_XLA}b200.txtpb",
        link=_PCIE_5,
        link_source=f"{_PCIE_5_SOURCE}: {_B200}",
        flops_per_second=2250e12,
        float32_flops_per_second=1125e12,
        flops_source=f"{_B200}; in TF32, {_HGX}",
        memory_bytes_per_second=7672.3e9,
        memory_bandwidth_source=f"{_XLA}b200.txtpb",
    ),
    Gpu(
        name="l4",
        description="NVIDIA L4",
        architecture=_ADA,
        core_count=58,
        l2_cache_bytes=48 * MIB,
        clock_ghz=2.04,
        memory_bytes=23612293120,
        memory_source=_DEVICE_QUERY,
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_L4}",
        flops_per_second=121e12,
        float32_flops_per_second=60.5e12,
        flops_source=_L4,
        memory_bytes_per_second=300.0e9,
        memory_bandwidth_source=_L4,
    ),
    Gpu(
        name="t4",
        description="Tesla T4",
        architecture=_TURING,
        core_count=40,
        l2_cache_bytes=4 * MIB,
        clock_ghz=1.59,
        memory_bytes=int(14.75 * GIB),
        memory_source="TensorFlow's log on the chip: NVIDIA/DALI#1813",
        link=_PCIE_3,
        link_source=f"{_PCIE_3_SOURCE}: {_T4}",
        # It has no units for bfloat16 nor TF32: both are computed in float32.
        flops_per_second=8.1e12,
        float32_flops_per_second=8.1e12,
        flops_source=f"{_T4}: single precision",
        memory_bytes_per_second=320.0e9,
        memory_bandwidth_source=_T4,
    ),
    Gpu(
        name="a10",
        description="NVIDIA A10",
        architecture=_AMPERE_86,
        core_count=72,
        l2_cache_bytes=6 * MIB,
        clock_ghz=1.695,
        # What nvidia-smi shows, less as much as of an L4 no program can have.
        memory_bytes=(23028 - 516) * MIB,
        memory_source="nvidia-smi on the chip: modal-labs/modal-client#2797",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_A10}",
        flops_per_second=125e12,
        float32_flops_per_second=62.5e12,
        flops_source=_A10,
        memory_bytes_per_second=600.0e9,
        memory_bandwidth_source=_A10,
    ),
    Gpu(
        name="a6000",
        description="NVIDIA RTX A6000",
        architecture=_AMPERE_86,
        core_count=84,
        l2_cache_bytes=6 * MIB,
        clock_ghz=1.8,
        memory_bytes=51041271808,
        memory_source=f"{_XLA}a6000.txtpb",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_GA102_PAPER}",
        flops_per_second=154.8e12,
        float32_flops_per_second=77.4e12,
        flops_source=_GA102_PAPER,
        memory_bytes_per_second=768.1e9,
        memory_bandwidth_source=f"{_XLA}a6000.txtpb",
    ),
    Gpu(
        name="l40s",
        description="NVIDIA L40S",
        architecture=_ADA,
        core_count=142,
        l2_cache_bytes=96 * MIB,
        clock_ghz=2.52,
        memory_bytes=int(44.43 * GIB),
        # Of an RTX 6000 Ada, which has as much.
        memory_source=f"{_PYTORCH}DINGYANB/MTVCrafter#21",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_L40S}",
        flops_per_second=362e12,
        float32_flops_per_second=183e12,
        flops_source=_L40S,
        memory_bytes_per_second=864.0e9,
        memory_bandwidth_source=_L40S,
    ),
    Gpu(
        name="rtx3060",
        description="NVIDIA GeForce RTX 3060",
        architecture=_AMPERE_86,
        core_count=28,
        l2_cache_bytes=3 * MIB,
        clock_ghz=1.777,
        memory_bytes=int(11.75 * GIB),
        memory_source=f"{_PYTORCH}Kunhao-Liu/StyleGaussian#12",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_GA102_PAPER}",
        flops_per_second=25.5e12,
        float32_flops_per_second=12.7e12,
        flops_source=f"{_GA102_PAPER}: an RTX 3090's, by cores and clock",
        memory_bytes_per_second=360.0e9,
        memory_bandwidth_source="nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3060-3060ti",
    ),
    Gpu(
        name="rtx3090",
        description="NVIDIA GeForce RTX 3090",
        architecture=_AMPERE_86,
        core_count=82,
        l2_cache_bytes=6 * MIB,
        clock_ghz=1.695,
        memory_bytes=int(23.69 * GIB),
        memory_source=f"{_PYTORCH}clovaai/deep-text-recognition-benchmark#386",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_GA102_PAPER}",
        flops_per_second=71e12,
        float32_flops_per_second=35.6e12,
        flops_source=_GA102_PAPER,
        memory_bytes_per_second=936.0e9,
        memory_bandwidth_source=_GA102_PAPER,
    ),
    Gpu(
        name="rtx4070ti",
        description="NVIDIA GeForce RTX 4070 Ti",
        architecture=_ADA,
        core_count=60,
        l2_cache_bytes=48 * MIB,
        clock_ghz=2.61,
        memory_bytes=int(11.73 * GIB),
        memory_source=f"{_PYTORCH}OpenLMLab/LOMO#17",
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_ADA_PAPER}",
        flops_per_second=80.2e12,
        float32_flops_per_second=40.1e12,
        flops_source=f"{_ADA_PAPER}: an RTX 4090's, by cores and clock",
        memory_bytes_per_second=504.0e9,
        memory_bandwidth_source="nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4070-4070ti",
    ),
    Gpu(
        name="rtx4090",
        description="NVIDIA GeForce RTX 4090",
        architecture=_ADA,
        core_count=128,
        l2_cache_bytes=72 * MIB,
        clock_ghz=2.52,
        memory_bytes=25250627584,
        memory_source=_DEVICE_QUERY,
        link=_PCIE_4,
        link_source=f"{_PCIE_4_SOURCE}: {_ADA_PAPER}",
        flops_per_second=165.2e12,
        float32_flops_per_second=82.6e12,
        flops_source=_ADA_PAPER,
        # 384 bits at 10501 MHz, at double data rate.
        memory_bytes_per_second=1008.1e9,
        memory_bandwidth_source=f"{_DEVICE_QUERY}: bus width and memory clock",
    ),
    Gpu(
        name="rtx5090",
        description="NVIDIA GeForce RTX 5090",
        architecture=_BLACKWELL_RTX,
        core_count=170,
        l2_cache_bytes=96 * MIB,
        clock_ghz=2.407,
        memory_bytes=int(31.36 * GIB),
        memory_source=f"{_PYTORCH}TrajectoryCrafter/TrajectoryCrafter#20",
        link=_PCIE_5,
        link_source=f"{_PCIE_5_SOURCE}: {_BLACKWELL_PAPER}",
        flops_per_second=209.5e12,
        float32_flops_per_second=104.8e12,
        flops_source=_BLACKWELL_PAPER,
        memory_bytes_per_second=1792.0e9,
        memory_bandwidth_source=_BLACKWELL_PAPER,
    ),
)

# Links of chips that were measured, by `python -m benchmarks.chip`: name, bandwidth,
# latency and source of each.
_MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text())
_C = TypeVar("_C", bound=Chip)


def with_measured(chip: _C, measured: Mapping[str, Mapping[str, Any]]) -> _C:
    """A chip with its measured link in place of the documented one, if it has one."""
    if chip.name not in measured:
        return chip
    found = measured[chip.name]
    link = Link(found["bytes_per_second"], found["latency_seconds"])
    return dataclasses.replace(chip, link=link, link_source=found["source"])


TPUS = {chip.name: with_measured(chip, _MEASURED) for chip in _ALL_TPUS}
GPUS = {chip.name: with_measured(chip, _MEASURED) for chip in _ALL_GPUS}
CHIPS: dict[str, Chip] = {**TPUS, **GPUS}
