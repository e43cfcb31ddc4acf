"""What differs between JAX versions, each with the JAX that is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from optax_offload._ground import compat
from optax_offload._places import memory


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_weakly_typed(dtype, memory_kind):
    """The same value in the same place, which gives way to another's dtype."""
    sharding = SingleDeviceSharding(jax.devices()[0]).with_memory_kind(memory_kind)
    x = jax.device_put(np.array(7, dtype), sharding)
    weak = compat.weakly_typed(x)
    assert weak.weak_type
    assert (weak.dtype, weak.sharding) == (x.dtype, x.sharding)
    assert int(weak) == 7
    on_device = jax.device_put(weak, jax.memory.Space.Device)
    assert (on_device + jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16


def test_structs_of_host_memory():
    """From JAX 0.11 on a struct says it without a sharding; before, it is forgotten."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert not compat.struct_is_on_host(struct)
    of_host = jax.eval_shape(lambda: jax.device_put(jnp.ones(3), jax.memory.Space.Host))
    says_it = hasattr(of_host, "_memory_space")
    assert compat.struct_is_on_host(of_host) == says_it
    kind = "pinned_host" if says_it else "device"
    assert memory.memory_kind_of(of_host) == kind


def scan_of(carry, xs):
    """The equation of a scan with one constant."""
    constant = jnp.ones(3)

    def fn(constant, carry, xs):
        return jax.lax.scan(lambda c, x: (c + constant, x), carry, xs)

    (eqn,) = jax.make_jaxpr(fn)(constant, carry, xs).eqns
    return eqn


def test_scan_counts():
    """Constants, then what is carried."""
    eqn = scan_of(jnp.zeros(3), jnp.ones((4, 2)))
    assert compat.scan_counts(eqn.params) == (1, 1)
