"""Encoded states saved and restored, and changed for those without codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_bit_cases import MOMENTS, distance, encoded_leaves, make_params

import optax_offload as oo

ocp = pytest.importorskip("orbax.checkpoint")


LR = 1e-2
RULE = oo.Rule(MOMENTS, min_bytes=8)
CODECS = ["int8", "int8-companded", "float8", "bfloat16", "bfloat16-stochastic"]
codecs = pytest.mark.parametrize(
    "codec",
    [pytest.param(c, marks=[pytest.mark.slow] * (c != "int8")) for c in CODECS],
)
places = pytest.mark.parametrize(
    "place", [pytest.param("device", marks=pytest.mark.slow), "host"]
)


def transformation(codec, place):
    """Adam in few bits, on the device or off it."""
    tx = oo.low_bit(optax.adam(LR), MOMENTS, codec)
    return oo.offload(tx, RULE) if place == "host" else tx


def params_on(devices):
    """Parameters sharded by rows, or on one device."""
    params = {"w": jax.random.normal(jax.random.key(0), (16, 512)), "b": jnp.ones(8)}
    if devices == 1:
        return jax.device_put(params, jax.devices()[0])
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    return jax.device_put(params, NamedSharding(mesh, P("x")))


@functools.cache
def state_of(codec, place, devices=1):
    """A state after a step, so that nothing in it is zero."""
    params = params_on(devices)
    tx = transformation(codec, place)
    return jax.jit(tx.update)(params, tx.init(params), params)[1]


def where(tree):
    """The shape, dtype and sharding of each leaf."""
    return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]


def assert_where(tree, template):
    """Every leaf in its memory, and sharded as the template says."""
    assert jax.tree.structure(tree) == jax.tree.structure(template)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(template), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.memory_kind == y.sharding.memory_kind
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@codecs
@places
def test_restored_on_another_mesh(codec, place, tmp_path):
    """Bit for bit, with a template made on two devices of what was saved from four."""
    state = state_of(codec, place, 4)
    tx = transformation(codec, place)
    template = oo.eval_shape(tx.init, params_on(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", template)
    assert bits(restored) == bits(state)
    assert_where(restored, template)
    wanted = params_on(2)["w"].sharding
    kind = "pinned_host" if place == "host" else "device"
    codes = restored[0].mu["w"].codes
    assert codes.sharding.is_equivalent_to(wanted.with_memory_kind(kind), 2)
    # And a step goes on from there.
    params = params_on(2)
    _, state = jax.jit(tx.update)(params, restored, params)
    assert jax.tree.structure(state) == jax.tree.structure(template)


@places
def test_shardings_of_an_encoded_state(place):
    """`state_shardings` has those that the state has, for `jit` or a restore."""
    params, tx = params_on(4), transformation("int8", place)
    shardings = oo.state_shardings(tx.init, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    assert_where(state, tx.init(params))
    assert_where(jax.device_put(state, shardings), state)


@codecs
@places
def test_there_and_back_between_formats(codec, place):
    """To float32 and back: encoded once more it has the same codes and scales."""
    state, tx = state_of(codec, place), transformation(codec, place)
    inner, params = optax.adam(LR), params_on(1)
    like = oo.eval_shape(tx.init, params)
    decoded = oo.low_bit_decode(state)
    plain = inner.init(params)
    assert jax.tree.structure(decoded) == jax.tree.structure(plain)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(decoded)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(plain)
    ]
    kind = "pinned_host" if place == "host" else "device"
    assert decoded[0].mu["w"].sharding.memory_kind == kind
    again = oo.low_bit_encode(decoded, like)
    assert_where(again, like)
    for old, new in zip(
        *(encoded_leaves(s).values() for s in (state, again)), strict=True
    ):
        assert bits([old.codes, old.scales]) == bits([new.codes, new.scales])
    # The template of either.
    template = oo.low_bit_decode(like)
    assert jax.tree.structure(template) == jax.tree.structure(plain)
    for x, y in zip(jax.tree.leaves(template), jax.tree.leaves(decoded), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.memory_kind == y.sharding.memory_kind


def test_from_a_float32_checkpoint(tmp_path):
    """Restored by a template without codes, encoded, and trained on."""
    inner, tx = optax.adam(LR), transformation("int8", "host")
    params = params_on(4)
    _, plain = jax.jit(inner.update)(params, inner.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", plain)
    like = oo.eval_shape(tx.init, params_on(2))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", oo.low_bit_decode(like))
    assert restored[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert bits(restored) == bits(plain)
    state = oo.low_bit_encode(restored, like)
    assert_where(state, like)
    # Other gradients: of the same again, entries of a thousandth of the largest would
    # move less (0.024 of all), since their second moments are encoded as larger.
    params = params_on(2)
    gradients = jax.tree.map(jnp.flip, params)
    updates, state = jax.jit(tx.update)(gradients, state, params)
    params = params_on(4)
    want, _ = jax.jit(inner.update)(jax.tree.map(jnp.flip, params), plain, params)
    assert distance(updates, want) < 0.02


@pytest.mark.parametrize("traced", [True, False])
def test_master_weights_between_formats(traced):
    """Bit for bit, given the parameters that are their upper halves."""
    tx = oo.master_weights(optax.sgd(LR))
    short = oo.low_bit(tx, oo.Rule("master/.*", codec="bfloat16-remainder"))
    params = make_params(jnp.bfloat16)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    like = oo.eval_shape(short.init, params)

    def there_and_back(state, params):
        encoded = oo.low_bit_encode(state, like)
        return encoded, oo.low_bit_decode(encoded, params)

    if traced:
        there_and_back = jax.jit(there_and_back)
    encoded, back = there_and_back(state, params)
    assert jax.tree.structure(encoded) == jax.tree.structure(like)
    assert bits(back) == bits(state)
    with pytest.raises(ValueError, match=r"'master/embed', .*: half of each is in a"):
        oo.low_bit_decode(encoded)


@pytest.mark.parametrize("kind", ["pinned_host", "disk"])
@codecs
def test_whole_states_there_and_back(codec, kind, tmp_path):
    """`offload_states` and `reload_states`, to host memory and to files."""
    options = {"memory_kind": kind}
    if kind == "disk":
        pytest.importorskip("tensorstore", reason="needs the extra disk")
        options["directory"] = tmp_path
    state = jax.tree.map(jnp.copy, state_of(codec, "device", 4))
    want, before = bits(state), where(state)
    there = oo.offload_states(state, **options)
    assert jax.tree.structure(there) == jax.tree.structure(state)
    assert repr(there[0].mu["w"]).startswith("Encoded(")
    back = oo.reload_states(there)
    assert bits(back) == want
    assert where(back) == before


def test_placed_after_a_loader_that_forgets_memories():
    """`place` puts codes and scales where a template has them."""
    tx = transformation("int8", "host")
    template = oo.eval_shape(tx.init, params_on(4))
    state = state_of("int8", "host", 4)
    on_device = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), state
    )
    placed = oo.place(on_device, template)
    assert_where(placed, template)
    assert bits(placed) == bits(state)
    from_numpy = oo.place(jax.device_get(state), template)
    assert_where(from_numpy, template)
    assert bits(from_numpy) == bits(state)


@pytest.mark.slow
def test_numpy_is_encoded_too():
    """As a loader without JAX gives it."""
    like = oo.eval_shape(transformation("int8", "host").init, params_on(1))
    plain = jax.device_get(oo.low_bit_decode(state_of("int8", "device")))
    state = oo.low_bit_encode(plain, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert state[0].mu["w"].codes.sharding.memory_kind == "pinned_host"


def test_encoded_with_the_dtype_of_like():
    """A float32 checkpoint for a run whose moments are bfloat16."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_on(1))
    like = oo.eval_shape(transformation("int8", "device").init, params)
    plain = optax.adam(LR).init(params_on(1))
    state = oo.low_bit_encode(plain, like)
    assert state[0].mu["w"].dtype == like[0].mu["w"].dtype == jnp.bfloat16


@places
@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
@pytest.mark.parametrize("codec", ["int8", "int8-companded", "bfloat16"])
def test_values_that_codes_cannot_hold(codec, value, place):
    """Are named before they are lost; bfloat16 has negative numbers."""
    tx = transformation(codec, place)
    like = oo.eval_shape(tx.init, params_on(1))
    plain = oo.low_bit_decode(state_of(codec, place))
    nu = np.array(plain[0].nu["w"])
    nu[3, 300] = value
    nu = jax.device_put(nu, plain[0].nu["w"].sharding)
    plain = (plain[0]._replace(nu={**plain[0].nu, "w": nu}), *plain[1:])
    if codec == "bfloat16" and value == -1:
        oo.low_bit_encode(plain, like)
        return
    with pytest.raises(ValueError, match=r"^'0/nu/w': values that are infinite or"):
        oo.low_bit_encode(plain, like)


def test_states_that_differ():
    """In structure, in shape, and in codes that are there already."""
    like = oo.eval_shape(transformation("int8", "device").init, params_on(1))
    with pytest.raises(ValueError, match=r"structure, at '0/count', .* and 2 more"):
        oo.low_bit_encode(optax.sgd(LR, momentum=0.9).init(params_on(1)), like)
    other = optax.adam(LR).init({"w": jnp.ones((16, 256)), "b": jnp.ones(8)})
    with pytest.raises(ValueError, match=r"'0/mu/w' has shape \(16, 256\), and like"):
        oo.low_bit_encode(other, like)
    with pytest.raises(ValueError, match=r"^'0/mu/w', '0/nu/w': encoded already, a"):
        oo.low_bit_encode(state_of("float8", "device"), like)
    same = state_of("int8", "device")
    assert bits(oo.low_bit_encode(same, like)) == bits(same)
    assert len(encoded_leaves(same)) == 2


def test_codes_are_not_taken_for_others(tmp_path):
    """Of another codec, or packed for other shards: of one shape, and named apart."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    w = jax.device_put(jnp.ones((256, 1024)), NamedSharding(mesh, P(None, "x")))
    rule = oo.Rule("w", codec="nf4", min_bytes=0)
    saved, other = (
        oo.place({"w": w}, rule),
        oo.place({"w": np.ones(w.shape, np.float32)}, rule),
    )
    assert [x.shape for x in jax.tree.leaves(saved)] == [
        x.shape for x in jax.tree.leaves(other)
    ]
    states = state_of("int8", "device"), state_of("float8", "device")
    named = "codes_nf4_512", "codes_float8"
    with ocp.StandardCheckpointer() as checkpointer:
        for (of, to), name in zip([(saved, other), states], named, strict=True):
            checkpointer.save(tmp_path / name, of)
            checkpointer.wait_until_finished()
            template = jax.tree.map(ocp.utils.to_shape_dtype_struct, to)
            with pytest.raises((ValueError, KeyError), match=name):
                checkpointer.restore(tmp_path / name, template)
            template = jax.tree.map(ocp.utils.to_shape_dtype_struct, of)
            restored = checkpointer.restore(tmp_path / name, template)
            assert bits(oo.low_bit_decode(restored)) == bits(oo.low_bit_decode(of))


@pytest.mark.parametrize("place", ["device", "host"])
def test_flax_saves_codes_and_scales(place):
    """As it saves arrays; what has other codes is an error, which says how to go on."""
    serialization = pytest.importorskip("flax.serialization")
    state = state_of("int8", place)
    template = oo.eval_shape(transformation("int8", place).init, params_on(1))
    loaded = serialization.from_bytes(template, serialization.to_bytes(state))
    placed = oo.place(loaded, template)
    assert_where(placed, template)
    assert bits(placed) == bits(state)
    other = serialization.to_bytes(state_of("bfloat16", place))
    with pytest.raises(ValueError, match=r"codes_int8, scales; what was saved is \["):
        serialization.from_bytes(template, other)
    plain = serialization.to_bytes(oo.low_bit_decode(state))
    with pytest.raises(ValueError, match=r"what was saved is ndarray\..*oo\.place"):
        serialization.from_bytes(template, plain)
