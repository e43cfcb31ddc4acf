"""Replicated leaves spread over devices: which axis, and what is no leaf for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo


def on_mesh(spec=(), axes=("x",), shape=(4,), kind=AxisType.Auto, memory="device"):
    """A sharding on some of this process's devices."""
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    return NamedSharding(mesh, P(*spec), memory_kind=memory)


@pytest.mark.parametrize(
    ("shape", "auto", "explicit"),
    [
        ((), P(), P()),
        ((8,), P("x"), P("x")),
        ((3,), P(), P()),
        ((0,), P(), P()),
        # What is sliced along its first axis keeps that whole.
        ((8, 8), P("x"), P(None, "x")),
        ((8, 3), P("x"), P()),
        ((3, 8), P(None, "x"), P(None, "x")),
        ((8, 8, 8), P(None, "x"), P(None, "x")),
        ((8, 3, 8), P(None, None, "x"), P(None, None, "x")),
        ((8, 3, 3), P(), P()),
    ],
)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_which_axis(shape, auto, explicit, memory):
    """The first that the devices divide and that is not sliced along."""
    for kind, spec in ((AxisType.Auto, auto), (AxisType.Explicit, explicit)):
        sharding = on_mesh(kind=kind, memory=memory)
        x = jax.device_put(
            np.arange(np.prod(shape, dtype=int)).reshape(shape), sharding
        )
        struct = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        given = {"array": x, "struct": struct}
        found = oo.spread(given, "x")
        for y in found.values():
            assert y.sharding.is_equivalent_to(sharding.update(spec=spec), len(shape))
            assert y.sharding.memory_kind == memory
        np.testing.assert_array_equal(found["array"], x)
        if spec == P():
            assert found == given


def test_axes_that_are_in_use_stay():
    """A leaf is spread further over those that it is replicated over."""
    sharding = on_mesh(("x",), axes=("x", "y", "z"), shape=(2, 2, 2))
    x = jax.device_put(jnp.ones((8, 8)), sharding)
    assert oo.spread(x, "y").sharding.spec == P("x", "y")
    assert oo.spread(x, ["y", "z"]).sharding.spec == P("x", ("y", "z"))
    assert oo.spread(x, ["x", "y"]).sharding.spec == P("x", "y")
    assert oo.spread(x, "x") is x
    assert oo.spread(x, ()) is x
    alone = jax.device_put(jnp.ones((8, 8)), on_mesh(shape=(1,)))
    assert oo.spread(alone, "x") is alone


def test_what_cannot_be_spread():
    """All such leaves are named, with what to do."""
    good = jax.device_put(jnp.ones(8), on_mesh())
    with pytest.raises(ValueError, match=r"'b': not on a mesh with the axes \('x',\)"):
        oo.spread({"a": good, "b": jnp.ones(8)}, "x")
    with pytest.raises(ValueError, match=r"'a': not on a mesh with .*\('data',\)"):
        oo.spread({"a": good}, "data")
    with pytest.raises(TypeError, match=r"'a', 'b': traced, or no array\. spread is"):
        oo.spread({"a": 3, "b": np.ones(8), "c": good}, "x")
    with pytest.raises(TypeError, match="traced, or no array"):
        jax.jit(lambda x: oo.spread(x, "x"))(good)
