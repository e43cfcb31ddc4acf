"""Master weights that all but vanish in a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_offload as oo


def test_a_weight_that_vanishes_stays_a_number():
    """What is left of it, 2**-24 of what it was, is lost as the parameter is added to.

    Its parameter becomes zero, and the remainder of what it should be, put to the
    bits of zero, was NaN.
    """
    rate = 0.3
    rule = oo.Rule(".*master/.*", codec="bfloat16-remainder")
    tx = oo.low_bit(oo.master_weights(optax.sgd(rate)), rule)
    params = {"w": jax.random.normal(jax.random.key(0), (64, 1024), jnp.bfloat16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # To float32 weights that have remainders, and from there nearly to zero.
    grads = {"w": 0.1 * jax.random.normal(jax.random.key(1), (64, 1024))}
    params, state = step(params, state, grads)
    weights = oo.low_bit_decode(state, params).master["w"]
    params, state = step(params, state, {"w": weights / rate})
    left = oo.low_bit_decode(state, params).master["w"]
    assert np.all(np.isfinite(left))
    assert np.all(np.abs(left) <= 2.0**-22 * np.abs(weights))
