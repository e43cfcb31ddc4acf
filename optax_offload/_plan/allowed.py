"""The codecs that a user allows a plan to use, and how they go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from optax_offload._places.rules import CODEC_NAMES, PARAMETER_CODECS, CodecName
from optax_offload._plan.state import RecordedOptimizer

# The codecs of a plan, in order; none where state keeps its dtype.
Codecs = tuple[CodecName, ...]
# The one that changes no number: it is for master weights, the others are for moments.
REMAINDER: CodecName = "bfloat16-remainder"
# The codecs of moments and of frozen parameters that are named where one would help.
USUAL: CodecName = "int8"
USUAL_OF_FROZEN: CodecName = "nf4"


def allowed(allow: str | Sequence[str] | None) -> Codecs:
    """The codecs that a user allows, each once.

    Args:
      allow: A name, several with commas between them, or a sequence of these.

    Raises:
      ValueError: A name is none of a codec.
    """
    texts = [allow] if isinstance(allow, str) else list(allow or ())
    names = [name.strip() for text in texts for name in text.split(",")]
    unknown = [name for name in names if name not in CODEC_NAMES]
    if unknown:
        raise ValueError(
            f"allow has {', '.join(map(repr, unknown))}; each must be one of "
            + ", ".join(map(repr, CODEC_NAMES))
        )
    return cast("Codecs", tuple(dict.fromkeys(names)))


def forms(allow: Codecs) -> list[Codecs]:
    """The codecs of a plan together: one of moments, that of masters, one of frozen.

    Example:
      >>> forms(("int8", "bfloat16-remainder"))
      [('int8',), ('bfloat16-remainder',), ('int8', 'bfloat16-remainder')]
      >>> forms(("int8", "nf4"))
      [('int8',), ('nf4',), ('int8', 'nf4')]
    """
    found: list[Codecs] = [(name,) for name in _of_moments(allow)]
    if REMAINDER in allow:
        found.extend([(REMAINDER,), *((*each, REMAINDER) for each in found)])
    for name in of_parameters(allow):
        others = [each for each in found if not of_parameters(each)]
        found.extend([(name,), *((*each, name) for each in others)])
    return found


def of_parameters(codecs: Codecs) -> Codecs:
    """Those of some codecs that are for frozen parameters."""
    return tuple(name for name in codecs if _of_frozen(name))


def _of_frozen(name: CodecName) -> bool:
    return name in PARAMETER_CODECS


def _of_moments(codecs: Codecs) -> Codecs:
    return tuple(n for n in codecs if not _of_frozen(n) and n != REMAINDER)


def worth_allowing(
    allow: Codecs, optimizers: Sequence[RecordedOptimizer], frozen: bool = False
) -> Codecs:
    """The codecs to allow for the fewest bytes; nothing if they are allowed already.

    Args:
      allow: The codecs that are allowed.
      optimizers: The optimizers of the step.
      frozen: Whether it has frozen parameters.
    """
    moments, base = _of_moments(allow), of_parameters(allow)
    if not moments and any(o.moments for o in optimizers):
        moments = (USUAL,)
    if not base and frozen:
        base = (USUAL_OF_FROZEN,)
    halves = (REMAINDER,) * any(o.halves for o in optimizers)
    found: Codecs = (*moments, *halves, *base)
    return () if {*found} <= {*allow} else found
