"""The time that a compiled step takes, by a model of the chip and of its link."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from optax_offload._ground.units import milliseconds, size_text
from optax_offload._host.link import LINK
from optax_offload.aot._timeline import Model, Timeline
from optax_offload.aot.targets import Target


class Assumption(NamedTuple):
    """A figure that modeled times are made of.

    Attributes:
      what: The subject of the figure, such as ``"link, each way"``.
      value: The figure with its unit, such as ``"64 GB/s"``.
      source: The source of the figure.
    """

    what: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.what}: {self.value} ({self.source})"


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The modeled time of one run of a compiled program. Nothing was run or timed.

    Attributes:
      seconds: Time of the step.
      compute_seconds: Time of the step if transfers took none.
      load_seconds: Time in which the link is busy with loads, from host to device.
      store_seconds: Time in which the link is busy with stores, from device to host.
      link_seconds: Time in which the link is busy in either direction.
      load_bytes: Bytes that each device loads in a step.
      store_bytes: Bytes that each device stores in a step.
      least_link_seconds: Time that the busier direction would take without latency.
      assumptions: The figures that the model is made of, each with its source.
    """

    seconds: float
    compute_seconds: float
    load_seconds: float
    store_seconds: float
    link_seconds: float
    load_bytes: int
    store_bytes: int
    least_link_seconds: float
    assumptions: tuple[Assumption, ...]

    @property
    def waiting_seconds(self) -> float:
        """Time of the step in which the device waits for transfers, or does them."""
        return self.seconds - self.compute_seconds

    @property
    def waiting_share(self) -> float:
        """The share of the step in which the device waits for transfers."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0

    @property
    def over_floor(self) -> float:
        """The step over the longer of its computation and its least link time."""
        floor = max(self.compute_seconds, self.least_link_seconds)
        return self.seconds / floor if floor else 1.0

    def __str__(self) -> str:
        def moved(nbytes: int, seconds: float) -> str:
            return f"{size_text(nbytes)} in {milliseconds(seconds)}"

        return "\n".join(
            [
                f"modeled, not measured: a step of {milliseconds(self.seconds)}, of "
                f"which {milliseconds(self.compute_seconds)} are computation and "
                f"{self.waiting_share:.0%} waiting for the link",
                f"loads {moved(self.load_bytes, self.load_seconds)}, stores "
                f"{moved(self.store_bytes, self.store_seconds)}; the least time that "
                f"both could take is {milliseconds(self.least_link_seconds)}",
                *(f"assumed {a}" for a in self.assumptions),
            ]
        )


def step_time(
    compiled: jax.stages.Compiled,
    target: Target | str,
    *,
    link_bytes_per_second: float | None = None,
) -> StepTime:
    """The time that a compiled program takes, by a model: no program is run.

    The schedule that the compiler chose is carried out against the clock of a modeled
    device: matrix products at the chip's peak rate or bytes at its memory's bandwidth,
    whichever takes longer, and beside them loads and stores over the link, as far as
    the schedule has them in flight together. Real steps take longer: no program attains
    a chip's peak. The model is good for comparing programs of one model.

    Args:
      compiled: A program, of `aot.compile` or of JAX itself.
      target: The target that it was compiled for, or its name, such as ``"h100"``.
      link_bytes_per_second: Bandwidth of the link to host memory, each way, such as
        `measure_link` finds. None takes the chip's documented one.

    Returns:
      The time of a step, of its computation and of its transfers, with what is assumed.

    Raises:
      ValueError: The program's text is not that of a scheduled program; or the target
        or the bandwidth is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_offload import aot
      >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
      >>> target = aot.Target("h100")
      >>> compiled = aot.compile(jnp.dot, x, x, target=target)  # doctest: +SKIP
      >>> print(aot.step_time(compiled, target))  # doctest: +SKIP
      modeled, not measured: a step of 0.28 ms, of which 0.28 ms are computation ...
    """
    target = Target(target) if isinstance(target, str) else target
    if link_bytes_per_second is not None and not link_bytes_per_second > 0:
        raise ValueError(
            f"link_bytes_per_second is {link_bytes_per_second}; it must be more than "
            "0, such as optax_offload.measure_link() returns, or None for the "
            "documented bandwidth of the chip"
        )
    model = Model.of(target, bytes_per_second=link_bytes_per_second)
    found = Timeline.of(compiled.as_text() or "", model)
    return StepTime(
        seconds=found.seconds,
        compute_seconds=found.compute_seconds,
        load_seconds=found.load_seconds,
        store_seconds=found.store_seconds,
        link_seconds=found.link_seconds,
        load_bytes=sum(found.sizes("load")),
        store_bytes=sum(found.sizes("store")),
        least_link_seconds=found.least_seconds,
        assumptions=_assumptions(model, target, link_bytes_per_second is not None),
    )


def _assumptions(
    model: Model, target: Target, link_is_given: bool
) -> tuple[Assumption, ...]:
    chip, link = target.chip, model.link
    link_source = "given" if link_is_given else chip.link_source
    measured = link.latency_seconds != LINK.latency_seconds
    latency_source = chip.link_source if measured else "assumed"
    wide, narrow = model.flops_per_second, model.narrow_flops_per_second
    memory = model.memory_bytes_per_second
    figures = (
        ("link, each way", link.bytes_per_second, 1e9, "GB/s", link_source),
        ("latency of a transfer", link.latency_seconds, 1e-6, "us", latency_source),
        ("matrix products of float32", wide, 1e12, "TFLOP/s", chip.flops_source),
        ("matrix products of 16 bits", narrow, 1e12, "TFLOP/s", chip.flops_source),
        ("device memory", memory, 1e9, "GB/s", chip.memory_bandwidth_source),
    )
    return tuple(
        Assumption(what, f"{value / unit:.0f} {name}", source)
        for what, value, unit, name, source in figures
    )
