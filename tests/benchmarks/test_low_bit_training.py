"""The trainings that compare formats of state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import quick_of

from benchmarks.training import largest_step, low_bit
from benchmarks.training.tasks import TASKS, photograph
from benchmarks.training.variants import (
    VARIANTS,
    Linear8,
    encoded_share,
    in_float32,
    linear,
)


@pytest.mark.parametrize("signed", [True, False])
def test_linear_codes_are_even_steps(signed):
    """Of the largest magnitude of a block, the next one apart."""
    x = jnp.linspace(-1 if signed else 0, 1, 512).reshape(2, 256)
    x *= jnp.array([[1.0], [1e-3]])
    codes, scales = Linear8(signed).encode(x)
    got = Linear8(signed).decode(codes, scales)
    step = np.max(np.abs(x), axis=-1, keepdims=True) / (127 if signed else 255)
    assert codes.dtype == (jnp.int8 if signed else jnp.uint8)
    assert np.all(np.abs(got - x) <= 0.501 * step)


def test_linear_encodes_what_the_codecs_do():
    """Moments with blocks, the second without a sign; not the counter."""
    tx = linear(optax.adam(1e-3))
    params = {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}
    state = tx.init(params)
    assert (state[0].mu["w"].codes.dtype, state[0].nu["w"].codes.dtype) == (
        jnp.int8,
        jnp.uint8,
    )
    assert state[0].nu["b"].dtype == jnp.float32
    updates, new = tx.update(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_allclose(np.asarray(updates["w"]), -1e-3, rtol=1e-5)
    assert encoded_share(state) == pytest.approx(2 * 2**14 / (2 * (2**14 + 256) + 1))


def test_moments_of_short_parameters_are_float32():
    """What is compared are the parameters."""
    params = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    state = in_float32(optax.adam(1e-3)).init(params)
    assert {x.dtype for x in jax.tree.leaves((state[0].mu, state[0].nu))} == {
        jnp.dtype("float32")
    }


# Those with everything at once.
@pytest.mark.parametrize(
    "variant", quick_of([(x,) for x in list(VARIANTS)[-2:]], {(list(VARIANTS)[-1],)})
)
def test_variants_train(variant):
    """Two steps; a run asserts that its moments are encoded."""
    found = low_bit.run("image", variant, seed=0, steps=2)
    assert np.isfinite(found["loss"])
    assert found["state_bytes_per_parameter"] < 10.1


def test_seeds_begin_apart():
    """With other parameters and other batches."""
    first, second = (low_bit.run("image", "float32", seed, 2) for seed in (0, 1))
    again = low_bit.run("image", "float32", 0, 2)
    assert first["loss"] == again["loss"] != second["loss"]


def test_text_is_encoded_too():
    """All of its matrices have blocks of 256."""
    start, *_ = low_bit.program("text", "int8", 2)
    batch = next(TASKS["text"].batches(1, 0))
    _, state = jax.eval_shape(start, jax.random.key(0), batch)
    assert encoded_share(state) > 0.99


def test_nothing_held_out_is_trained_on():
    """The photograph is cut."""
    train, held_out = photograph()
    assert train.shape[-1] == 3 * held_out.shape[-1] == 384


def test_rows_compare_runs_of_a_seed():
    """And what is not finite is told, not averaged."""
    run = {
        "curve": [],
        "encoded_share": 1.0,
        "parameter_bytes": 4,
        "state_bytes_per_parameter": 2.0,
    }
    of = [run | {"loss": loss} for loss in (1.0, 2.0)]
    ours = [run | {"loss": loss} for loss in (1.1, 2.0)]
    found = low_bit.row("int8", ours, of)
    assert found["ratio"] == pytest.approx(1.05)
    assert (found["least"], found["most"]) == (1.0, pytest.approx(1.1))
    for loss in (float("nan"), 100.0):
        lost = low_bit.row("int8", [of[0], run | {"loss": loss}], of)
        assert lost["ratio"] is None


@pytest.mark.slow
def test_the_largest_step_is_measured():
    """The first step of Adam is a learning rate, in each format."""
    for codec in ("float32", "int8"):
        largest, loss = largest_step.train(codec, 1, 0.5, seed=0, steps=1)
        assert largest == pytest.approx(1, rel=1e-3)
        assert np.isfinite(loss)
