"""`stream` and `jit`: their arguments and their programs."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close
from jax import lax
from limited import limited
from scanned_models import (
    BATCH,
    loss,
    make_params,
    make_step,
    offloaded,
)
from small_steps import train_step

import optax_offload as oo
from benchmarks.common.differences import ulps
from optax_offload._ground import compat

NOTHING = "nothing is fused into a backward pass"
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


@pytest.mark.parametrize("late_gradients", ["both", True, None, ""])
def test_late_gradients_are_one_of_four(late_gradients):
    """Others are refused before anything is traced."""
    allowed = "must be one of 'auto', 'host', 'recompute', 'device'"
    with pytest.raises(
        ValueError, match=f"late_gradients is {late_gradients!r}; it {allowed}"
    ):
        oo.stream(lambda x: x, late_gradients=late_gradients)
    with pytest.raises(
        ValueError, match=f"late_gradients is {late_gradients!r}; it {allowed}"
    ):
        oo.jit(lambda x: x, late_gradients=late_gradients)


def unrolled(params, tokens):
    """A loss without a scan."""
    h = params["embedding"][tokens]
    for i in range(2):
        h = jnp.tanh(h @ params["layers"]["in"][i]) @ params["layers"]["out"][i]
    return jnp.mean((h @ params["head"]) ** 2)


@pytest.mark.parametrize("place", ["host", "device"])
def test_nothing_fused_is_the_same_program(place):
    """Letter for letter: without scans, and where a part is left outside."""
    plain = CLIPPED if place == "device" else offloaded(CLIPPED)
    params = make_params()
    state = plain.init(params)
    late_gradients = "auto" if place == "device" else "device"
    for of in (loss, unrolled):
        step = make_step(plain, of)
        args = (params, state, BATCH)
        want = jax.jit(step).lower(*args).as_text()
        assert (
            jax.jit(oo.stream(step, late_gradients=late_gradients))
            .lower(*args)
            .as_text()
            == want
        )
        assert (
            oo.jit(step, late_gradients=late_gradients).lower(*args).as_text() == want
        )
        assert str(
            oo.jit(step, late_gradients=late_gradients).schedule(*args)
        ).startswith(NOTHING)


def test_false_fuses_nothing():
    """Where it could be."""
    tx = offloaded(optax.adamw(1e-2))
    step, params = make_step(tx), make_params()
    args = (params, tx.init(params), BATCH)
    whole = oo.jit(step, fuse=False)
    assert whole.lower(*args).as_text() == jax.jit(step).lower(*args).as_text()
    assert str(whole.schedule(*args)).startswith(NOTHING)
    assert whole.lower(*args).as_text() != oo.jit(step).lower(*args).as_text()


def test_jit_does_it_as_stream_does():
    """One program, but for donation."""
    tx = offloaded(optax.adamw(1e-2))
    step, params = make_step(tx), make_params()
    args = (params, tx.init(params), BATCH)
    by_hand = jax.jit(oo.stream(step)).lower(*args).as_text()
    assert oo.jit(step).lower(*args).as_text() == by_hand


def test_arguments():
    """Static ones, by name, by keyword only, with defaults, numbers, None."""
    tx = optax.adamw(1e-2)

    def step(mode, params, *, state, tokens, scale=1.0, flag=None, extra=()):
        assert mode == "train"
        assert flag is None or isinstance(flag, str)
        grads = jax.grad(lambda p: scale * loss(p, tokens))(params)
        updates, state = tx.update(grads, state, params)
        return {"new": optax.apply_updates(params, updates), "rest": (state, extra)}

    params = make_params()
    given = {"state": tx.init(params), "tokens": BATCH}
    given |= {"scale": 2.0, "flag": "x", "extra": (None, np.ones(3))}
    options = {"static_argnums": 0, "static_argnames": "flag"}
    fused, by_hand = oo.jit(step, **options), jax.jit(oo.stream(step), **options)
    assert "2 gradients" in str(fused.schedule("train", params, **given))
    want = jax.jit(step, **options)("train", params, **given)
    for jitted in (fused, by_hand):
        assert ulps(jitted("train", params, **given), want) <= 8
        assert jitted.__wrapped__ is not None


def test_values_that_a_step_closes_over():
    """Arrays, and values of an outer trace."""
    tx = optax.adamw(1e-2)
    params = make_params()
    state, factor = tx.init(params), jnp.linspace(0.5, 1, 16)

    def step(params, state, bias):
        def model(params):
            h = params["embedding"][BATCH] * factor[None] + bias
            h, _ = lax.scan(
                lambda h, w: (jnp.tanh(h @ w["in"]) @ w["out"] * factor[None], None),
                h,
                params["layers"],
            )
            return jnp.mean((h @ params["head"]) ** 2)

        updates, state = tx.update(jax.grad(model)(params), state, params)
        return optax.apply_updates(params, updates), state

    def outer(fuse):
        return lambda p, s, x: fuse(lambda p, s: step(p, s, x))(p, s)

    want = jax.jit(outer(lambda f: f))(params, state, 0.5)
    assert ulps(jax.jit(outer(oo.stream))(params, state, 0.5), want) <= 8
    assert ulps(oo.jit(step)(params, state, 0.5), want) <= 8


def test_random_keys_in_a_step():
    """A key is split for the layers, and the rest of it returned."""
    tx = offloaded(optax.adamw(1e-2))

    def step(params, state, key):
        key, now = jax.random.split(key)

        def model(params):
            def body(h, x):
                w, key = x
                keep = jax.random.bernoulli(key, 0.8, h.shape)
                h = h + jnp.tanh(h @ w["in"]) @ w["out"]
                return jnp.where(keep, h, 0), None

            h = params["embedding"][BATCH]
            h, _ = lax.scan(body, h, (params["layers"], jax.random.split(now, 4)))
            return jnp.mean((h @ params["head"]) ** 2)

        updates, state = tx.update(jax.grad(model)(params), state, params)
        return optax.apply_updates(params, updates), state, key

    params = make_params()
    args = (params, tx.init(params), jax.random.key(3))
    fused = oo.jit(step)
    assert "2 gradients of 12.00 KiB never" in str(fused.schedule(*args))
    with jax.debug_key_reuse(True):
        got = fused(*args)
    assert ulps(got, jax.jit(step)(*args)) <= 8


def of_layers(layers):
    """A step of layers in a Python loop, and structs for a call of it, at rest."""

    def layer(x, w):
        y = jax.nn.gelu(x @ w["up"]) @ w["down"]
        return x + y * jax.nn.sigmoid(y)

    def loss_fn(params, x):
        for w in params:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    tx = oo.offload(optax.adamw(1e-3), r".*/(mu|nu)/.*")

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = [
        {"up": struct((512, 2048)), "down": struct((2048, 512))} for _ in range(layers)
    ]
    state = oo.eval_shape(tx.init, params)
    return train_step(tx, loss_fn), (oo.place(params, ".*"), state, struct((8, 512)))


def test_a_warning_that_is_an_error_is_that_error():
    """And not that of the first way to trace a step, which the second one mends."""
    step, args = of_layers(2)
    step = oo.jit(oo.stream(step, residuals="host"), donate_argnums=(0, 1))
    with pytest.raises(oo.OffloadWarning, match="asks for residuals='host' is called"):
        step.lower(*args)


def test_nothing_to_keep_has_a_reason():
    """Of few turns: where the step is lowered, and where its schedule is read."""
    step, args = of_layers(2)
    step = oo.jit(step, donate_argnums=(0, 1), residuals="host")
    why = r"nothing is kept there: no scan.* not cut into turns: "
    for each in (step.lower, step.schedule):
        with pytest.raises(oo.OffloadWarning, match=why):
            each(*args)


@pytest.mark.skipif(not compat.SEGMENTS_ARE_FREED, reason="cut with JAX 0.12 or newer")
def test_turns_that_leave_nothing_to_keep_have_a_reason():
    """As those of a short sequence: no scan is missed."""
    step, args = of_layers(40)
    step = oo.jit(step, donate_argnums=(0, 1), residuals="host")
    few = (*args[:2], jax.ShapeDtypeStruct((1, 512), jnp.float32))
    why = r"nothing is kept there: of the turns .* none leaves 1 MiB or more"
    with pytest.raises(oo.OffloadWarning, match=why):
        step.lower(*few)


@pytest.mark.parametrize("outer", [{}, {"residuals": "host"}], ids=["other", "same"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_in_another_is_planned_with_it(steps, outer, monkeypatch):
    """By the options of that, and loudly if those of the inner one differ."""
    limited(monkeypatch, least_residual_rows_bytes=0)
    tx = offloaded(optax.adamw(1e-2))
    params = make_params()
    state = tx.init(params)
    inner = oo.jit(make_step(tx, loss), residuals="host")

    def several(params, state, tokens):
        def once(carry, _):
            *carry, value = inner(*carry, tokens)
            return tuple(carry), value

        carry, values = lax.scan(once, (params, state), length=steps)
        return *carry, values[-1]

    def one(params, state, tokens):
        return inner(params, state, tokens)

    fn = oo.jit(one if steps == 1 else several, **outer)
    in_vain = pytest.warns(oo.OffloadWarning, match="asks for residuals='host'")
    with contextlib.nullcontext() if outer else in_vain:
        got = fn(params, state, BATCH)
    want = params, state
    for _ in range(steps):
        want = inner(*want[:2], BATCH)
    assert_close(got, want, rtol=1e-5, atol=0)
