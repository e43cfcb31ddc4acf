"""New parameters that are made by the update that they come from, in its slices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._step.streaming import Options, traced

WIDTH, ROWS = 128, 512


def loss(params, x):
    """Two layers in a scan, and an embedding outside of it."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    return jnp.mean((h @ params["embedding"].T).astype(jnp.float32) ** 2)


def make_params(dtype=jnp.bfloat16):
    """Parameters of these layers."""
    layers, embedding = jax.random.split(jax.random.key(0))
    params = {
        "layers": jax.random.normal(layers, (2, WIDTH, WIDTH)) / 8,
        "embedding": jax.random.normal(embedding, (ROWS, WIDTH)) / 8,
    }
    return jax.tree.map(lambda x: x.astype(dtype), params)


def scaled(params, updates):
    """Updates that are scaled after the offloaded optimizer."""
    return jax.tree.map(lambda p, u: (p + 0.5 * u).astype(p.dtype), params, updates)


def measured(params, updates):
    """New parameters, and a norm of the updates, which are on the device for it."""
    return optax.apply_updates(params, updates), optax.tree.norm(updates)


def moved_on(params, updates):
    """Parameters that are added to what was computed of another row."""
    return jax.tree.map(lambda p, u: jnp.roll(p, 1, 0) + u, params, updates)


def step_of(tx, apply):
    """A train step that has its own way of applying updates."""

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return apply(params, updates), state

    return step


X = jnp.ones((4, WIDTH), jnp.bfloat16) / 2
# Its updates are in float32, and so in no place of a gradient. Its steps are as large
# as gradients, which are rounded otherwise where they are computed in a scan.
SGD = oo.master_weights(optax.sgd(1.0, momentum=0.9))


def assert_close(got, want):
    """As far apart as roundings of the largest number of each leaf to bfloat16."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.abs(x - y).max() <= 2**-7 * np.abs(y).max()


def replaced(step, *args):
    """The shapes of the arguments that the rest of an update replaces."""
    found, _, _ = traced(step, args, {}, Options(True, "auto", "device"))
    (left,) = (node.left for node in found.rest if node.left)
    aliases = [x.alias for x in left.update.outputs if x.is_update]
    arguments = [left.operands[i] for i in aliases if i is not None]
    return [v.aval.shape for v in arguments if v in found.step.program.invars]


@pytest.mark.parametrize(
    ("apply", "found"),
    [
        (optax.apply_updates, True),
        (scaled, True),
        (measured, True),
        (moved_on, False),
    ],
)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_what_makes_new_parameters(apply, found, kind):
    """Arithmetic on updates, of which nothing else is kept; with the same values."""
    tx = oo.offload(SGD)
    plain = jax.jit(step_of(SGD, apply))
    step = step_of(tx, apply)
    want = plain(make_params(), SGD.init(make_params()), X)
    params = oo.set_memory_kind(make_params(), "embedding", kind)
    state = tx.init(params)
    assert replaced(step, params, state, X) == ([(ROWS, WIDTH)] if found else [])
    got = oo.jit(step)(params, state, X)
    assert_close(got, want)
    if found:
        new = got[0][0] if apply is measured else got[0]
        assert new["embedding"].sharding.memory_kind == kind


@pytest.mark.parametrize(
    "kind", [pytest.param("device", marks=pytest.mark.slow), "pinned_host"]
)
def test_steps_that_keep_their_state(kind):
    """An update that is dropped adds nothing, not even what is not finite."""
    inner = optax.MultiSteps(SGD, 2)
    tx = oo.offload(inner)
    plain = jax.jit(step_of(inner, optax.apply_updates))
    step = oo.jit(step_of(tx, optax.apply_updates))
    want = make_params(), inner.init(make_params())
    params = oo.set_memory_kind(make_params(), "embedding", kind)
    got = params, tx.init(params)
    assert (ROWS, WIDTH) in replaced(step_of(tx, optax.apply_updates), *got, X)
    for _ in range(4):
        want, got = plain(*want, X), step(*got, X)
        assert_close(got, want)
    broken, kept = step(*got, X * jnp.inf)
    jax.tree.map(np.testing.assert_array_equal, broken, got[0])
    assert not jnp.isfinite(kept.acc_grads["embedding"]).all()


def test_no_two_results_take_one_place():
    """What follows from new parameters, and is like them, is made beside them."""

    def halved(params, updates):
        new = optax.apply_updates(params, updates)
        return new, jax.tree.map(lambda x: x / 2, new)

    step, params = step_of(oo.offload(SGD), halved), make_params()
    state = oo.offload(SGD).init(params)
    assert replaced(step, params, state, X) == [(ROWS, WIDTH)]
    want = jax.jit(step_of(SGD, halved))(params, SGD.init(params), X)
    assert_close(oo.jit(step)(params, state, X), want)


def test_updates_in_the_place_of_gradients():
    """Nothing is saved, so they are left to be added."""
    tx = oo.offload(optax.adamw(1e-2))
    step = step_of(tx, optax.apply_updates)
    params, x = make_params(jnp.float32), X.astype(jnp.float32)
    assert replaced(step, params, tx.init(params), x) == []
    params = oo.set_memory_kind(params, "embedding", "pinned_host")
    assert replaced(step, params, tx.init(params), x) == [(ROWS, WIDTH)]


@pytest.mark.aot
@pytest.mark.skipif(not compat.COPIES_AT_POSITIONS, reason="refused before JAX 0.11.1")
def test_no_update_is_there_whole():
    """Of parameters in bfloat16, whose updates are in float32."""
    tx = oo.offload(SGD, window_bytes=2**18)
    params = oo.set_memory_kind(make_params(), "layers", "pinned_host")
    state = oo.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    compiled = oo.aot.compile(
        oo.stream(step_of(tx, optax.apply_updates)),
        *(params, state, X),
        target=oo.aot.Target("h100"),
        donate_argnums=(0, 1),
        out_shardings=shardings,
    )
    text = compiled.as_text()
    assert f"bf16[{ROWS},{WIDTH}]" in text
    whole = f"f32[{ROWS},{WIDTH}]" + "{1,0} "  # On the host it has S(5).
    assert whole not in text
