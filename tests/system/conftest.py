"""What the tests of whole steps share."""

import pytest


@pytest.fixture
def rank_promotion():
    """Optimizers of optax and models of others promote ranks: that is theirs to do."""
    # Imported here: JAX reads what `pytest_configure` sets when it is imported.
    import jax

    with jax.numpy_rank_promotion("allow"):
        yield
