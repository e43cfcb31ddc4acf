"""What is said where rules move nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from optax_offload._ground.errors import warn
from optax_offload._ground.units import leaves_text

_TOO_SMALL = "under "


def why_nothing_moves(planned: Iterable[tuple[str | None, str]]) -> str:
    """A line on why rules leave all leaves on the device; "" if they do not.

    Args:
      planned: The memory kind that is planned for each leaf, and the reason.
    """
    leaves = list(planned)
    if not leaves or any(kind != "device" for kind, _ in leaves):
        return ""
    reasons = Counter(why for _, why in leaves)
    text = "; ".join(f"{leaves_text(n)}: {why}" for why, n in reasons.items())
    too_small = any(why.startswith(_TOO_SMALL) for why in reasons)
    hint = ". Rule(pattern, min_bytes=...) moves smaller leaves" * too_small
    return f"nothing moves to host memory. {text}{hint}"


def warn_of_small_leaves(planned: Iterable[tuple[str | None, str]]) -> None:
    """Warns if rules would move leaves, and all of these are smaller than they say.

    Args:
      planned: As of `why_nothing_moves`.
    """
    leaves = list(planned)
    if any(why.startswith(_TOO_SMALL) for _, why in leaves):
        why = why_nothing_moves(leaves)
        if why:
            warn(why)
