"""Passes that read state for what is reduced over all of it, before it is updated."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import EVERYTHING, quick_of
from small_jaxprs import names
from small_steps import train_step
from small_updates import update_of

import optax_offload as oo
from optax_offload import aot
from optax_offload._schedule.updates.groups import group
from optax_offload._schedule.updates.passes import reading_passes

SHAPE = (16, 128, 256)
CLIP = optax.clip_by_global_norm
WINDOW = 2**18
OPTIMIZERS = {
    "accumulate, clip, adamw": (
        optax.MultiSteps(optax.chain(CLIP(1.0), optax.adamw(1e-3)), 2),
        1,
    ),
    "adam, then clip": (optax.chain(optax.adam(1e-3), CLIP(1e-3)), 1),
    "clip twice": (
        optax.chain(optax.trace(0.9), CLIP(1.0), optax.adam(1e-3), CLIP(1e-3)),
        2,
    ),
    # Its norms are taken twice, of what may be zero.
    "lamb, then clip": (optax.chain(optax.lamb(1e-3), CLIP(1e-3)), 3),
    "the largest": (
        optax.chain(
            optax.trace(0.9),
            optax.stateless(
                lambda updates, _: jax.tree.map(
                    lambda u: u / optax.tree.max(jax.tree.map(jnp.abs, updates)),
                    updates,
                )
            ),
            optax.scale(1e-2),
        ),
        1,
    ),
}


def make_params(shape=SHAPE):
    """Three stacked leaves."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {n: jax.random.normal(k, shape) for n, k in zip("abc", keys, strict=True)}


def trained(tx, params, steps=4):
    """Last updates and state after some steps, of other gradients in each."""
    update = jax.jit(tx.update)
    state, updates = tx.init(params), None
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return updates, state


def assert_close(got, want):
    """To 1e-4 of the largest number of a leaf; a missing row is 4 % of a norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        largest = np.max(np.abs(b), initial=0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * largest)


def plain(tx):
    """The transformation of an optimizer."""
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


@pytest.mark.parametrize(
    ("name", "window_bytes"),
    quick_of(
        itertools.product(OPTIMIZERS, [WINDOW, 2**21]),
        {("lamb, then clip", WINDOW), ("the largest", WINDOW)},
    ),
)
def test_values_and_passes(name, window_bytes):
    """As the optimizer alone, but for the order of sums; nothing is over the window."""
    inner, passes = OPTIMIZERS[name]
    params = make_params()
    tx = oo.offload(inner, EVERYTHING, window_bytes=window_bytes)
    text = str(tx.schedule(params))
    assert text.count("a pass that reads state for ") == passes
    with warnings.catch_warnings():
        # Slices of 8 rows, which are the smallest.
        warnings.filterwarnings("ignore", ".* there are no smaller slices")
        got = trained(tx, params)
    want = trained(plain(inner), params)
    assert_close(got, want)
    oo.memory_report(got[1], EVERYTHING).check()


def test_rows_that_are_left_when_a_loop_ends():
    """Of 13 rows, in slices of two; sums have what is left too."""
    inner, _ = OPTIMIZERS["adam, then clip"]
    params = make_params((13, 128, 128))
    tx = oo.offload(inner, EVERYTHING, window_bytes=2**18)
    assert "a pass that reads" in str(tx.schedule(params))
    assert_close(trained(tx, params), trained(inner, params))


def test_a_slice_waits_for_the_one_before():
    """It has no buffer that the one before was written into, and that it takes."""
    inner, _ = OPTIMIZERS["adam, then clip"]
    tx = oo.offload(inner, EVERYTHING, window_bytes=WINDOW)
    reading, update = tx.schedule(make_params()).straights()
    for loop in reading.loops:
        (group,) = loop.groups
        assert [s.load_after for s in loop.steps][1:] == [group.outputs] * (
            loop.unroll - 1
        )
    assert not any(s.load_after for loop in update.loops for s in loop.steps)


@pytest.mark.aot
@pytest.mark.parametrize(
    "target", ["h100", pytest.param("v5e", marks=pytest.mark.slow)]
)
def test_accumulate_clip_adamw(target):
    """The recipe of language models: at least 0.9 of the state leaves the peak."""
    chip = aot.Target(target)

    def struct(*shape):
        sharding = jax.NamedSharding(chip.mesh(), jax.P())
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {"up": struct(16, 512, 2048), "down": struct(16, 2048, 512)}
    x = struct(256, 512)

    def loss(params, x):
        def layer(h, w):
            return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def compiled(wrap):
        inner = optax.MultiSteps(optax.chain(CLIP(1.0), optax.adamw(1e-3)), 4)
        tx = wrap(inner)

        step = train_step(tx, loss)
        state = oo.eval_shape(tx.init, params)
        state = jax.tree.map(
            lambda s: s if s.sharding is not None else struct(*s.shape), state
        )
        outs = jax.tree.map(lambda s: s.sharding, (params, state))
        return aot.compile(
            step,
            params,
            state,
            x,
            target=chip,
            donate_argnums=(0, 1),
            out_shardings=outs,
        )

    before = aot.peak(compiled(lambda tx: tx)).peak_bytes
    offloaded = compiled(oo.offload)
    peak = aot.peak(offloaded)
    moved = 3 * 2 * 16 * 512 * 2048 * 4
    assert before - peak.peak_bytes >= 0.9 * moved
    assert peak.host_temporary_bytes == 0
    assert aot.host_computations(offloaded) == ()


def two_states(scaled):
    """An update of two leaves whose states are scaled together."""

    def update(a, b, ma, mb):
        ma, mb = scaled(0.9 * ma + a, 0.9 * mb + b)
        return -ma, -mb, ma, mb

    return update_of(update, [SHAPE] * 2, [SHAPE] * 2)


def by_norm(a, b):
    """Both by the norm of both."""
    norm = jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b))
    return a / norm, b / norm


def by_median(a, b):
    """Both by the median of both."""
    middle = jnp.median(jnp.concatenate([a.ravel(), b.ravel()]))
    return a / middle, b / middle


def reduced(passes):
    """The primitives that make the results of each pass."""
    return [
        [
            p.program.equations[p.program.producers[v]].primitive.name
            for v in p.program.outvars
        ]
        for p in passes
    ]


def test_a_norm_of_state_is_read_first():
    """A pass computes the sums, for which the rest needs each state alone."""
    update = two_states(by_norm)
    passes, rest, grouping = reading_passes(update, WINDOW)
    (first,) = passes
    assert reduced(passes) == [["reduce_sum"] * 2]
    # It stores nothing, and says whose numbers they are.
    assert [(o.path, o.stored, o.alias) for o in first.outputs] == [
        ("s0", False, None),
        ("s1", False, None),
    ]
    assert "sqrt" not in names(first.program.equations)
    assert "reduce_sum" not in names(rest.program.equations)
    assert [len(g.loads) for g in grouping.groups] == [1, 1]
    assert all(g.row_local is not None for g in grouping.groups)
    assert rest.outputs == update.outputs


def test_a_norm_of_what_a_norm_scaled_is_read_after_it():
    """What takes such a number is in the next pass, which knows the first."""
    passes, _, grouping = reading_passes(
        two_states(lambda a, b: by_norm(*by_norm(a, b))), WINDOW
    )
    assert reduced(passes) == [["reduce_sum"] * 2] * 2
    first, second = passes
    assert names(first.program.equations).count("reduce_sum") == 2
    assert names(second.program.equations).count("reduce_sum") == 2
    assert [len(g.loads) for g in grouping.groups] == [1, 1]


def test_only_numbers_that_state_leads_to_are_read():
    """Not sums along other axes, nor those of gradients, which are there anyway."""

    def fn(a, b, ma, mb):
        ma = ma - jnp.sum(ma, axis=2, keepdims=True) + a
        norm = jnp.sum(ma * ma) + jnp.sum(mb * mb) + jnp.sum(a * b)
        ma, mb = ma / norm, (mb + b) / norm
        return -ma, -mb, ma, mb

    update = update_of(fn, [SHAPE] * 2, [SHAPE] * 2)
    (first,), _, _ = reading_passes(update, WINDOW)
    assert [v.aval.shape for v in first.program.outvars] == [(), ()]
    assert [o.path for o in first.outputs] == ["s0", "s1"]


@pytest.mark.parametrize(
    ("scaled", "most_bytes"),
    [
        (lambda a, b: (a, b), WINDOW),
        (by_norm, 2**40),
        (lambda a, b: (a + b, b), WINDOW),
        (lambda a, b: by_median(*by_norm(a, b)), WINDOW),
    ],
    ids=["nothing joins", "it fits", "no number joins", "a median joins too"],
)
def test_no_pass_where_it_is_of_no_use(scaled, most_bytes):
    """The update is as it was."""
    update = two_states(scaled)
    passes, rest, grouping = reading_passes(update, most_bytes)
    assert passes == []
    assert rest is update
    assert grouping == group(update)


def test_no_pass_of_an_update_with_effects():
    """They would happen in each pass."""

    def prints(a, b):
        jax.debug.print("{}", a[0, 0, 0])
        return by_norm(a, b)

    update = two_states(prints)
    passes, rest, _ = reading_passes(update, WINDOW)
    assert passes == []
    assert rest is update
