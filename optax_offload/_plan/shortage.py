"""What to say when a step does not fit with all of its state moved."""

from __future__ import annotations

import math

from optax_offload import aot
from optax_offload._plan.candidates import STATE_AT_ONCE, CompiledCandidate
from optax_offload._units import size_text


def does_not_fit(
    target: aot.Target,
    budget_bytes: int,
    everything: CompiledCandidate,
    state_bytes: int,
) -> aot.DoesNotFitError:
    """The error: by how much it is short, what takes the memory, what would help.

    Args:
      target: The chips that the step was compiled for.
      budget_bytes: What the step may take on each device.
      everything: The step with all state moved that may move.
      state_bytes: The bytes of all state on each device, without offload.
    """
    short = everything.used_bytes - budget_bytes
    parts = {name: n for name, n in everything.parts.items() if n}
    needs = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
    stays = state_bytes - everything.moved_bytes
    weights = parts.get("parameters", 0) + parts.get("gradients", 0)
    activations = parts.get("activations", 0)
    help_with = []
    if state_bytes and stays > short:
        help_with.append(
            f"rules that let go of the {size_text(stays)} of state that stays"
        )
    at_once = parts.get(STATE_AT_ONCE, 0)
    if at_once > short:
        help_with.append(
            f"an optimizer that nothing joins all state of: {size_text(at_once)} of it "
            "is loaded at once, as for a norm of accumulated gradients (a warning says "
            "what joins it, and what to write instead)"
        )
    if activations > short:
        help_with.append(
            f"a smaller batch, or remat (jax.checkpoint, nn.remat): activations and "
            f"all else that is temporary would have to go to "
            f"{size_text(activations - short)}"
        )
    if weights // 2 > short:
        help_with.append("bfloat16 parameters, if they are float32: half of both")
    fused = " and updates in the backward pass" if everything.fused else ""
    ratio = everything.used_bytes / budget_bytes
    more = math.ceil(target.device_count * ratio)
    help_with.append(
        f"more devices: parameters, gradients and batch sharded over at least {more}"
        f" (now {target.device_count}), or larger ones"
    )
    return aot.DoesNotFitError(
        f"does not fit on {target.name!r} even with all state moved{fused}: short by "
        f"{size_text(short)} of {size_text(budget_bytes)} on each device. It needs "
        f"{size_text(everything.used_bytes)}: {needs}. What would help:"
        + "".join(f"\n- {line}" for line in help_with)
        + "".join(f"\n{line}" for line in everything.outside),
        used_bytes=everything.used_bytes,
        limit_bytes=budget_bytes,
        peak=everything.peak,
    )
