"""Values in host memory that a step uses and is not given as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_offload as oo

THERE = oo.set_memory_kind({"w": jnp.ones((8, 8))}, "w", "pinned_host")


class Model:
    """Parameters at rest that a method reads from its object."""

    params = THERE

    def step(self, x, y):
        """A product with them."""
        return x @ self.params["w"] + y


def streamed(step, **options):
    """As a trainer does that jits steps itself."""
    return jax.jit(oo.stream(step), **options)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("how", ["closed over", "in a static argument", "moved"])
@pytest.mark.parametrize("jit", [oo.jit, streamed])
def test_host_values_that_are_no_arguments(jit, how, kind):
    """The error says to make them arguments; loaded in the step, they are as others."""
    functions = {
        "closed over": lambda x, y: x @ THERE["w"] + y,
        "in a static argument": Model.step,
        "moved": lambda x, y: x @ jax.device_put(x, jax.memory.Space.Host) + y,
    }
    x = jnp.ones((8, 8))
    y = oo.set_memory_kind(x, "", kind)
    static = how == "in a static argument"
    options = {"static_argnums": 0} if static else {}
    args = (Model(), x, y) if static else (x, y)
    with pytest.raises(
        ValueError, match=r"as self, as an argument.*JAX says: memory_s"
    ):
        jit(functions[how], **options)(*args)
    load = oo.set_memory_kind
    loaded = jit(lambda x, y: x @ load(THERE, "w", "device")["w"] + y)(x, y)
    given = jit(lambda params, x, y: x @ params["w"] + y)(THERE, x, y)
    np.testing.assert_array_equal(loaded, given)
