"""The memory that the step of a language model takes on chips that are not attached.

The step is compiled for each by its own compiler (the extra `aot`), and the peak of
device memory is read from the compiled program. Nothing is run on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from lm_program import Settings

import optax_offload as oo
from optax_offload import aot

MIB = 2**20
# Columns of the table, and bars of the picture.
MODES = ("no offload", "offload", "fused")


class Peak(NamedTuple):
    """The memory of the step on one chip, trained in one way, in bytes.

    Attributes:
      chip: Name of the chip.
      mode: One of `MODES`; "fused" is offload with the updates of layers in the
        backward pass (`oo.jit`).
      lasting_bytes: Parameters and state on the device, between steps too.
      temporary_bytes: Activations, gradients, and state while it is updated.
      host_bytes: State in host memory.
    """

    chip: str
    mode: str
    lasting_bytes: int
    temporary_bytes: int
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """The peak of device memory."""
        return self.lasting_bytes + self.temporary_bytes


def compile_for_chips(
    step: Callable[..., Any],
    create_state: Callable[..., Any],
    settings: Settings,
    config: oo.OffloadConfig,
    chips: Sequence[str],
) -> Iterator[Peak]:
    """Yields the peaks of a step, for each chip without offload, with it, and fused.

    Args:
      step: A step of a state and tokens, not jitted.
      create_state: Makes its state of settings and rules.
      settings: The sizes.
      config: The rules of what goes to host memory.
      chips: Targets of `aot`.
    """
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.context + 1), jnp.int32)
    for chip in chips:
        for mode in MODES:
            rules = None if mode == "no offload" else config
            state = oo.eval_shape(lambda rules=rules: create_state(settings, rules))
            jit = oo.jit if mode == "fused" else jax.jit
            jitted = jit(step, donate_argnums=0)
            compiled = aot.compile(jitted, state, tokens, target=aot.Target(chip))
            peak = aot.peak(compiled)
            lasting = peak.peak_bytes - peak.temporary_bytes
            host = peak.host_peak_bytes
            yield Peak(chip, mode, lasting, peak.temporary_bytes, host)


def table(peaks: Sequence[Peak]) -> str:
    """A row for each chip, in MiB."""
    lines = [
        "peak, MiB " + "".join(f"{mode:>12s}" for mode in MODES) + "   on the host"
    ]
    for chip in dict.fromkeys(peak.chip for peak in peaks):
        rows = {peak.mode: peak for peak in peaks if peak.chip == chip}
        cells = "".join(f"{rows[mode].device_bytes / MIB:12.1f}" for mode in MODES)
        lines.append(f"{chip:10s}{cells}{rows['offload'].host_bytes / MIB:14.1f}")
    return "\n".join(lines)


def save_picture(path: Path, peaks: Sequence[Peak]) -> None:
    """Writes the peaks as bars, in their parts, as PNG."""
    # Not always installed where a step is compiled.
    from matplotlib.figure import Figure

    chips = list(dict.fromkeys(peak.chip for peak in peaks))
    figure = Figure(figsize=(4 * len(chips), 4), layout="constrained")
    subplots = figure.subplots(1, len(chips), squeeze=False)
    for axes, chip in zip(subplots[0], chips, strict=True):
        rows = [peak for peak in peaks if peak.chip == chip]
        names = [peak.mode for peak in rows]
        lasting = [peak.lasting_bytes / MIB for peak in rows]
        temporary = [peak.temporary_bytes / MIB for peak in rows]
        axes.bar(names, lasting, label="parameters and state on the device")
        bars = axes.bar(
            names, temporary, bottom=lasting, label="activations, gradients, window"
        )
        totals = [f"{peak.device_bytes / MIB:.1f}" for peak in rows]
        axes.bar_label(bars, labels=totals)
        axes.set_ylim(top=1.1 * max(peak.device_bytes / MIB for peak in rows))
        axes.set(title=chip, ylabel="peak device memory of a step (MiB)")
    handles, labels = subplots[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def report(
    step: Callable[..., Any],
    create_state: Callable[..., Any],
    settings: Settings,
    config: oo.OffloadConfig,
    chips: Sequence[str],
    path: Path,
) -> None:
    """Prints the table and saves the picture, or says in one line why there is none."""
    if not chips:
        return
    names = " and ".join(chips)
    print(f"\ncompiling this step for {names} takes a minute:", flush=True)
    try:
        peaks = list(compile_for_chips(step, create_state, settings, config, chips))
    except (ImportError, OSError, RuntimeError) as error:  # No compiler, or no memory.
        print(f"not compiled: {str(error).splitlines()[0]}")
    else:
        print(table(peaks))
        save_picture(path, peaks)
        print(f"picture of the peaks: {path}")
