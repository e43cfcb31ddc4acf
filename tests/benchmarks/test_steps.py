"""The train steps that the benchmarks compare."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_offload as oo
from benchmarks.common.steps import MODES, digest, train_step
from benchmarks.common.workloads import gated
from optax_offload import aot

SMALL = gated(tokens=8, layers=3, width=128, inner=256, vocabulary=64)


def step_of(mode):
    """A small step in a mode, with arguments."""
    params = jax.tree.map(
        lambda p: 0.02 * jax.random.normal(jax.random.key(p.size), p.shape),
        SMALL.params,
    )
    tx = MODES[mode].optimizer(SMALL.optimizer)
    step = MODES[mode].jit(train_step(SMALL, tx))
    return step, (params, jax.jit(tx.init)(params), jnp.arange(8))


def test_the_batch_is_that_of_each_device():
    """On four devices there are four times as many tokens."""
    _, tokens = SMALL.on(aot.Target("v5e:2x2"))
    assert tokens.shape == (32,)
    assert tokens.sharding.shard_shape(tokens.shape) == (8,)


@pytest.fixture(scope="module")
def plain():
    """The new parameters of a step without offload."""
    step, args = step_of("no offload")
    return step(*args)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "fused alone"])
def test_fused_modes_train_the_same(mode, plain):
    """All six stacked gradients are gone, and parameters differ in roundings."""
    step, args = step_of(mode)
    params, _ = step(*args)
    for a, b in zip(*map(jax.tree.leaves, (plain, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    unfused = train_step(SMALL, MODES[mode].optimizer(SMALL.optimizer))
    (scan,) = oo.jit(unfused).schedule(*args).scans
    assert sum(len(f.component.gradients) for f in scan.now) == 6
    assert not scan.late


def test_results_of_ours_depend_on_the_library():
    """Those of others are good for all versions of it."""
    assert digest("recipe") == digest("no offload") != digest("ours")
    assert digest("fused alone") == digest("ours")
