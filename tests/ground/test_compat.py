"""What differs between JAX versions, each with the JAX that is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from optax_offload import _compat


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_weakly_typed(dtype, memory_kind):
    """The same value in the same place, which gives way to another's dtype."""
    sharding = SingleDeviceSharding(jax.devices()[0]).with_memory_kind(memory_kind)
    x = jax.device_put(np.array(7, dtype), sharding)
    weak = _compat.weakly_typed(x)
    assert weak.weak_type
    assert (weak.dtype, weak.sharding) == (x.dtype, x.sharding)
    assert int(weak) == 7
    on_device = jax.device_put(weak, jax.memory.Space.Device)
    assert (on_device + jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
