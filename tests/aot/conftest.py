"""Tests marked `aot` compile with the real compilers (the extra `aot`)."""

import pytest


@pytest.fixture(autouse=True)
def compilers(request):
    """Skips a test that compiles where it cannot."""
    # Imported here: it imports JAX, which reads what `tests/conftest.py` sets.
    from small_programs import missing_compilers

    if request.node.get_closest_marker("aot") and (reason := missing_compilers()):
        pytest.skip(reason)
