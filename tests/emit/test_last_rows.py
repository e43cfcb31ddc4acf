"""The rows that no number of slices has, as a GPU's program updates them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_offload as oo

ROWS = 131


@pytest.mark.parametrize("count", [1, 2])
def test_in_a_loop_of_their_own(monkeypatch, count):
    """The same numbers as those of the program of a CPU."""
    params = [jnp.linspace(-1, 1, ROWS * 128).reshape(ROWS, 128) for _ in range(count)]
    inner = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.25))
    tx = oo.offload(inner, window_bytes=2**15)
    assert "slices" in str(tx.schedule(params))
    state = tx.init(params)

    def update(grads, state):
        return tx.update(grads, state, params)

    want = jax.jit(update)(params, state)
    loops = str(jax.jit(update).lower(params, state).as_text()).count("stablehlo.while")
    gpu = lambda *args, default, **of: of.get("cuda", default)(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", gpu)
    again = lambda grads, state: update(grads, state)  # noqa: E731
    text = jax.jit(again).lower(params, state).as_text()
    assert text.count("stablehlo.while") == loops + count
    got = jax.jit(again)(params, state)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got[1])}
    assert kinds == {"pinned_host"}
