"""Pictures of a plan: what fills the device, and time against peak."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from optax_offload._plan.candidates import STATE_AT_ONCE, THE_REST
from optax_offload._plan.result import Plan
from optax_offload._units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "parameters": "#4269d0",
    "state": "#ff725c",
    "gradients": "#efb118",
    "residuals": "#6cc5b0",
    STATE_AT_ONCE: "#a463f2",
    THE_REST: "#97bbf5",
    "other arguments and results": "#9c9c9c",
}


def check_can_plot() -> type[Figure]:
    """Returns the class that draws a figure. Call it before the work that takes long.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a plan is drawn with matplotlib: pip install 'optax-offload[plot]'"
        ) from error
    return Figure


def save_plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draws a plan, as PNG or whatever the path's ending says.

    On the left the peaks before and after as stacked bars, beside the budget; on the
    right all that was compiled, the modelled time of a step against its peak.

    Args:
      plan: The plan.
      path: The picture.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure_class = check_can_plot()
    figure = figure_class(figsize=(10, 4.5), layout="constrained")
    bars, times = figure.subplots(1, 2)
    _draw_parts(plan, bars)
    _draw_times(plan, times)
    figure.savefig(path, dpi=150)


def _draw_parts(plan: Plan, axes: Any) -> None:
    bars = {"as given": plan.before.parts, "with the plan": plan.after.parts}
    bottoms = [0.0] * len(bars)
    for part, color in COLORS.items():
        heights = [
            sum(n for name, n in parts.items() if name.partition(" (")[0] == part) / GIB
            for parts in bars.values()
        ]
        if part == STATE_AT_ONCE and not any(heights):
            continue
        axes.bar(list(bars), heights, 0.6, bottoms, label=part, color=color)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (x, total), ha="center", va="bottom")
    budget = plan.budget_bytes / GIB
    axes.axhline(budget, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set(ylabel="peak of each device (GiB)", title=plan.target.name)
    axes.set_ylim(0, 1.1 * max(*bottoms, budget))
    axes.legend(loc="upper right", fontsize="small")


def _draw_times(plan: Plan, axes: Any) -> None:
    """A point for each way that has a modelled time; the chosen one is filled."""
    rows = [row for row in plan.alternatives.rows if row.step_seconds is not None]
    for row in rows:
        peak, seconds = row.used_bytes / GIB, row.step_seconds or 0.0
        color = "#3ca951" if row.fits else "#ff725c"
        face = color if row.chosen else "none"
        axes.scatter(peak, seconds * 1e3, edgecolors=color, facecolors=face, zorder=3)
        axes.annotate(
            row.what,
            (peak, seconds * 1e3),
            fontsize="x-small",
            xytext=(4, 4),
            textcoords="offset points",
        )
    axes.axvline(plan.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="peak of each device (GiB)", ylabel="modelled step (ms)")
    axes.set(title="filled: chosen; green: fits", ylim=(0, None))
    axes.margins(x=0.2)
