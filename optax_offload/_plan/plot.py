"""The memory of a plan as bars, for people who would rather look."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from optax_offload._plan.candidates import STATE_AT_ONCE
from optax_offload._plan.result import Plan
from optax_offload._units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "parameters": "#4269d0",
    "gradients": "#efb118",
    "activations": "#6cc5b0",
    "state": "#ff725c",
    STATE_AT_ONCE: "#a463f2",
    "other": "#9c9c9c",
}


def check_can_plot() -> type[Figure]:
    """What draws a figure; asked for before what takes long.

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
    """Writes the peaks before and after as stacked bars, beside the budget, as PNG.

    Args:
      plan: What planning found.
      path: The picture.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure_class = check_can_plot()
    figure = figure_class(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    bars = {"as given": plan.before.parts, "with the plan": plan.after.parts}
    bottoms = [0.0] * len(bars)
    for part, color in COLORS.items():
        heights = [parts.get(part, 0) / GIB for parts in bars.values()]
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
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)
