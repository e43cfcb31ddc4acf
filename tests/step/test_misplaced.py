"""State on the device that belongs on the host: what a step and its schedule say."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from small_steps import train_step
from step_forms import loss_fn

import optax_offload as oo
from optax_offload._places import memory

RULE = oo.Rule(".*", min_bytes=64)
HOST = "pinned_host"


def jitted(tx, fuse=True):
    """A donated train step."""
    return oo.jit(train_step(tx, loss_fn), donate_argnums=(0, 1), fuse=fuse)


def arguments():
    """Parameters and a batch."""
    params = {"layers": jnp.full((3, 8, 8), 0.1), "head": jnp.ones((8, 8))}
    return jax.device_put(params, jax.devices()[0]), jnp.ones((2, 8))


def plain(tx, params):
    """State as pickle or a template without kinds restores it."""
    return jax.device_put(jax.device_get(tx.init(params)), jax.devices()[0])


def mistyped(tx, params):
    """State that JAX goes on to call host values, on the device (F28)."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(lambda s: s, out_shardings=device)(tx.init(params))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("moved", [plain, mistyped])
def test_the_error_comes_alone(moved, fuse):
    """No warning before it says not to donate."""
    tx = oo.offload(optax.adam(1e-3), RULE)
    params, x = arguments()
    state = moved(tx, params)
    with pytest.raises(oo.MemoryKindError, match=r"'0/mu/head', '0/mu/layers', '0/nu"):
        jitted(tx, fuse)(params, state, x)


@pytest.mark.parametrize("on_misplaced", ["raise", "move"])
def test_what_is_not_donated_is_told_once_state_is_right(on_misplaced):
    """Where the step belongs comes first, and what to donate then."""
    tx = oo.offload(optax.adam(1e-3), RULE, on_misplaced=on_misplaced)
    params, x = arguments()
    step = oo.jit(train_step(tx, loss_fn))
    if on_misplaced == "raise":
        with pytest.raises(oo.MemoryKindError):
            step(params, plain(tx, params), x)
        state = tx.init(params)
    else:
        with pytest.warns(oo.OffloadWarning, match="All of it is on") as told:
            _, state = step(params, plain(tx, params), x)
        assert len(told) == 1
    with pytest.warns(oo.OffloadWarning, match=r"donate_argnums=\(0, 1\)") as told:
        step(params, state, x)
    assert len(told) == 1


def test_what_moves_it_is_told_once():
    """It is a buffer that no result takes, for this step."""
    tx = oo.offload(optax.adam(1e-3), RULE, on_misplaced="move")
    params, x = arguments()
    step = jitted(tx)
    with pytest.warns(oo.OffloadWarning, match="All of it is on the device") as told:
        params, state = step(params, plain(tx, params), x)
    assert len(told) == 1
    params, state = step(params, state, x)
    assert state[0].mu["layers"].sharding.memory_kind == HOST


def test_other_buffers_are_told_of():
    """An argument that no update takes, beside state that one does."""
    tx = oo.offload(optax.adam(1e-3), RULE, on_misplaced="move")
    params, _ = arguments()

    @oo.jit(donate_argnums=(0, 1))
    def step(state, x, params):
        return jax.device_put(x, jax.memory.Space.Host), tx.update(params, state)[1]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(plain(tx, params), jnp.ones((4, 4)), params)
    first, second = (str(x.message) for x in told)
    assert "not usable: tensor<4x4xf32> in device. No" in first
    assert "All of it is on the device during this step" in second


@pytest.mark.parametrize("at_rest", [False, True])
def test_a_schedule_says_so(at_rest):
    """By path, with parameters at rest or without; and nothing where all is right."""
    tx = oo.offload(optax.adam(1e-3), RULE)
    params, x = arguments()
    right, wrong = tx.init(params), plain(tx, params)
    half = (right[0]._replace(mu=wrong[0].mu), *right[1:])
    if at_rest:
        params = oo.set_memory_kind(params, "layers", HOST)
    step = jitted(tx)
    paths = "'0/mu/head', '0/mu/layers'"
    of_half, of_wrong = (str(step.schedule(params, s, x)) for s in (half, wrong))
    assert f"to its update on the device: {paths}. A call raises" in of_half
    assert f"on the device: {paths}, '0/nu/head', '0/nu/layers'. A call" in of_wrong
    assert "left outside: the state of its update is typed as on the dev" in of_wrong
    assert "planned for pinned_host" not in str(step.schedule(params, right, x))


def test_a_schedule_of_structs_without_kinds():
    """Of `jax.eval_shape`, before JAX 0.11; since then its structs know theirs."""
    tx = oo.offload(optax.adam(1e-3), RULE)
    params, x = arguments()
    forgets = jax.eval_shape(tx.init, params)
    kept = memory.memory_kind_of(forgets[0].mu["head"]) == HOST
    text = str(jitted(tx).schedule(params, forgets, x))
    assert ("use optax_offload.eval_shape" in text) != kept
    assert ("1 gradient of 768 B never on the device whole" in text) == kept
