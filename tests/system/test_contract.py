"""Every optimizer in the table, offloaded and updated alone, is the one it was."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    EVERYTHING,
    bits,
    committed,
    extra_args,
    gradient,
    make_params,
    plain,
    run_updates,
)
from limited import limited
from optimizers import INSIDE, OUTSIDE

import optax_offload as oo
from optax_offload._ground import compat

pytestmark = pytest.mark.usefixtures("rank_promotion")

# Bits are compared as users compile; what is as near as rounding goes, with fewer
# optimizations, which takes a quarter of the time.
QUICK = {"adafactor", "adamw", "lamb", "lion", "multi_steps", "muon", "sgd_momentum"}


def each(table, quick=None):
    """One process for all tests of an optimizer: they share the plain one's history."""

    def marks(name):
        slow = quick is not None and name not in quick
        return [pytest.mark.xdist_group(name), *[pytest.mark.slow] * slow]

    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks(name)) for name in sorted(table)]
    )


outside = each(OUTSIDE, {"apply_if_finite", "chain", "multi_steps", "partition"})

# In slices these are as exact, but not the same bits on the CPU, of some version of JAX
# at least: its compiler contracts multiply-adds within a fusion, and the fusions of a
# slice are others. Updated whole they have the bits of the plain ones.
# (adopt only on JAX 0.10, as tests are compiled there, without fusion emitters.)
OTHER_FUSIONS = {
    "adabelief",
    "adan",
    "adopt",
    "clip_and_schedule",
    "muon",
    "nadamw",
    "optimistic_adam",
    "rmsprop",
}
# Of these the update is a difference of parameters, and as exact as those are.
DIFFERENCES = {"madgrad", "schedule_free_adamw", "schedule_free_sgd"}
# Also in whole leaves. novograd's conds, on whether this is the first step, are taken
# apart; D-Adaptation ties all leaves by several norms.
EXCEPTIONS = {"dadapt_adamw", "novograd"}
# Their steps that only accumulate multiply an update by zero, which can be -0.0; ours
# compute no update in those, and theirs is 0.0.
DROPPED_UPDATES = {"multi_steps", "multi_steps_skip"}


def weak_types(tree):
    """Which leaves promote like Python numbers; a random key cannot."""
    return [getattr(x, "weak_type", False) for x in jax.tree.leaves(tree)]


@pytest.fixture(autouse=True)
def two_parts(monkeypatch):
    """Small leaves are loaded one after the other too, as large ones are."""
    limited(monkeypatch, least_apart_bytes=0)


def assert_same(name, got, want, exceptions=EXCEPTIONS):
    """The same bits; or as near as rounding goes."""
    if name in exceptions:
        assert_close(got, want, least_scale=1.0 if name in DIFFERENCES else 0.0)
    else:
        assert_same_bits(name, got, want)


def assert_same_bits(name, got, want):
    """Compares bits; in an update that is dropped, the sign of zero does not count."""
    if name in DROPPED_UPDATES:
        got, want = jax.tree.map(
            lambda x: np.asarray(x) + np.zeros((), x.dtype), (got, want)
        )
    assert bits(got) == bits(want)


def assert_close(got, want, least_scale=0.0):
    """Within some units in the last place of the largest value of each leaf.

    32 were seen, of optimizers that divide by what is nearly nothing.
    """
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            unit = float(jnp.finfo(x.dtype).eps)
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            scale = max(np.max(np.abs(y)), least_scale)
            assert np.max(np.abs(x - y)) <= 64 * unit * scale


@functools.cache
def plain_history(name, dtype=jnp.float32):
    """Three steps of the plain optimizer."""
    inner, params = plain(INSIDE[name]()), make_params(dtype)
    return run_updates(inner, params, committed(inner.init(params)))


@pytest.mark.optimized
@each(INSIDE, QUICK - {"muon"} | {"novograd", "madgrad"})
@pytest.mark.filterwarnings(
    "ignore:.* over the window of 1:optax_offload.OffloadWarning"
)
def test_update_in_its_own_jit_has_the_same_bits(name):
    """Updates, state and parameters of three steps, in one compilation.

    Structure, dtypes and kinds too. In a window of one byte: in the smallest slices,
    each group after the one before it.
    """
    params = make_params()
    config = oo.OffloadConfig([EVERYTHING], window_bytes=1)
    tx = oo.offload(INSIDE[name](), config)
    # Only a state that has nothing on the host is not committed already.
    history, compilations = run_updates(tx, params, committed(tx.init(params)))
    plain_steps, plain_compilations = plain_history(name)
    exceptions = EXCEPTIONS | OTHER_FUSIONS | DIFFERENCES
    # Some optimizers change a weak type in their first step, and compile twice.
    assert compilations == plain_compilations
    for got, want in zip(history, plain_steps, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert_same(name, got, want, exceptions)
        assert weak_types(got) == weak_types(want)
        oo.memory_report(got[1], EVERYTHING).check()
        assert set(oo.memory_report(got[0]).totals) == {"device"}


@each({"adamw", *sorted(INSIDE)[::3]}, {"adamw"})
def test_bfloat16_in_whole_leaves_has_the_same_bits(name):
    """Parameters, gradients and the state that follows their dtype in bfloat16.

    In the default window, which holds all of these leaves whole. Of one optimizer in
    three: in float32, above, of all.
    """
    params = make_params(jnp.bfloat16)
    tx = oo.offload(INSIDE[name](), EVERYTHING)
    got, _ = run_updates(tx, params, tx.init(params))
    assert_same(name, got, plain_history(name, jnp.bfloat16)[0])


@pytest.mark.optimized
@each(
    ["adafactor", "adamw", "lamb", "multi_steps", *OTHER_FUSIONS, *DIFFERENCES],
    QUICK - {"muon"},
)
def test_whole_leaves_have_the_same_bits(name):
    """In a window without end; slices are the cause of most exceptions."""
    params = make_params()
    rule = EVERYTHING
    if not compat.LOOPS_RUN_ONCE:
        rule = dataclasses.replace(rule, slice_axis=None)
    tx = oo.offload(INSIDE[name](), rule, window_bytes=2**60)
    got, _ = run_updates(tx, params, committed(tx.init(params)))
    assert_same_bits(name, got, plain_history(name)[0])


@each(INSIDE, QUICK)
def test_init_has_the_same_bits_and_places_state(name):
    """Eagerly, under jit, and as a template."""
    params = make_params()
    inner = plain(INSIDE[name]())
    want = inner.init(params)
    tx = oo.offload(INSIDE[name](), EVERYTHING)
    for init in (tx.init, jax.jit(tx.init)):
        got = init(params)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert bits(got) == bits(want)
        oo.memory_report(got, EVERYTHING).check()
    template = oo.eval_shape(tx.init, params)
    assert jax.tree.structure(template) == jax.tree.structure(want)
    oo.memory_report(template, EVERYTHING).check()
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(template)]
    assert kinds == [x.sharding.memory_kind for x in jax.tree.leaves(got)]


@pytest.mark.optimized
@each(["adafactor", "adamw", "apply_if_finite", "backtracking", "multi_steps"], QUICK)
def test_without_jit_is_with_jit(name):
    """Outside jit the update is in a jit of its own, so even the bits are the same."""
    params = make_params()
    tx = oo.offload(INSIDE[name](), EVERYTHING)
    state = tx.init(params)
    value, grads = gradient(params)
    updates, state = tx.update(grads, state, params, **extra_args(value, grads))
    want_updates, want_state, _ = plain_history(name)[0][0]
    assert_same_bits(name, (updates, state), (want_updates, want_state))
    oo.memory_report(state, EVERYTHING).check()


HALF = dataclasses.replace(EVERYTHING, fraction=0.5)


@each(INSIDE, QUICK)
def test_a_share_is_the_same_leaves_in_init_and_update(name):
    """By types alone: nothing is computed."""
    params = make_params()
    tx = oo.offload(INSIDE[name](), HALF)
    state = oo.eval_shape(tx.init, params)
    for _ in range(2):
        sizes = oo.memory_report(state, HALF).check().totals
        movable = oo.memory_report(state, EVERYTHING)
        most = sum(r.nbytes for r in movable.rows if r.planned == "pinned_host")
        assert most / 2 <= sizes.get("pinned_host", 0) <= most
        extra = extra_args(jnp.float32(0), params)
        _, state = oo.eval_shape(
            lambda *args, tx=tx, extra=extra: tx.update(*args, **extra),
            params,
            state,
            params,
        )


@each(["adafactor", "adamw", "multi_steps", "muon"])
def test_a_share_on_the_host_trains_alike(name):
    """Leaves of one group in two memories."""
    params = make_params()
    tx = oo.offload(INSIDE[name](), HALF)
    got, compilations = run_updates(tx, params, committed(tx.init(params)))
    assert compilations == 1
    for (updates, state, _), want in zip(got, plain_history(name)[0], strict=True):
        assert set(oo.memory_report(state, HALF).check().totals) == {
            "device",
            "pinned_host",
        }
        assert_close((updates, state), want[:2])


@outside
def test_offload_inside_another_transformation(name):
    """Wrapped around an offloaded part, other transformations work as before.

    What they compute is not in the loops, and not fused with what is.
    """
    params = make_params()
    inner = OUTSIDE[name](lambda inner: inner)
    want, _ = run_updates(inner, params, committed(inner.init(params)))
    for rules in (EVERYTHING, dataclasses.replace(EVERYTHING, slice_axis=None)):
        offloaded = OUTSIDE[name](functools.partial(oo.offload, rules=rules))
        got, _ = run_updates(offloaded, params, offloaded.init(params))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert_close(got, want, least_scale=1.0)
        assert "pinned_host" in oo.memory_report(got[-1][1]).totals


def test_tree_map_params_sees_through():
    """`optax.tree_map_params` finds the parameters' copies in offloaded state."""
    params = make_params()
    tx = oo.offload(optax.adam(1e-2), EVERYTHING)
    state = tx.init(params)
    mapped = optax.tree_map_params(optax.adam(1e-2), lambda x: x.shape, state)
    assert mapped[0].mu["embed"]["embedding"] == (40, 16)


def test_state_is_interchangeable_with_plain_state():
    """Plain state moved to the host goes on as offloaded, and the reverse."""
    params, grads = make_params(), make_params()
    inner = optax.adamw(1e-2)
    tx = oo.offload(inner, EVERYTHING)
    _, want = jax.jit(inner.update)(grads, inner.init(params), params)
    moved = oo.set_memory_kind(inner.init(params), "0/(mu|nu)/.*", "pinned_host")
    _, got = jax.jit(tx.update)(grads, moved, params)
    assert bits(got) == bits(want)
    back = oo.set_memory_kind(got, ".*", "device")
    want = jax.jit(inner.update)(grads, want, params)
    assert bits(jax.jit(inner.update)(grads, back, params)) == bits(want)
