"""What every test runs under: several CPU devices or an accelerator, strict ranks."""

import os
import re

import pytest


def asks_for_accelerator(config):
    """Whether tests are selected with ``-m accelerator``."""
    return re.search(r"(?<!not )\baccelerator\b", config.option.markexpr)


def pytest_configure(config):
    """Chooses the devices before JAX is imported: it reads both when it starts."""
    if not asks_for_accelerator(config):
        # The tests' leaves are tiny. XLA's CPU compiler would make one function of each
        # loop over them, where it rounds otherwise, as it does not over large leaves.
        as_of_large_leaves = "xla_cpu_small_while_loop_byte_threshold=0"
        flags = [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            f"--xla_backend_extra_options={as_of_large_leaves}",
        ]
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_ignore_collect(collection_path, config):
    """Other modules may need what an accelerator's machine lacks."""
    if asks_for_accelerator(config) and collection_path.suffix == ".py":
        return True if "mark.accelerator" not in collection_path.read_text() else None
    return None


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Nothing is broadcast by accident. (Strict dtypes are beyond optax's own Adam.)"""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield
