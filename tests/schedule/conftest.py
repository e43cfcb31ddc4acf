"""What the tests of schedules share."""

import pytest


@pytest.fixture
def runs_once(monkeypatch):
    """Whatever the version of JAX: nothing is compiled here."""
    from optax_offload._ground import compat

    monkeypatch.setattr(compat, "LOOPS_RUN_ONCE", True)
