"""Parameters rounded by chance: right on average, and the same everywhere."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from harness import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_bit_cases import make_params

import optax_offload as oo
from optax_offload._low_bit import chance


def rounded(x, seed=0, step=0, path="w"):
    """Float32 values, rounded by a key."""
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(chance.rounded(x, chance.key_of(path, step, seed)))


def after(tx, params, updates, state=None):
    """Parameters after an update, and the state."""
    state = tx.init(params) if state is None else state
    updates, state = jax.jit(tx.update)(updates, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_right_on_average(fraction, sign):
    """Up as often as a value is near: within 4.5 standard errors of 2**18 draws."""
    x = np.float32(sign * (1 + fraction / 128))
    drawn = rounded(np.full((512, 512), x)).astype(np.float64)
    assert set(np.unique(drawn)) == {sign * 1.0, sign * (1 + 1 / 128)}
    up = np.mean(drawn != sign)
    error = np.sqrt(fraction * (1 - fraction) / drawn.size)
    assert abs(up - fraction) < 4.5 * error + 2**-16


def test_many_steps_add_up():
    """Updates far below what a bfloat16 takes up; nearest rounding stands still."""
    params = {"w": jnp.ones((128, 256), jnp.bfloat16)}
    step = {"w": jnp.full((128, 256), 2**-12)}
    tx, state = oo.stochastic_round(), None
    nearest = params
    for _ in range(32):
        params, state = after(tx, params, step, state)
        nearest = optax.apply_updates(nearest, step)
    np.testing.assert_array_equal(nearest["w"], 1)
    mean = np.asarray(params["w"], np.float64).mean()
    # A value's variance in a step is at most a quarter of 2**-14.
    assert abs(mean - 1 - 2**-7) < 4.5 * np.sqrt(32 / 4 * 2**-14 / 2**15)


def test_exact_values_stay():
    """What bfloat16 has is not moved, whatever is drawn."""
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded(x.astype(np.float32)), x)


def test_the_ends_of_the_range():
    """Infinities, NaN and zeros stay, and nothing finite becomes infinite."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 0.0, -0.0, 1e-40])
    for seed in range(8):
        got = rounded(x, seed)
        np.testing.assert_array_equal(got[:2], x[:2])
        assert np.isnan(got[2])
        np.testing.assert_array_equal(got[3:5], [largest, -largest])
        np.testing.assert_array_equal(np.signbit(got[5:7]), [False, True])
        assert 0 <= got[7] < 2e-40


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
@settings(deadline=None, max_examples=25)
def test_one_of_two_neighbours(values):
    """Of every finite float32."""
    x = np.array(values, np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    got = rounded(x).view(np.uint16).astype(np.int64)
    down = (x.view(np.uint32) >> 16).astype(np.int64)
    assert np.all((got == down) | (got == down + 1))


def test_a_seed_gives_the_same_again():
    """And another seed, step or path another."""
    x = np.full((16, 256), 1.004)
    want = rounded(x)
    np.testing.assert_array_equal(rounded(x), want)
    for other in ({"seed": 1}, {"step": 1}, {"path": "v"}):
        assert np.mean(rounded(x, **other) == want) < 0.7
    # Rows differ too.
    assert np.mean(want[0] == want[1]) < 0.7


def test_apply_updates_gives_the_rounded_value():
    """A neighbour of the sum, for updates of every size up to the parameter's own."""
    params = make_params(jnp.bfloat16)
    updates = jax.tree.map(
        lambda p: jnp.asarray(
            np.asarray(p, np.float32)
            * np.linspace(-0.9, 1, p.shape[-1], dtype=np.float32) ** 5
        ),
        params,
    )
    new, _ = after(oo.stochastic_round(), params, updates)
    for p, u, n in zip(*map(jax.tree.leaves, (params, updates, new)), strict=True):
        assert n.dtype == jnp.bfloat16
        total = np.asarray(p, np.float32) + np.asarray(u)
        down = np.asarray(total).view(np.uint32) >> 16
        got = np.asarray(n).view(np.uint16)
        assert np.all((got == down) | (got == down + 1))


def test_steps_and_leaves_draw_differently():
    """Two leaves of equal values; two steps of one."""
    params = {"a": jnp.ones((16, 256), jnp.bfloat16)}
    params["b"] = params["a"]
    tx = oo.stochastic_round()
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 2**-8), params)
    first, state = after(tx, params, updates)
    second, _ = after(tx, params, updates, state)
    drawn = [np.asarray(x) for x in (first["a"], first["b"], second["a"])]
    for i in range(3):
        assert 0.4 < np.mean(drawn[i] == drawn[i - 1]) < 0.6


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")])
def test_the_same_on_all_devices(spec, axis_type):
    """Replicated and sharded, the bits of one device."""
    params = {"w": jax.random.normal(jax.random.key(0), (16, 256), jnp.bfloat16)}
    updates = {"w": jnp.full((16, 256), 1e-3)}
    tx = oo.stochastic_round()
    want, _ = after(tx, params, updates)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        params, updates = jax.device_put((params, updates), NamedSharding(mesh, spec))
        got, _ = after(tx, params, updates)
        for shard in got["w"].addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), np.asarray(want["w"])[shard.index]
            )


def test_other_dtypes_are_left():
    """Their updates pass as they are, also those of integers."""
    params = {"f": jnp.ones(4), "h": jnp.ones(4, jnp.float16), "i": jnp.arange(4)}
    updates = jax.tree.map(jnp.ones_like, params)
    got, _ = oo.stochastic_round().update(
        updates, oo.stochastic_round().init(params), params
    )
    assert bits(got) == bits(updates)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.masked(tx, {"w": True, "frozen": False}),
        lambda tx: optax.partition(
            {"train": tx, "keep": optax.set_to_zero()},
            {"w": "train", "frozen": "keep"},
        ),
    ],
)
def test_of_a_part_of_the_parameters(wrap):
    """Masked leaves pass; those that are None have no update."""
    params = {
        "w": jnp.ones((16, 256), jnp.bfloat16),
        "frozen": jnp.ones(8, jnp.bfloat16),
    }
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 2**-8), params)
    tx = wrap(oo.stochastic_round())
    new, _ = after(tx, params, updates)
    assert len(np.unique(np.asarray(new["w"], np.float32))) == 2
    np.testing.assert_array_equal(new["frozen"], 1)
    params["frozen"] = updates["frozen"] = None
    got, _ = after(oo.stochastic_round(), params, updates)
    assert got["frozen"] is None


def test_with_extra_arguments_and_inside_others():
    """It ignores what it does not need, and counts in `MultiSteps` real steps."""
    params = {"w": jnp.ones((16, 256), jnp.bfloat16)}
    updates = {"w": jnp.full((16, 256), 2**-8)}
    tx = optax.MultiSteps(oo.stochastic_round(), 2).gradient_transformation()
    state = tx.init(params)
    for wanted in (1, 2):
        changes, state = tx.update(updates, state, params)
        new = optax.apply_updates(params, changes)
        assert len(np.unique(np.asarray(new["w"], np.float32))) == wanted
    tx = oo.stochastic_round()
    tx.update(updates, tx.init(params), params, value=1.0)


def test_errors():
    """A seed that is none, and parameters that are not given."""
    for seed in (True, 1.0, jax.random.key(0)):
        with pytest.raises(TypeError, match=r"(?s)seed is .*; it must be an int"):
            oo.stochastic_round(seed)
    tx = oo.stochastic_round()
    with pytest.raises(ValueError, match=r"stochastic_round needs params: tx\.update"):
        tx.update({}, tx.init({}))
