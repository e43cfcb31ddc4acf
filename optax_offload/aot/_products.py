"""Counting the matrix products of a compiled program, for the model of a device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from optax_offload.aot._hlo import Array, Computation, Instruction, Module

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
    """The multiply-adds, two operations each, of matrix products and convolutions.

    Also of those that cuBLAS and cuDNN do. Calls whose text does not say what they
    multiply count nothing: kernels of Pallas, grouped products of cuBLAS.
    """
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
    if i.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands = [computation.instructions[o].arrays for o in i.operands]
    if i.opcode == "dot":
        contracted = i.integers("lhs_contracting_dims")
        return _product_flops(operands[0][0], contracted, i.arrays[0])
    target = i.named("custom_call_target") or ""
    if i.opcode == "convolution" or target.startswith("__cudnn$conv"):
        first, second, result = operands[0][0], operands[1][0], i.arrays[0]
        # A gradient has the labels and the window of its convolution.
        if target == "__cudnn$convBackwardInput":
            return _convolution_flops(result, second, first, i)
        if target == "__cudnn$convBackwardFilter":
            return _convolution_flops(first, result, second, i)
        return _convolution_flops(first, second, result, i)
    if config := i.backend_config.get("cudnn_fmha_backend_config"):
        return _attention_flops(operands[0][0], operands[2][0], config)
    if numbers := i.backend_config.get("gemm_backend_config", {}).get(
        "dot_dimension_numbers"
    ):
        contracted = map(int, numbers["lhs_contracting_dimensions"])
        return _product_flops(operands[0][0], contracted, i.arrays[0])
    return 0


def _product_flops(left: Array, contracted: Iterable[int], result: Array) -> int:
    return 2 * result.size * math.prod(left.dimensions[n] for n in contracted)


def _attention_flops(query: Array, value: Array, config: Mapping[str, Any]) -> int:
    """The products of cuDNN's attention, of a causal mask half of them.

    Its configuration names those of the forward or of the backward pass. The backward
    pass computes the scores again beside these.
    """
    scores = math.prod(map(int, config["intermediate_tensor_shape"]["dimensions"]))
    products = [name[:4] for name in config if name.endswith("dimension_numbers")]
    if "bmm1_grad_gemm1_dot_dimension_numbers" in config:
        products.append("bmm1")
    of_scores = products.count("bmm1") * query.dimensions[-1]
    of_values = products.count("bmm2") * value.dimensions[-1]
    share = 2 if "CAUSAL" in config["mask_type"] else 1
    return 2 * scores * (of_scores + of_values) // share


def _convolution_flops(
    left: Array, kernel: Array, output: Array, i: Instruction
) -> int:
    """As XLA counts them: positions of the window that fall into padding are free.

    A TPU's batched matrix product is a convolution that is dilated such that all but
    the diagonal falls into it.
    """
    if i.dim_labels is None:
        return 0
    left_labels, kernel_labels, output_labels = i.dim_labels
    window = i.window
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
