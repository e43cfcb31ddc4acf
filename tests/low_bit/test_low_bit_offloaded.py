"""Encoded state in host memory: only codes cross, whole, in slices, fused, sharded."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scanned_models
from harness import bits, committed, mesh_of, quick_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_bit_cases import MOMENTS, encoded_leaves, make_params
from program import emitted

import optax_offload as oo
from optax_offload._emit import carry_out
from optax_offload._emit import late_gradients as emit
from optax_offload._ground import trees
from optax_offload._places import memory
from optax_offload._schedule import schedule

LR = 1e-2
CODECS = ["int8", "int8-companded", "float8", "bfloat16", "bfloat16-stochastic"]
RULE = oo.Rule(MOMENTS, min_bytes=8)
FORMS = {
    "a rule with a codec": lambda tx, codec, **options: oo.offload(
        tx, dataclasses.replace(RULE, codec=codec), **options
    ),
    "offload(low_bit(...))": lambda tx, codec, **options: oo.offload(
        oo.low_bit(tx, MOMENTS, codec), RULE, **options
    ),
}


def kinds(tree):
    """The memory kind of each leaf, by its path."""
    return {p: x.sharding.memory_kind for p, x in trees.leaves_with_paths(tree)}


def three_updates(tx, params):
    """Updates and states of three steps, each update in a jit of its own."""
    update = jax.jit(tx.update)
    state = committed(tx.init(params))
    results = []
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), params)
        updates, state = update(grads, state, params)
        results.append((updates, state))
    return results


@functools.cache
def by_itself(codec):
    """Without offload."""
    tx = oo.low_bit(optax.adam(LR), MOMENTS, codec)
    return three_updates(tx, make_params())


@pytest.mark.filterwarnings(
    "ignore:.* over the window of 1:optax_offload.OffloadWarning"
)
@pytest.mark.parametrize(
    ("codec", "slices"),
    quick_of(
        itertools.product(CODECS, [True, False]),
        {("bfloat16-stochastic", True)},
    ),
)
def test_codes_are_those_without_offload(codec, slices):
    """Bit for bit, in the smallest slices and whole, with the same chances."""
    want = by_itself(codec)
    rule = dataclasses.replace(RULE, codec=codec)
    if slices:
        tx = oo.offload(optax.adam(LR), rule, window_bytes=1)
    else:
        tx = oo.offload(optax.adam(LR), dataclasses.replace(rule, slice_axis=None))
    got = three_updates(tx, make_params())
    for (updates, state), (plain_updates, plain_state) in zip(got, want, strict=True):
        assert jax.tree.structure(state) == jax.tree.structure(plain_state)
        assert bits(state) == bits(plain_state)
        assert bits(updates) == bits(plain_updates)
    text = str(tx.schedule(make_params()))
    assert ("slices" in text) == slices, text
    assert ("codes of 8 bits" in text) == (not codec.startswith("bfloat16")), text


def test_two_ways_to_say_it_are_one():
    """A rule with both, and `offload` around `low_bit`: the same program."""
    params = make_params()
    texts = []
    for form in FORMS.values():
        tx = form(optax.adam(LR), "int8")
        state = tx.init(params)
        texts.append(jax.jit(tx.update).lower(params, state, params).as_text())
        where = kinds(state)
        assert where.pop("0/count") == "device"
        assert set(where.values()) == {"pinned_host"}
        assert {"0/mu/embed/codes_int8", "0/mu/embed/scales"} <= where.keys()
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings(
    "ignore:.* over the window of 1:optax_offload.OffloadWarning"
)
@pytest.mark.parametrize("window_bytes", [1, None])
def test_only_codes_cross(window_bytes):
    """All that is put from the host to the device, or back, is codes or scales."""
    params = {"w": jnp.ones((32, 512))}
    rule = dataclasses.replace(RULE, codec="int8")
    tx = oo.offload(optax.adam(LR), rule, window_bytes=window_bytes)
    state = tx.init(params)
    text = str(emitted(jax.make_jaxpr(tx.update)(params, state, params)))
    moved = re.findall(r"[\w:]+:(\w+)(?:<host>)?\[([\d,]*)\] = device_put\[", text)
    sizes = {dtype: math.prod(map(int, shape.split(","))) for dtype, shape in moved}
    # Two codes are a word of 16 bits; of float32 there are the scales alone.
    assert sizes.keys() == {"u16", "f32"}
    assert sizes["f32"] <= 2 * 32


@pytest.mark.parametrize(
    "codec", [pytest.param("int8", marks=pytest.mark.slow), "bfloat16-stochastic"]
)
def test_donation_for_thirty_steps(codec):
    """Through `oo.jit`, state and parameters donated, compiled once."""
    params = make_params()
    tx = FORMS["a rule with a codec"](optax.adam(LR), codec)
    inner = oo.low_bit(optax.adam(LR), MOMENTS, codec)

    def train(tx, jit):
        def step(params, state):
            grads = jax.tree.map(jnp.sin, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jit(step, donate_argnums=(0, 1))
        args = make_params(), committed(tx.init(params))
        for _ in range(30):
            args = jitted(*args)
        return *args, jitted._cache_size()

    got_params, got_state, compilations = train(tx, oo.jit)
    want_params, want_state, _ = train(inner, jax.jit)
    assert compilations == 1
    assert "pinned_host" in kinds(got_state).values()
    for x in jax.tree.leaves(got_params):
        assert x.sharding.memory_kind == "device"
    # A value beside a midpoint has the other code after a rounding of another fusion.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        got_params,
        want_params,
    )
    assert jax.tree.structure(got_state) == jax.tree.structure(want_state)


# The fused backward pass.


def scanned_params():
    """Of `scanned_models`, wide enough for blocks of 256."""
    shapes = {
        "embedding": (32, 256),
        "head": (256, 32),
        "layers": {"in": (4, 256, 256), "out": (4, 256, 256)},
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: type(x) is tuple)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [jax.random.normal(k, s) / 16 for k, s in zip(keys, leaves, strict=True)]
    return committed(jax.tree.unflatten(structure, made))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("codec", ["int8", "int8-companded", "bfloat16-stochastic"])
def test_fused_into_the_backward_pass(codec, place):
    """As without: parameters within some ulp, and nearly all codes the same."""
    tx = oo.low_bit(optax.adamw(LR), MOMENTS, codec)
    if place == "host":
        tx = oo.offload(tx, RULE)
    step = scanned_models.make_step(tx)
    fused, plain = oo.jit(step), jax.jit(step)
    params = scanned_params()
    state = committed(jax.jit(tx.init)(params))
    got = want = (params, state)
    for _ in range(2):
        *got, _ = fused(*got, scanned_models.BATCH)
        *want, _ = plain(*want, scanned_models.BATCH)
    text = str(fused.schedule(*got, scanned_models.BATCH))
    assert text.startswith("backward scan of 4 iterations"), text
    assert kinds(got[1]) == kinds(state)
    assert jax.tree.structure(got[1]) == jax.tree.structure(state)
    codes, wanted = (encoded_leaves(x[1]) for x in (got, want))
    for path, x in codes.items():
        y = wanted[path]
        same = np.asarray(x.codes) == np.asarray(y.codes)
        assert np.mean(same) > 0.995, path
        if x.scales is not None:
            np.testing.assert_allclose(x.scales, y.scales, rtol=1e-2)
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        assert np.mean(np.abs(np.asarray(x) - np.asarray(y)) > 1e-4 * LR) < 0.005


# Sharded.


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective", "reduce-scatter")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize(
    ("codec", "place"),
    [
        ("int8", "host"),
        *(
            pytest.param(codec, place, marks=pytest.mark.slow)
            for codec in ("int8", "int8-companded", "bfloat16-stochastic")
            for place in ("host", "device")
            if (codec, place) != ("int8", "host")
        ),
    ],
)
def test_sharded_without_collectives(codec, spec, axis_type, place):
    """Codes and scales are where their values are, and no device asks another."""
    mesh = mesh_of(4, axis_type)
    sharding = NamedSharding(mesh, spec)
    params = {"w": jax.random.normal(jax.random.key(1), (16, 1024))}
    tx = oo.low_bit(optax.adam(LR), MOMENTS, codec)
    want = three_updates(tx, params)[-1]
    if place == "host":
        tx = oo.offload(tx, RULE)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding)
        state = tx.init(params)
        update = jax.jit(tx.update)
        kind = "pinned_host" if place == "host" else "device"
        for leaf in encoded_leaves(state).values():
            for x in (leaf.codes, leaf.scales):
                if x is not None:
                    wanted = sharding.with_memory_kind(kind)
                    assert x.sharding.is_equivalent_to(wanted, 2), x.sharding
        text = str(update.lower(params, state, params).compile().as_text())
        assert not [name for name in COLLECTIVES if f" {name}" in text]
        got = params, state
        for i in range(3):
            grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), params)
            got = update(grads, got[1], params)
    assert bits(got[1]) == bits(want[1])
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-6)


@pytest.mark.parametrize("offloaded", [True, False])
def test_blocks_on_two_devices_warn(offloaded):
    """In Auto mode; in Explicit mode, where types tell, blocks are smaller."""
    rule = oo.Rule(MOMENTS, codec="int8", min_bytes=0)
    tx = (oo.offload if offloaded else oo.low_bit)(optax.adam(LR), rule)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(4, axis_type)
        with jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, P(None, "x"))
            params = jax.device_put({"w": jnp.ones((64, 512))}, sharding)
            if axis_type == AxisType.Explicit:
                leaves = encoded_leaves(tx.init(params)).values()
                assert {x.codec.block for x in leaves} == {128}
                continue
            message = r"'0/mu/w', '0/nu/w': sharded so that blocks of the codec lie on"
            with pytest.warns(oo.OffloadWarning, match=message):
                tx.init(params)


def clipped_steps(late_gradients, windows=(None, None)):
    """The jaxpr of a step whose gradients wait, with two offloaded optimizers."""
    rule = oo.Rule(MOMENTS, min_bytes=8, codec="int8")
    params = {"a": jnp.ones((4, 512, 256)), "b": jnp.ones((4, 256, 512))}
    txs = {
        name: oo.offload(optax.adam(LR), rule, window_bytes=window)
        for name, window in zip(params, windows, strict=True)
    }
    tx = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.partition(txs, {name: name for name in params}),
    )

    def step(params, state, x):
        def layer(h, w):
            return jnp.tanh(h @ w["a"]) @ w["b"], None

        def loss(params):
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    step = oo.stream(step, late_gradients=late_gradients)
    return emitted(jax.make_jaxpr(step)(params, tx.init(params), jnp.ones((2, 512))))


def test_codes_whose_gradients_wait_are_counted_as_decoded(monkeypatch):
    """By the window, which is the least of those that were asked for."""
    given = []

    def noted(update, window_bytes, *args):
        given.append((update, window_bytes))
        return carry_out(update, window_bytes, *args)

    monkeypatch.setattr(emit, "carry_out", noted)
    clipped_steps("host", (2**22, 2**21))
    ((update, window_bytes),) = given
    assert window_bytes == 2**21
    (planned,) = schedule(update, window_bytes).straights()
    # Two moments, a byte for each number where they are at rest; the gradient, of four.
    numbers = 4 * 512 * 256
    scales = 2 * 4 * numbers // 256
    for group in planned.groups:
        assert group.nbytes == (2 * 4 + 4) * numbers + scales
        assert group.moved_bytes == (2 + 4) * numbers + scales
    assert all(n <= 2**21 for loop in planned.loops for n in loop.slice_bytes)


@pytest.mark.parametrize("window_bytes", [None, 2**19])
def test_codes_that_a_scan_stores_keep_their_layout(window_bytes):
    """A TPU's compiler would turn their axes, and could not write a row of them."""
    step = clipped_steps("recompute", (window_bytes,) * 2)
    *_, scan = (e for e in step.eqns if e.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    producers = {v: e for e in body.eqns for v in e.outvars}
    stored = [
        producers[e.invars[0]]
        for e in body.eqns
        if e.primitive.name == "device_put"
        and e.outvars[0].aval.dtype == jnp.uint16
        and memory.on_host(e.outvars[0].aval)
    ]
    assert len(stored) >= 4
    assert all("layout_constraint" in str(e) for e in stored)
