"""Small programs that tests compile for chips that are not there."""

import importlib.util
import platform

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
BOTH = pytest.mark.parametrize("name", ["h100", "v5e"])

BOTH_FOUR_DEVICES = pytest.mark.parametrize("name", ["h100:4", "v5e:2x2"])


def missing_compilers() -> str:
    """Why nothing can be compiled here; empty if it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the compilers' wheels exist for Linux on x86-64 only"
    absent = [m for m in ("libtpu", "jax_plugins") if not importlib.util.find_spec(m)]
    return f"not installed (extra aot): {', '.join(absent)}" if absent else ""


def struct(shape, target=None, spec=None, kind=None, dtype=jnp.float32):
    """A `ShapeDtypeStruct`, on the target's mesh if there is a target."""
    if target is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(target.mesh(), spec or P(), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def load_add_store(on_host, on_device):
    """A load, an addition and a store."""
    return jax.device_put(jax.device_put(on_host, DEVICE) + on_device, HOST)


def descend(w):
    """An elementwise update."""
    return w - 0.1 * jnp.tanh(w)
