"""Counting the matrix products of a compiled program, for the model of a device."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from optax_offload.aot._hlo import Computation, Instruction, Module

_NARROW_BYTES = 2


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One axis of a convolution: its three sizes, and how the window moves over it."""

    inputs: int
    kernel: int
    outputs: int
    stride: int
    padding: int
    left_dilation: int
    kernel_dilation: int


class Flops(NamedTuple):
    """Operations of matrix products, by what they multiply.

    Attributes:
      wide: Products of which a factor has more than 16 bits.
      narrow: Products of factors of 16 bits or less, at a chip's bfloat16 rate.
    """

    wide: int = 0
    narrow: int = 0


def flops(module: Module, computation: Computation, i: Instruction) -> Flops:
    """The multiply-adds, two operations each, of matrix products and convolutions."""
    inner = module.called(i)
    if inner is not None:
        found = [flops(module, inner, j) for j in inner]
        return Flops(sum(f.wide for f in found), sum(f.narrow for f in found))
    count = _flops(computation, i)
    if not count:
        return Flops()
    factors = [computation.instructions[o].arrays[0] for o in i.operands[:2]]
    # A TPU's compiler has float32 factors rounded where it multiplies them: the rate of
    # a chip for float32 at JAX's default precision says that.
    narrow = all(f.nbytes <= _NARROW_BYTES * f.size for f in factors)
    return Flops(narrow=count) if narrow else Flops(wide=count)


def _flops(computation: Computation, i: Instruction) -> int:
    if i.opcode == "dot":
        left = computation.instructions[i.operands[0]].arrays[0]
        contracted = i.integers("lhs_contracting_dims")
        return 2 * i.arrays[0].size * math.prod(left.dimensions[n] for n in contracted)
    if i.opcode == "convolution":
        return _convolution_flops(computation, i)
    if i.opcode == "custom-call" and "gemm" in (i.named("custom_call_target") or ""):
        # (m, k) by (k, n) is (m, n), whichever of them are transposed.
        m_k, k_n = (computation.instructions[o].arrays[0].size for o in i.operands[:2])
        m_n = i.arrays[0].size
        return 2 * math.isqrt(m_k * k_n * m_n)
    return 0


def _convolution_flops(computation: Computation, i: Instruction) -> int:
    """As XLA counts them: positions of the window that fall into padding are free.

    A TPU's batched matrix product is a convolution that is dilated such that all but
    the diagonal falls into it.
    """
    left, kernel = (computation.instructions[o].arrays[0] for o in i.operands[:2])
    if i.dim_labels is None:
        return 0
    left_labels, kernel_labels, output_labels = i.dim_labels
    output, window = i.arrays[0], i.window
    positions = 1
    for axis in sorted(c for c in output_labels if c.isdigit()):
        at = int(axis)
        axis_window = _Axis(
            inputs=left.dimensions[left_labels.index(axis)],
            kernel=kernel.dimensions[kernel_labels.index(axis)],
            outputs=output.dimensions[output_labels.index(axis)],
            stride=_nth(window.get("stride"), at),
            padding=int(_nth_text(window.get("pad"), at, "0_0").split("_")[0]),
            left_dilation=_nth(window.get("lhs_dilate"), at),
            kernel_dilation=_nth(window.get("rhs_dilate"), at),
        )
        positions *= _positions(axis_window)
    features = output.dimensions[output_labels.index("f")]
    batch = output.dimensions[output_labels.index("b")]
    inputs = kernel.dimensions[kernel_labels.index("i")]
    return 2 * batch * features * inputs * positions


def _nth_text(text: str | None, at: int, default: str) -> str:
    return text.split("x")[at] if text else default


def _nth(text: str | None, at: int) -> int:
    return int(_nth_text(text, at, "1"))


@functools.cache
def _positions(axis: _Axis) -> int:
    """Pairs of an output and a kernel position that meet an input."""
    end = (axis.inputs - 1) * axis.left_dilation + 1
    found = 0
    for output in range(axis.outputs):
        start = output * axis.stride - axis.padding
        for kernel in range(axis.kernel):
            at = start + kernel * axis.kernel_dilation
            found += 0 <= at < end and at % axis.left_dilation == 0
    return found
