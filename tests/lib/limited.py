"""Other sizes from which on something is worth what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optax_offload._ground import limits


def limited(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Has small programs cut as large ones are, until the test ends.

    Args:
      monkeypatch: Undoes it.
      **changes: Attributes of `limits.Limits`.
    """
    monkeypatch.setattr(limits, "now", dataclasses.replace(limits.now, **changes))
