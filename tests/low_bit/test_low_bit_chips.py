"""Encoded state compiled for chips that are not here: what crosses, what it takes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import optax_offload as oo
from optax_offload import aot
from optax_offload._places import memory

MIB = 2**20
SHAPE = (16, 1024, 512)
RULE = oo.Rule(".*/(mu|nu)/.*", slice_axis=0, codec="int8")

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def struct(mesh, dtype, kind="device"):
    """A stack on one device."""
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    return jax.ShapeDtypeStruct(SHAPE, dtype, sharding=sharding)


@pytest.mark.parametrize("chip", ["v5e:1x1", "h100"])
def test_only_codes_cross_and_rows_are_decoded(chip):
    """Host memory holds codes and scales, and the device a window of what they are."""
    target = aot.Target(chip)
    params = {"w": struct(target.mesh(), jnp.float32)}
    # So that mu is at 0/mu/w, as in any chain.
    tx = oo.offload(optax.chain(optax.scale_by_adam()), RULE, window_bytes=8 * MIB)
    state = oo.eval_shape(tx.init, params)
    compiled = aot.compile(
        tx.update,
        *(params, state, params),
        target=target,
        out_shardings=jax.tree.map(lambda s: s.sharding, (params, state)),
        donate_argnums=(0, 1),
    )
    peak = aot.peak(compiled)
    values = 16 * 1024 * 512
    assert peak.host_argument_bytes == 2 * values * (1 + 4 / 256)
    assert peak.host_temporary_bytes == 0
    assert peak.temporary_bytes < 4 * values  # One moment in float32 would take it.


@pytest.mark.parametrize(("dtype", "copied"), [(jnp.uint8, True), (jnp.uint16, False)])
def test_words_of_8_bits_would_be_tiled_anew(dtype, copied):
    """F68: by a v5e's compiler, whole and on the device, and words of 16 are not."""
    target = aot.Target("v5e:1x1")
    mesh = target.mesh()

    def update(codes, gradient):
        def body(i, codes):
            row = lax.dynamic_slice_in_dim(codes, i, 1, 0)
            row = memory.transfer(row, "device").astype(jnp.float32)
            row = row * 0.9 + lax.dynamic_slice_in_dim(gradient, i, 1, 0)
            row = memory.transfer(row.astype(dtype), "pinned_host")
            return lax.dynamic_update_slice_in_dim(codes, row, i, 0)

        return lax.fori_loop(0, SHAPE[0], body, codes)

    codes = struct(mesh, dtype, "pinned_host")
    compiled = aot.compile(
        update,
        *(codes, struct(mesh, jnp.float32)),
        target=target,
        out_shardings=codes.sharding,
        donate_argnums=0,
    )
    whole = SHAPE[0] * SHAPE[1] * SHAPE[2]
    assert (aot.peak(compiled).temporary_bytes > whole) == copied
