"""What every test runs under: several CPU devices, no rank promotion."""

import os

# Before JAX is imported: it reads both when it starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Nothing is broadcast by accident. (Strict dtypes are beyond optax's own Adam.)"""
    with jax.numpy_rank_promotion("raise"):
        yield
