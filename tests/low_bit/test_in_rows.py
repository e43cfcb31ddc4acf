"""States are converted between forms row by row, from host memory to host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_offload as oo
from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload._low_bit import Encoded, by_rows, codec_of

RULES = [
    oo.Rule(r".*/(mu|nu)/.*", codec="int8", min_bytes=0),
    oo.Rule(r"(.*/)?master/.*", codec="bfloat16-remainder", min_bytes=0),
]


def _states():
    """A plain state, and it in six bytes, both in host memory; and its parameters."""
    shapes = {"stacked": (5, 16, 1024), "table": (71, 512)}
    tx = oo.offload(oo.master_weights(optax.adamw(1e-3)), RULES)
    key = jax.random.key(0)
    master = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
    state = tx.init(params)
    plain = oo.low_bit_decode(state, params)
    inner = plain.inner_state[0]._replace(mu=master, nu=jax.tree.map(jnp.abs, master))
    plain = plain._replace(master=master, inner_state=(inner, *plain.inner_state[1:]))
    plain = oo.set_memory_kind(plain, ".*/(stacked|table)", "pinned_host")
    return plain, oo.low_bit_encode(plain, state), params


def test_there_and_back():
    """Codes and remainders are the same however they were made."""
    plain, state, params = _states()
    oo.memory_report(state, RULES).check()
    decoded = oo.low_bit_decode(state, params)
    oo.memory_report(decoded, oo.Rule(".*/(stacked|table)")).check()
    for made in (oo.low_bit_encode(decoded, state), oo.place(plain, RULES)):
        oo.memory_report(made, RULES).check()
        jax.tree.map(np.testing.assert_array_equal, made, state)


def test_place_never_has_a_leaf_on_the_device(monkeypatch):
    """NumPy arrays go to host memory as they are, and are encoded from there."""
    plain, state, _ = _states()
    loaded = jax.device_get(plain)
    put = jax.device_put

    def spy(x, where, **options):
        arrays = [a for a in jax.tree.leaves(x) if not isinstance(a, jax.core.Tracer)]
        if getattr(where, "memory_kind", None) != "pinned_host":
            assert all(np.size(a) <= 1 for a in arrays)
        return put(x, where, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    made = oo.place(loaded, RULES)
    monkeypatch.undo()
    jax.tree.map(np.testing.assert_array_equal, made, state)


@pytest.mark.aot
@pytest.mark.newest
@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize(
    "codec", ["int8", "bfloat16-remainder", "nf4", "nf4-double", "int8-linear"]
)
def test_a_conversion_takes_rows(codec):
    """Of a leaf of 512 MiB, whatever the form."""
    target, shape = aot.Target("h100"), (32, 1024, 4096)
    plain = jax.ShapeDtypeStruct(shape, jnp.float32)
    half = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    of = codec_of(codec).fitting(plain)

    def encode(x):
        return Encoded.of(x, of, ""), ()

    def decode(x, half):
        return x.decoded(half), ()

    coded = jax.eval_shape(lambda x: encode(x)[0], plain)
    for fn, args in ((encode, (plain,)), (decode, (coded, half))):
        args = oo.set_memory_kind(args, ".*", "pinned_host")
        fn = jax.jit(by_rows(fn, [True] * len(jax.tree.leaves(args))))
        peak = aot.peak(aot.compile(fn, *args, target=target))
        assert peak.peak_bytes <= 160 * MIB
        assert not peak.host_temporary_bytes
