"""The memory that a compiled program needs, and whether its target has it."""

from __future__ import annotations

import dataclasses
import re

import jax

from optax_offload._ground.units import size_text
from optax_offload.aot.targets import Target


class DoesNotFitError(RuntimeError):
    """A program needs more memory than a device of its target has.

    Attributes:
      used_bytes: Device memory that it needs, on each device. Where the compiler
        refused the program this is its own number, which it rounds.
      limit_bytes: Device memory that there is on each device.
      peak: The memory of the program, where there is a program nevertheless (on a GPU);
        else None.
    """

    def __init__(
        self, message: str, used_bytes: int, limit_bytes: int, peak: Peak | None = None
    ):
        super().__init__(message)
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes
        self.peak = peak


@dataclasses.dataclass(frozen=True)
class Peak:
    """The memory of a compiled program, in bytes on each device.

    Attributes:
      argument_bytes: Arguments in device memory.
      temporary_bytes: Values in device memory that are only there while it runs, with
        what their heap has unused. (JAX before 0.12 counts that twice for a TPU, whose
        peak is up to twice what the program needs.)
      output_bytes: Outputs in device memory.
      aliased_bytes: Outputs in device memory that reuse the buffer of a donated
        argument. They are counted among the arguments and among the outputs.
      host_argument_bytes: Arguments in host memory.
      host_temporary_bytes: Values in host memory that are only there while it runs.
      host_output_bytes: Outputs in host memory.
      host_aliased_bytes: Outputs in host memory that reuse the buffer of a donated
        argument. They are counted among the arguments and among the outputs.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    host_argument_bytes: int
    host_temporary_bytes: int
    host_output_bytes: int
    host_aliased_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Device memory while the program runs."""
        return (
            self.argument_bytes
            + self.temporary_bytes
            + self.output_bytes
            - self.aliased_bytes
        )

    @property
    def host_peak_bytes(self) -> int:
        """Host memory while the program runs, for each device."""
        return (
            self.host_argument_bytes
            + self.host_temporary_bytes
            + self.host_output_bytes
            - self.host_aliased_bytes
        )

    def __str__(self) -> str:
        def line(name: str, prefix: str) -> str:
            def size(field: str) -> str:
                return size_text(getattr(self, f"{prefix}{field}_bytes"))

            return (
                f"{name} {size('peak')} = arguments {size('argument')}"
                f" + temporaries {size('temporary')} + outputs {size('output')}"
                f" - aliased {size('aliased')}"
            )

        device = line("peak", "")
        return f"{device}\n{line('host', 'host_')}" if self.host_peak_bytes else device


def peak(compiled: jax.stages.Compiled) -> Peak:
    """The memory that a compiled program needs, of `compile` or of JAX itself.

    Raises:
      ValueError: The platform that it was compiled for does not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            "memory_analysis() of this compiled program is None: its platform does not "
            "say what memory it needs. Compile it with aot.compile(..., target=...)"
        )
    temporary_bytes = stats.temp_size_in_bytes
    # A TPU's have twice what the heap has unused (F86). Not in JAX before 0.12.
    if allocated := getattr(stats, "total_allocation_bytes", 0):
        others = stats.argument_size_in_bytes + stats.output_size_in_bytes
        others -= stats.alias_size_in_bytes
        temporary_bytes = min(temporary_bytes, allocated - others)
    return Peak(
        argument_bytes=stats.argument_size_in_bytes,
        temporary_bytes=temporary_bytes,
        output_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        host_temporary_bytes=stats.host_temp_size_in_bytes,
        host_output_bytes=stats.host_output_size_in_bytes,
        host_aliased_bytes=stats.host_alias_size_in_bytes,
    )


_SIZE = r"([\d.]+)([KMGTP]?)"
# The ways in which the TPU compiler says that a program is too large
# (https://openxla.org/xla/errors/error_1000).
_OUT_OF_MEMORY = [
    re.compile(pattern.replace("SIZE", _SIZE))
    for pattern in (
        r"Used SIZE of SIZE hbm",
        r"required for HLO temporaries \(SIZE\) exceeds available HBM \(SIZE\)",
        r"Requires SIZE, has SIZE available",
        r"TensorCore Hbm usage: SIZE,.* exceeding available bytes: SIZE",
    )
]


def does_not_fit(target: Target, message: str) -> DoesNotFitError | None:
    """The error that the TPU compiler's message stands for, if it is about memory."""
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(message):
            used, used_unit, limit, limit_unit = match.groups()
            return DoesNotFitError(
                f"the program does not fit on {target.name!r}. The compiler says: "
                f"{message}",
                used_bytes=_parse_size(used, used_unit),
                limit_bytes=_parse_size(limit, limit_unit),
            )
    return None


def _parse_size(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGTP".index(unit or " "))


def check_fit(target: Target, usage: Peak) -> None:
    """Compares a program for a GPU, whose compiler does not, with its memory.

    Raises:
      DoesNotFitError: It needs more.
    """
    if usage.peak_bytes > target.memory_bytes:
        raise DoesNotFitError(
            f"the program does not fit on {target.name!r}, whose devices have "
            f"{size_text(target.memory_bytes)} each: {usage}\n"
            "(XLA's GPU compiler only logs this and goes on; aot compares the sizes.)",
            used_bytes=usage.peak_bytes,
            limit_bytes=target.memory_bytes,
            peak=usage,
        )
