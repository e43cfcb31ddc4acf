"""The train steps as people write them."""

import jax
import pytest

from benchmarks.common.ordinary import (
    STEPS,
    Ordinary,
    dense,
    language,
    language_loss,
    tokens,
    usual,
)
from benchmarks.memory.ordinary import compiled
from optax_offload import aot


@pytest.mark.parametrize("name", STEPS)
def test_a_step_returns_what_it_takes(name):
    """New parameters and state are like the ones before."""
    step = STEPS[name]()
    fn, tx = step.of(lambda tx: tx)
    state = jax.eval_shape(tx.init, step.params)
    frozen = [step.frozen] if step.frozen else []
    with jax.numpy_rank_promotion("allow"):
        found = jax.eval_shape(fn, step.params, state, *frozen, *step.inputs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found[:2]) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (step.params, state)
    )


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
def test_what_rests_is_on_the_host():
    """State alone, and parameters too."""
    params = language(dense(8, 1024, 1024))
    step = Ordinary(params, usual(language_loss()), (tokens(4, 257),))
    with jax.numpy_rank_promotion("allow"):
        found = [
            compiled(step, rests, aot.Target("h100"))
            for rests in ("nothing", "state", "parameters")
        ]
    matrices, norms = 8 * 2 * 1024 * 4096, 8 * 4096
    layers, state = matrices + norms, 2 * (matrices + 4096 * 4096)
    assert [peak.host_argument_bytes for peak in found] == [0, state, state + layers]
    assert found[0].peak_bytes > max(peak.peak_bytes for peak in found[1:])
