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
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_ignore_collect(collection_path, config):
    """Other modules may need what an accelerator's machine lacks."""
    if asks_for_accelerator(config) and collection_path.suffix == ".py":
        return True if "mark.accelerator" not in collection_path.read_text() else None
    return None


@pytest.fixture(autouse=True)
def unoptimized(request):
    """Leaves XLA's optimizations out of some tests, most of whose time they take."""
    import jax

    name = "jax_disable_most_optimizations"
    asked = request.node.get_closest_marker("unoptimized") is not None
    before = jax.config.values[name]
    jax.config.update(name, asked)
    yield
    jax.config.update(name, before)


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Nothing is broadcast by accident; strict dtypes are beyond optax's own Adam."""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield
