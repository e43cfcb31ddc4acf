"""Every optimizer in the table, fused into the backward pass, is what it was."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers import INSIDE
from scanned_models import (
    BATCH,
    DONATED,
    make_params,
    make_step,
    offloaded,
    train,
    ulps,
)

import optax_offload as oo
from optax_offload._program import at_rest

# In units of the last place of each leaf's maximum, after five steps. 16.4 was seen, of
# clipping, whose norm is summed up in another order; 4 of what needs no norm as a rule.
BOUND = 32
# A number that rounds the other way to bfloat16 is 2^16 units of float32 away; what is
# clipped or divided by nearly nothing makes much of little. The mean of Adafactor's
# updates is 55 away from itself, plain, jitted and not, on a CPU where it is 59 fused.
EXCEPTIONS = {"adafactor_momentum": 128, "adam_bfloat16_mu": 128, "adopt": 128}
# They mix all layers, or all leaves at once: of these nothing is fused.
NOT_FUSED = {
    "backtracking": "reshape needs",
    "dadapt_adamw": "reshape needs",
    "dog": "its update needs all gradients first",
    "lbfgs": "reshape needs",
    "mechanic": "reshape needs",
    "momo_adam": "reshape needs",
    "novograd": "reduce_sum needs",
    "prodigy": "reshape needs",
}
# They need something first, for which no gradient waits unless state is offloaded.
NEED_ALL = {
    "adafactor",
    "adafactor_momentum",
    "apply_if_finite",
    "clip_and_schedule",
    "lamb",
    "lars",
    "multi_steps_skip",
}
QUICK = ["adamw", "clip_and_schedule"]


@pytest.fixture(autouse=True)
def rank_promotion():
    """Optimizers of optax promote ranks; that is theirs to do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def named(names):
    """Of these the quick ones, and the others as slow; one process for a name."""
    marks = {
        name: [pytest.mark.xdist_group(name)] + [pytest.mark.slow] * (name not in QUICK)
        for name in names
    }
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in sorted(names)]
    )


@functools.cache
def plain_results(name):
    """Five steps of the plain optimizer, not fused."""
    tx = INSIDE[name]()
    return train(jax.jit(make_step(tx), **DONATED), tx)


def assert_as_plain(name, got):
    """As far as rounding allows."""
    assert ulps(got, plain_results(name)) <= EXCEPTIONS.get(name, BOUND)


@named(INSIDE)
@pytest.mark.parametrize("place", ["host", "device"])
def test_five_steps(name, place):
    """State in host memory or on the device: values, memory kinds, what is fused."""
    if place == "device" and name not in (*QUICK, *NEED_ALL, *NOT_FUSED):
        pytest.skip("fused as on the host, with fewer equations")
    tx = INSIDE[name]()
    if place == "host":
        tx = offloaded(tx)
    step = oo.jit(make_step(tx), **DONATED)
    got = train(step, tx)
    assert_as_plain(name, got)
    if place == "host":
        assert_kinds(tx, got)
    # The first step of some changes a weak type.
    assert step._cache_size() <= 2
    text = str(step.schedule(*got[:2], BATCH))
    why = NOT_FUSED.get(name)
    if name in NEED_ALL and place == "device":
        why = "its update needs all gradients first (reduce_"
    if name == "multi_steps" and place == "host":
        why = "its state is kept in some steps"
    if why is None:
        assert text.startswith("backward scan of 4 iterations")
    else:
        assert text.startswith("nothing is fused")
        assert f"left outside: {why}" in text


@named(INSIDE)
@pytest.mark.parametrize("residuals", ["device", "host"])
def test_parameters_on_the_host(name, residuals, monkeypatch):
    """Embedding and head too, and what the forward pass keeps: five steps."""
    monkeypatch.setattr(at_rest, "LEAST_RESIDUAL_BYTES", 0)
    if name not in QUICK and (residuals == "host") != (name in {*NEED_ALL, *NOT_FUSED}):
        pytest.skip("once is enough: what moves residuals is not of the optimizer")
    tx = offloaded(INSIDE[name]())
    step = oo.jit(make_step(tx), residuals=residuals, **DONATED)
    params = oo.set_memory_kind(make_params(), ".*", "pinned_host")
    got = train(step, tx, params)
    assert_as_plain(name, got)
    assert_kinds(tx, got, "pinned_host")
    assert step._cache_size() <= 2
    if name not in {*NOT_FUSED, "multi_steps"}:
        assert "never on the device" in str(step.schedule(*got[:2], BATCH))


def assert_kinds(tx, results, of_params="device"):
    """All that was put into host memory is there, and nothing else."""
    params, state, _ = results
    wanted = jax.eval_shape(tx.init, params)
    for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        host = x.sharding.memory_kind == "pinned_host"
        assert host == (oo._memory.nbytes(like) >= 8 and x.ndim > 0)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(params)}
    assert kinds == {of_params}


@named(NEED_ALL)
@pytest.mark.parametrize("late_gradients", ["host", "recompute"])
def test_gradients_that_have_to_wait(name, late_gradients):
    """Stored in host memory, or computed twice."""
    tx = offloaded(INSIDE[name]())
    step = oo.jit(make_step(tx), late_gradients=late_gradients, **DONATED)
    got = train(step, tx)
    assert_as_plain(name, got)
    assert_kinds(tx, got)
    said = "the scan runs" if late_gradients == "recompute" else "stored to host memory"
    assert said in str(step.schedule(*got[:2], BATCH))


def test_frozen_parameters():
    """Zeros take the place of their updates, which need no gradient any more."""

    def frozen(params):
        return jax.tree.map(lambda x: x.ndim > 2, params) | {"head": True}

    tx = optax.chain(optax.adamw(1e-2), optax.masked(optax.set_to_zero(), frozen))
    want = train(jax.jit(make_step(tx)), tx)
    tx = offloaded(tx)
    step = oo.jit(make_step(tx), **DONATED)
    got = train(step, tx)
    assert ulps(got, want) <= BOUND
    assert_kinds(tx, got)
    said = "2 gradients of 12.00 KiB never on the device whole"
    assert said in str(step.schedule(*got[:2], BATCH))


@pytest.mark.parametrize("late_gradients", ["host", "recompute"])
def test_state_on_the_device_waits_if_asked(late_gradients):
    """Gradients alone are in host memory, or nothing is."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    want = train(jax.jit(make_step(tx)), tx)
    step = oo.jit(make_step(tx), late_gradients=late_gradients)
    got = train(step, tx)
    assert ulps(got, want) <= BOUND
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got)}
    assert kinds == {"device"}


def test_each_result_replaces_an_argument_of_its_type():
    """Also where results are in another order than arguments."""
    tx = optax.sgd(1e-2, 0.9, accumulator_dtype=jnp.bfloat16)

    def step(params, state, tokens):
        return make_step(tx)(params, state, tokens)[1::-1]

    args = make_params(), tx.init(make_params()), BATCH
    said = "updated with their rows: 2 gradients of 12.00 KiB"
    assert said in str(oo.jit(step).schedule(*args))
    assert jax.eval_shape(oo.stream(step), *args) == jax.eval_shape(step, *args)
    assert ulps(oo.stream(step)(*args), jax.jit(step)(*args)) <= 16
