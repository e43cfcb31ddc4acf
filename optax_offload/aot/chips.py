"""What chips are documented to do: the link to the host, and matrix products."""

from __future__ import annotations

from typing import NamedTuple

_SCALING_BOOK = "jax-ml.github.io/scaling-book/tpus"
_PCIE_4 = "PCIe 4.0 x16, 64 GB/s both ways together"
_PCIE_5 = "PCIe 5.0 x16, 128 GB/s both ways together"
_H100 = "nvidia.com/en-us/data-center/h100"
_H200 = "nvidia.com/en-us/data-center/h200"
_A100 = "nvidia.com/en-us/data-center/a100"
_B200 = "nvidia.com/en-us/data-center/dgx-b200"
_L4 = "nvidia.com/en-us/data-center/l4"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"


class Figures(NamedTuple):
    """Of one device.

    Attributes:
      link_bytes_per_second: to the host, and from it, each.
      link_source: where that is documented; "assumed" where it is not.
      flops_per_second: the peak of dense matrix products in bfloat16.
      flops_source: where that is documented.
    """

    link_bytes_per_second: float
    link_source: str
    flops_per_second: float
    flops_source: str


# Nothing attains them: see LINK_UTILIZATION and COMPUTE_UTILIZATION in `_cost.py`.
FIGURES: dict[str, Figures] = {
    "v4": Figures(16e9, _SCALING_BOOK, 275e12, "cloud.google.com/tpu/docs/v4"),
    "v5e": Figures(15e9, _SCALING_BOOK, 197e12, "cloud.google.com/tpu/docs/v5e"),
    "v5p": Figures(15e9, _SCALING_BOOK, 459e12, "cloud.google.com/tpu/docs/v5p"),
    "v6e": Figures(32e9, _SCALING_BOOK, 918e12, "cloud.google.com/tpu/docs/v6e"),
    # A chip has two devices; no document gives its link.
    "tpu7x": Figures(
        32e9,
        "assumed, as of v6e",
        2307e12 / 2,
        "cloud.google.com/tpu/docs/tpu7x",
    ),
    "a100-40": Figures(32e9, f"{_PCIE_4}: {_A100}", 312e12, _A100),
    "a100-80": Figures(32e9, f"{_PCIE_4}: {_A100}", 312e12, _A100),
    "h100": Figures(64e9, f"{_PCIE_5}: {_H100}", 989e12, _H100),
    "h200": Figures(64e9, f"{_PCIE_5}: {_H200}", 989e12, _H200),
    "b200": Figures(64e9, f"{_PCIE_5}: {_B200}", 2250e12, _B200),
    "l4": Figures(32e9, f"{_PCIE_4}: {_L4}", 121e12, _L4),
    "rtx4090": Figures(32e9, f"{_PCIE_4}: {_ADA}", 165.2e12, _ADA),
}


def figures(target_name: str) -> Figures:
    """Those of the chip of a target, such as ``"v5e:4x4"``."""
    return FIGURES[target_name.partition(":")[0]]
