"""The codecs that a plan may keep state in, and which of them a step has state for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from optax_offload import _rules
from optax_offload._low_bit import master_paths
from optax_offload._plan.state import REMAINDER, Codecs, RecordedOptimizer
from optax_offload._plan.step import StepFactory

# The codec of moments that is named where one would help.
USUAL: _rules.CodecName = "int8"


def allowed(allow: str | Sequence[str] | None) -> Codecs:
    """The codecs that a user allows, each once.

    Args:
      allow: A name, several with commas between them, or a sequence of these.

    Raises:
      ValueError: A name is none of a codec.
    """
    texts = [allow] if isinstance(allow, str) else list(allow or ())
    names = [name.strip() for text in texts for name in text.split(",")]
    unknown = [name for name in names if name not in _rules.CODEC_NAMES]
    if unknown:
        raise ValueError(
            f"allow has {', '.join(map(repr, unknown))}; each must be one of "
            + ", ".join(map(repr, _rules.CODEC_NAMES))
        )
    return cast("Codecs", tuple(dict.fromkeys(names)))


def forms(allow: Codecs) -> list[Codecs]:
    """The codecs that state can be kept in together: one of moments, that of masters.

    Example:
      >>> forms(("int8", "bfloat16-remainder"))
      [('int8',), ('bfloat16-remainder',), ('int8', 'bfloat16-remainder')]
    """
    of_moments: list[Codecs] = [(name,) for name in allow if name != REMAINDER]
    if REMAINDER not in allow:
        return of_moments
    return [*of_moments, (REMAINDER,), *((*each, REMAINDER) for each in of_moments)]


def check_remainder(
    allow: Codecs, optimizers: Sequence[RecordedOptimizer], factory: StepFactory
) -> None:
    """Raises a ValueError if remainders are allowed, and no state can be kept so.

    Args:
      allow: The codecs that are allowed.
      optimizers: The optimizers of the step.
      factory: Makes the step.
    """
    if REMAINDER not in allow or any(o.halves for o in optimizers):
        return
    write = "write offload(oo.master_weights(optimizer))"
    if master_paths(factory.plain_step().args):
        fix = f"its master weights are outside of offload; {write}"
    elif any("bfloat16" in o.parameter_dtypes for o in optimizers):
        fix = f"its bfloat16 parameters have no such copies; {write}"
    else:
        dtypes = ", ".join(sorted({d for o in optimizers for d in o.parameter_dtypes}))
        fix = f"its parameters are {dtypes}; make them bfloat16, and {write}"
    raise ValueError(
        f"allow has {REMAINDER!r}, which is for float32 master weights of bfloat16 "
        f"parameters, and the state of this step has none: {fix}. Or leave "
        f"{REMAINDER!r} out"
    )


def worth_allowing(allow: Codecs, optimizers: Sequence[RecordedOptimizer]) -> Codecs:
    """The codecs to allow for the least state; nothing if they are allowed already."""
    of_moments: list[_rules.CodecName]
    of_moments = [name for name in allow if name != REMAINDER]
    if not of_moments and any(o.moments for o in optimizers):
        of_moments = [USUAL]
    halves = any(o.halves for o in optimizers)
    found: Codecs = (*of_moments, REMAINDER) if halves else tuple(of_moments)
    return () if {*found} <= {*allow} else found
