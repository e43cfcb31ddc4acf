"""What the tests of plans share."""

import os

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where what one test compiles is kept for the others, of all processes."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return root / "compiled"
