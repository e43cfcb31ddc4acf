"""How a TPU lays out an array, against what its compiler says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from small_steps import train_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._places import tpu_layout

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("tpu")]
TARGET = aot.Target("v5e:2x2")
SIZES = [1, 2, 3, 5, 7, 8, 10, 16, 20, 24, 64, 65, 96, 128, 130, 200, 256, 300, 1024]


def layouts(types):
    """The axes of each array as an argument, from major to minor."""
    double = jax.jit(
        lambda xs: [jax.device_put(x, jax.memory.Space.Device) for x in xs]
    )
    formats = aot.compile(double, types, target=TARGET).input_formats
    return [f.layout.major_to_minor for f in jax.tree.leaves(formats)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_order(dtype):
    """Of arrays of all kinds of shapes."""
    rng = np.random.default_rng(0)
    shapes = [tuple(rng.choice(SIZES, n).tolist()) for n in [1, 2, 3, 4] * 40]
    types = [jax.ShapeDtypeStruct(s, dtype) for s in shapes if np.prod(s) < 2**24]
    assert [tpu_layout.order(x) for x in types] == layouts(types)
    assert (1, 0) in map(tpu_layout.order, types)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_order_of_shards(kind):
    """The part on each device decides: of the whole, rows would be in the lanes."""
    mesh = TARGET.mesh(axis_types=AxisType.Explicit)
    sharding = jax.NamedSharding(mesh, jax.P("x"), memory_kind=kind)
    x = jax.ShapeDtypeStruct((200, 96), jnp.float32, sharding=sharding)
    assert [tpu_layout.order(x)] == layouts([x]) == [(0, 1)]
    assert tpu_layout.order(jnp.zeros((200, 96))) == (1, 0)


def test_state_is_not_laid_out_anew():
    """A loop leaves rows that are in the lanes there, and the host copies nothing.

    Gradients that come from a loop make a v5e's compiler take ours for row-major.
    """
    params = {"w": jax.ShapeDtypeStruct((4, 1024, 16, 64), jnp.float32)}
    assert tpu_layout.order(params["w"]) == (0, 2, 3, 1)
    tx = oo.offload(optax.adamw(1e-3), r".*/(mu|nu)/.*")

    def loss(params, x):
        def layer(x, w):
            heads = jnp.einsum("sd,dhe->she", x, w)
            return x + heads.reshape(x.shape), None

        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)

    step = jax.jit(train_step(tx, loss))
    state = oo.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    compiled = aot.compile(step, params, state, x, target=TARGET)
    assert aot.peak(compiled).host_temporary_bytes == 0
    text = compiled.as_text() or ""
    assert "f32[4,1024,16,64]{1,3,2,0:T(8,128)S(5)}" in text
    assert "f32[4,1024,16,64]{3,2,1,0:T(8,128)S(5)}" not in text
