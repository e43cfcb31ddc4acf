"""Targets of compilation: a chip, or several of them.

A target is a name and what follows from it. Nothing is loaded to make one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from optax_offload._ground.units import MIB, size_text
from optax_offload.aot import compilers
from optax_offload.aot.chip import Chip, Gpu, Tpu
from optax_offload.aot.chips import CHIPS, GPUS, GPUS_PER_HOST, TPUS

# Of slices that have several hosts (cloud.google.com/tpu/docs: machine types -4t).
_TPU_CHIPS_PER_HOST = 4
_NAME = re.compile(r"(?P<chip>[\w-]+)(:(?P<size>\d+(x\d+)*))?")
# Less device memory than this is taken for another unit than bytes.
_LEAST_MEMORY_BYTES = MIB


@dataclasses.dataclass(frozen=True, init=False)
class Target:
    """A chip, or several of them, to compile for. Nothing is loaded to make one.

    Attributes:
      name: A TPU generation and its grid of chips (``"v5e:2x4"``, ``"v5p:2x2x1"``;
        one chip without a grid), or a GPU and how many (``"h100"``, ``"h100:8"``).
      memory_bytes: Memory of each device. What a TPU's program can use; all that a GPU
        has, of which JAX by default takes 75 % (``XLA_CLIENT_MEM_FRACTION``).
      platform: JAX's name of it, ``"tpu"`` or ``"gpu"``.
      device_count: The number of JAX devices.

    Example:
      >>> from optax_offload import aot
      >>> aot.Target("v5p:2x2x2").device_count
      8
      >>> aot.Target("h100", memory_bytes=24 * 2**30).memory_bytes
      25769803776
    """

    name: str
    memory_bytes: int
    platform: str
    device_count: int

    def __init__(self, name: str, *, memory_bytes: int | None = None):
        """Checks the name.

        Args:
          name: See the class.
          memory_bytes: Less than the chip has, to compile under pressure. A TPU's is
            rounded down to MiB.

        Raises:
          ValueError: An unknown chip, a size that it does not come in, or more memory
            than it has.
        """
        match = _NAME.fullmatch(name)
        chip_name, size = (match["chip"], match["size"]) if match else ("", None)
        chip = CHIPS.get(chip_name)
        if isinstance(chip, Tpu):
            name, device_count = _grid(chip, size, name)
        elif isinstance(chip, Gpu) and (size or "1").isdigit():
            device_count = _gpu_count(int(size or 1), name)
            name = chip.name if device_count == 1 else f"{chip.name}:{device_count}"
        else:
            raise ValueError(_unknown(name))
        available = chip.memory_bytes
        if memory_bytes is None:
            memory_bytes = available
        if not _LEAST_MEMORY_BYTES <= memory_bytes <= available:
            raise ValueError(
                f"memory_bytes={memory_bytes} ({size_text(memory_bytes)}): each device "
                f"of {name!r} has {available} bytes ({size_text(available)}); pass "
                f"between {size_text(_LEAST_MEMORY_BYTES)} and that, or leave it out"
            )
        values = {
            "name": name,
            "memory_bytes": memory_bytes,
            "platform": chip.platform,
            "device_count": device_count,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def chip(self) -> Chip:
        """The figures of its chip."""
        return CHIPS[self.name.partition(":")[0]]

    @property
    def devices_per_host(self) -> int:
        """The number of its devices that share a host, and so that host's memory.

        A host has up to eight GPUs, or the devices of four TPU chips, or all of a TPU
        slice that fits one host.
        """
        chip = self.chip
        most = GPUS_PER_HOST
        if isinstance(chip, Tpu):
            whole = chip.one_host_chips * chip.devices_per_chip
            if self.device_count <= whole:
                return self.device_count
            most = _TPU_CHIPS_PER_HOST * chip.devices_per_chip
        return min(self.device_count, most)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The target's compile-only devices; this loads its compiler.

        Raises:
          ImportError: The compiler's wheel is not installed; says how to install it.
          ValueError: libtpu cannot describe such a slice.
        """
        chip = self.chip
        if isinstance(chip, Tpu):
            return compilers.tpu_devices(chip.name, self.name.partition(":")[2])
        return compilers.gpu_devices(chip.name, self.device_count, self.memory_bytes)

    def mesh(
        self,
        axis_names: Sequence[str] = ("x",),
        *,
        shape: Sequence[int] | None = None,
        axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
    ) -> AbstractMesh:
        """A mesh over all devices of the target, to make shardings of arguments on.

        Args:
          axis_names: As of `jax.make_mesh`.
          shape: The size of each axis; by default all devices are on the first.
          axis_types: One for all axes, or one for each.

        Raises:
          ValueError: The shape is not one of that many devices and axes.

        Example:
          >>> from optax_offload import aot
          >>> aot.Target("v5e:2x4").mesh(("data", "model"), shape=(2, 4)).shape_tuple
          (('data', 2), ('model', 4))
        """
        names = tuple(axis_names)
        if shape is None:
            shape = (self.device_count,) + (1,) * (len(names) - 1)
        if len(shape) != len(names) or math.prod(shape) != self.device_count:
            raise ValueError(
                f"a mesh of shape {tuple(shape)} and axes {names} is not one of the "
                f"{self.device_count} devices of {self.name!r}: pass one size for each "
                f"axis, which multiply to {self.device_count}"
            )
        if isinstance(axis_types, AxisType):
            axis_types = (axis_types,) * len(names)
        return AbstractMesh(tuple(shape), names, axis_types=tuple(axis_types))


def _unknown(given: str) -> str:
    """The message for a name that is none of a chip, with the nearest ones."""
    name = re.sub(r"[\W_]", "", given.lower().partition(":")[0])
    if re.match("mi[23]\\d\\d", name):
        return (
            f"Target({given!r}): AMD's compiler (jax-rocm7-pjrt) is loaded only where "
            "ROCm is installed (0.12 fails without librocprofiler-sdk.so), so nothing "
            "compiles here for such a GPU. Plan for another one, and measure"
        )
    near = [chip for chip in CHIPS if chip.startswith(name[:4]) and name]
    near = near or difflib.get_close_matches(name, CHIPS, 3, 0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"Target({given!r}) names no chip.{hint} A TPU is one of {', '.join(TPUS)} and "
        f"its grid of chips, as in 'v5e:2x4'; a GPU is one of {', '.join(GPUS)} and "
        "how many, as in 'h100:8'. For another GPU take one of its architecture, with "
        "its memory: Target('rtx4090', memory_bytes=16 * 2**30), or --target rtx4090 "
        "--memory 16GiB"
    )


def _grid(chip: Tpu, size: str | None, given: str) -> tuple[str, int]:
    """The full name of a slice of TPUs, and how many devices it has."""
    size = size or "x".join("1" * chip.dimensions)
    counts = [int(n) for n in size.split("x")]
    if len(counts) != chip.dimensions or 0 in counts:
        example = "x".join("2244"[: chip.dimensions])
        raise ValueError(
            f"Target({given!r}): the chips of a {chip.name} are a grid of "
            f"{chip.dimensions} dimensions, as in '{chip.name}:{example}'"
        )
    return f"{chip.name}:{size}", math.prod(counts) * chip.devices_per_chip


def _gpu_count(count: int, given: str) -> int:
    """Returns a number of GPUs, if hosts of GPUs come in that number."""
    hosts, left = divmod(count, GPUS_PER_HOST)
    if count < 1 or (hosts and left):
        several = ", ".join(str(n * GPUS_PER_HOST) for n in (2, 3))
        raise ValueError(
            f"Target({given!r}): {count} GPUs; allowed are 1 to {GPUS_PER_HOST}, or "
            f"whole hosts of {GPUS_PER_HOST} ({several}, ...)"
        )
    return count
