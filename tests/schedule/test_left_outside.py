"""What is left outside of the backward pass, and why; what is fused nevertheless."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from program import emitted
from scanned_models import BATCH, loss, make_params, offloaded, train

import optax_offload as oo
from benchmarks.common.differences import ulps
from optax_offload._ground import compat
from optax_offload._places import memory

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
BOTH = "2 gradients of 12.00 KiB"
BOUND = 8


def step_of(tx, finish, gradients=None):
    """A step; what it returns besides is made of gradients, updates and parameters."""

    def step(params, state, tokens):
        grads = (gradients or jax.grad(loss))(params, tokens)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return new, state, finish(grads, updates, params, new)

    return step


def check(finish, tx=None, late_gradients: Any = "auto", gradients=None, place="host"):
    """Compares two steps with the plain one's; returns what the schedule says."""
    tx = tx or optax.adamw(1e-2)
    want = train(jax.jit(step_of(tx, finish, gradients)), tx, steps=2)
    tx = offloaded(tx) if place == "host" else tx
    step = oo.jit(step_of(tx, finish, gradients), late_gradients=late_gradients)
    got = train(step, tx, steps=2)
    assert ulps(got, want) <= BOUND
    return str(step.schedule(*got[:2], BATCH))


def nothing(*_):
    """No further result."""


FINISHES = {
    "gradients": (
        lambda g, u, p, q: g["layers"],
        [f"{BOTH} left outside: the step returns it"],
    ),
    "a gradient": (
        lambda g, u, p, q: g["layers"]["in"],
        [
            "1 gradient of 6.00 KiB never",
            "1 gradient of 6.00 KiB left outside: the step returns it",
        ],
    ),
    "a part of a gradient": (
        lambda g, u, p, q: g["layers"]["in"][-1],
        [
            "1 gradient of 6.00 KiB never",
            "1 gradient of 6.00 KiB left outside: slice needs all of it at once",
        ],
    ),
    "old parameters used": (
        lambda g, u, p, q: jax.tree.map(lambda x: jnp.sum(x * optax.tree.norm(g)), p),
        ["left outside: mul reads what it replaces, after the scan"],
    ),
    "old parameters returned": (lambda g, u, p, q: p, [f"{BOTH} never"]),
    "norm of gradients": (
        lambda g, u, p, q: optax.tree.norm(g),
        [f"{BOTH} never", "summed up row by row, in another order: 2"],
    ),
    "other sums": (
        lambda g, u, p, q: [
            f(jax.tree.leaves(t["layers"]))
            for t in (g, u, q)
            for f in (largest, least, finite, positive, products)
        ],
        [f"{BOTH} never", "summed up row by row"],
    ),
    "products with old parameters": (
        lambda g, u, p, q: products([g["layers"]["in"], p["layers"]["in"]]),
        [f"{BOTH} never"],
    ),
    "products with other rows": (
        lambda g, u, p, q: jnp.einsum("lij,ilj->", *[g["layers"]["in"][:, :4]] * 2),
        ["1 gradient of 6.00 KiB left outside: dot_general needs all of it at once"],
    ),
    "norm printed": (
        lambda g, u, p, q: jax.debug.callback(lambda x: None, optax.tree.norm(g)),
        [f"{BOTH} never"],
    ),
    "gradient printed": (
        lambda g, u, p, q: jax.debug.callback(lambda x: None, g["layers"]["in"]),
        ["left outside: debug_callback needs all of it at once"],
    ),
}


def largest(xs):
    """Of each array."""
    return [jnp.max(x) for x in xs]


def least(xs):
    """Of each array, along some axes."""
    return [jnp.min(x, axis=(0, 1)) for x in xs]


def finite(xs):
    """Whether all of each is."""
    return [jnp.all(jnp.isfinite(x)) for x in xs]


def positive(xs):
    """How many of each are."""
    return [jnp.sum(x > 0) for x in xs]


def products(xs):
    """Of arrays of the first one's shape with it."""
    return [jnp.einsum("lij,lij->", x, xs[0]) for x in xs if x.shape == xs[0].shape]


@pytest.mark.parametrize("name", FINISHES)
def test_what_else_a_step_does(name):
    """Its results are right, and the schedule says what it keeps from being fused."""
    finish, said = FINISHES[name]
    text = check(finish)
    for line in said:
        assert line in text


@pytest.mark.parametrize(
    ("late_gradients", "said"),
    [
        ("host", "loaded with their state twice, for a norm of a norm"),
        ("recompute", "the scan runs twice"),
        ("auto", "the scan runs twice"),
        ("device", "left outside: its update needs all gradients first"),
    ],
)
def test_norms_of_clipped_updates(late_gradients, said):
    """They are known only after the second run, or after a pass over what is stored."""

    def norms(grads, updates, params, new):
        return jax.tree.map(optax.tree.norm, (grads, updates, new))

    assert said in check(norms, CLIPPED, late_gradients)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_over_layers_are_kept_in_float32(dtype):
    """In bfloat16 a total of ones would stay at 256, in float16 at 2048."""

    def step(params, state):
        def total(params):
            def body(h, w):
                return h + jnp.sum(w.astype(jnp.float32)), None

            return lax.scan(body, 0.0, params)[0]

        g = jax.grad(total)(params)
        sums = [
            jnp.tensordot(g, g, 2),
            lax.dot_general(g, g, (((0,), (0,)), ((1,), (1,)))),
            jnp.einsum("li,li->", g, g, preferred_element_type=jnp.float32),
            lax.reduce_sum(g, (0, 1)),
            lax.reduce_prod(g, (0, 1)),
            lax.reduce_max(g, (0,)),
        ]
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state, sums

    tx = offloaded(optax.sgd(0.5, 0.9))
    params = jnp.zeros((4096, 2), dtype)
    fused = oo.jit(step)
    said = str(fused.schedule(params, tx.init(params)))
    assert "1 gradient of 16.00 KiB never" in said
    assert "summed up row by row, in another order: 6" in said
    *_, sums = fused(params, tx.init(params))
    got = [(x.dtype, x.tolist()) for x in sums]
    dtype = params.dtype
    assert got == [
        (dtype, 8192),
        (dtype, [4096, 4096]),
        (jnp.float32, 8192),
        (dtype, 8192),
        (dtype, 1),
        (dtype, [1, 1]),
    ]


@pytest.mark.parametrize(("late_gradients", "scans"), [("host", 2), ("recompute", 3)])
def test_no_scan_runs_more_than_it_has_to(late_gradients, scans):
    """Forward and backward, and backward again; no whole one for what is summed up.

    That which updates has its first iterations in a loop of their own where rows are
    stored late.
    """

    def norm(grads, updates, params, new):
        return optax.tree.norm(updates if late_gradients == "recompute" else grads)

    tx = offloaded(CLIPPED)
    params = make_params()
    step = oo.jit(step_of(tx, norm), late_gradients=late_gradients)
    traced = step.trace(params, tx.init(params), BATCH)
    jaxprs = (emitted(traced.jaxpr, on_tpu=on_tpu) for on_tpu in (True, False))
    counts = [[e.primitive.name for e in x.eqns].count("scan") for x in jaxprs]
    late = late_gradients == "recompute" and compat.STORES_OVERLAP
    assert counts == [scans, scans + late]


CLIP = optax.clip_by_global_norm
NORMS_OF_NORMS = {
    "clip twice": optax.chain(CLIP(0.1), optax.adam(1e-2), CLIP(0.01)),
    "clip and lamb": optax.chain(CLIP(0.1), optax.lamb(1e-2)),
}


@pytest.mark.parametrize(
    ("late_gradients", "said"),
    [
        ("host", "loaded with their state {} for a norm of a norm: 12.00 KiB more"),
        ("recompute", "the scan runs {} for a norm of a norm"),
    ],
)
@pytest.mark.parametrize("name", NORMS_OF_NORMS)
def test_norms_of_norms(name, late_gradients, said):
    """As many passes as there are norms that depend on norms; LAMB's are two each."""
    passes = {"clip twice": 2, "clip and lamb": 3}[name] + (
        late_gradients == "recompute"
    )
    often = {2: "twice,"}.get(passes, f"{passes} times,")
    with jax.numpy_rank_promotion("allow"):
        text = check(nothing, NORMS_OF_NORMS[name], late_gradients)
    assert said.format(often) in text
    assert f"{BOTH} never" in text


@pytest.mark.parametrize("late_gradients", ["host", "recompute"])
def test_no_gradient_is_whole_for_a_norm_of_a_norm(late_gradients):
    """Neither is one that would be computed by a further run of the scan."""
    tx = offloaded(NORMS_OF_NORMS["clip twice"])
    params = make_params()
    step = oo.stream(step_of(tx, nothing), late_gradients=late_gradients)
    closed = jax.make_jaxpr(step)(params, tx.init(params), BATCH)
    scans = [e for e in emitted(closed).eqns if e.primitive.name == "scan"]
    # Forward, backward, and the norm of updates; then all that runs again updates.
    assert len(scans) == (4 if late_gradients == "recompute" else 3)
    gradients = {x.shape for x in jax.tree.leaves(params["layers"])}
    device = [
        v.aval
        for e in scans[1:3]
        for v in e.outvars
        if v.aval.shape in gradients and not memory.on_host(v.aval)
    ]
    assert not device


def accumulated(params, tokens):
    """Gradients of microbatches, in a loop."""

    def add(total, tokens):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, tokens)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zeros, tokens.reshape(2, 4))[0]


def added(params, tokens):
    """Gradients of two microbatches, one after the other."""
    first, second = (jax.grad(loss)(params, x) for x in tokens.reshape(2, 4))
    return jax.tree.map(jnp.add, first, second)


def scaled(params, tokens):
    """Gradients of a scaled loss."""
    grads = jax.grad(lambda p: 1024 * loss(p, tokens))(params)
    return jax.tree.map(lambda g: g * (1 / 1024), grads)


def turned(params, tokens):
    """Gradients that take a way through other shapes."""

    def turn(x):
        return x.reshape(*x.shape[:-1], -1, 2).reshape(x.shape).T

    return jax.tree.map(lambda x: turn(x).T, jax.grad(loss)(params, tokens))


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        (accumulated, "left outside: its scan sums it up over all iterations"),
        (added, f"{BOTH} left outside: a later scan adds to it"),
        (scaled, f"{BOTH} never"),
        (turned, f"{BOTH} never"),
    ],
)
def test_where_gradients_come_from(gradients, said):
    """Of several microbatches the last is fused; in a loop, each with the sums."""
    text = check(nothing, gradients=gradients)
    assert said in text
    assert "nothing is fused" not in text


def test_updates_that_tie_leaves():
    """A leaf whose update reads all rows of another's gradient is outside."""

    def tie(updates, state, params=None):
        layers = updates["layers"]
        mean = jnp.mean(layers["in"], axis=0)
        layers = layers | {"in": layers["in"] - mean[None]}
        return updates | {"layers": layers}, state

    tx = optax.chain(
        optax.GradientTransformation(lambda p: optax.EmptyState(), tie),
        optax.adamw(1e-2),
    )
    assert f"{BOTH} left outside" not in check(nothing, tx, "device")
    assert "left outside: its update needs all" in check(nothing, tx, "device")
    assert f"{BOTH} never" in check(nothing, tx, "host")


@pytest.mark.parametrize("place", ["host", "device"])
def test_apply_if_finite(place):
    """Exact, whether it is fused or not."""
    check(nothing, optax.apply_if_finite(optax.adamw(1e-2), 3), place=place)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_dropped_update_is_zero_fused_or_not(fuse):
    """`optax.MultiSteps` multiplies it by zero, which is NaN if it is not finite."""

    def infinite(params, tokens):
        return jax.grad(lambda p: jnp.inf * loss(p, tokens))(params)

    tx = offloaded(optax.MultiSteps(optax.adam(1e-2), 2))
    step = oo.jit(step_of(tx, nothing, infinite), fuse=fuse, late_gradients="host")
    params = make_params()
    got, state, _ = step(params, tx.init(params), BATCH)
    assert ("never" in str(step.schedule(got, state, BATCH))) == fuse
    assert ulps(got, params) == 0
    assert not np.isfinite(state.acc_grads["layers"]["in"]).any()


def test_last_gradients_as_state():
    """State that is the last gradient is written where the one before was."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g, b: -0.1 * (g + b), updates, state), updates

    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    assert f"{BOTH} never" in check(nothing, tx, place="device")
    assert f"{BOTH} never" in check(nothing, tx)


def test_means_of_what_a_scan_returns_are_left_alone():
    """A forward pass whose losses are averaged is no backward pass."""

    def losses(x):
        return jnp.mean(lax.scan(lambda c, x: (c + x, jnp.sum(x)), x[0], x)[1])

    x = jnp.ones((4, 3))
    assert str(jax.make_jaxpr(oo.stream(losses))(x)) == str(jax.make_jaxpr(losses)(x))
    assert str(oo.jit(losses).schedule(x)) == (
        "nothing is fused into a backward pass\n"
        "no scan stacks what an update takes row by row, as gradients of layers"
    )


def unrolled(params, tokens):
    """A loss whose layers Python loops over."""
    h = params["embedding"][tokens]
    for i in range(2):
        h = h + jnp.tanh(h @ params["layers"]["in"][i]) @ params["layers"]["out"][i]
    return jnp.mean((h @ params["head"]) ** 2)


def test_a_reason_where_nothing_is_fused():
    """No scan, and none asked for."""
    tx = offloaded(optax.adamw(1e-2))
    params = make_params()
    args = params, tx.init(params), BATCH

    def said(step, **options):
        first, *reasons = str(oo.jit(step, **options).schedule(*args)).splitlines()
        assert first == "nothing is fused into a backward pass"
        return reasons[0]

    reason = said(step_of(tx, nothing, jax.grad(unrolled)))
    assert reason.startswith("layers that no scan runs are not cut into turns: that")
    step = step_of(tx, nothing)
    assert said(step, fuse=False) == ("it was asked not to: fuse=False")


@pytest.mark.parametrize("late_gradients", ["auto", "host", "recompute"])
def test_an_update_in_a_later_scan_reads_new_parameters_that_wait(late_gradients):
    """The encoder's rate is made of the decoder's new norm; only that is clipped."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "decoder": jax.random.normal(keys[0], (4, 8, 8)) / 4,
        "encoder": jax.random.normal(keys[1], (3, 8, 8)) / 4,
    }

    def make(wrap):
        first, second = wrap(CLIPPED), wrap(optax.adam(1e-2))

        def step(params, state, x):
            def loss(p):
                h = x
                for name in ("encoder", "decoder"):
                    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p[name])
                return jnp.mean(h**2)

            grads = jax.grad(loss)(params)
            p, q = params["decoder"], params["encoder"]
            u, a = first.update(grads["decoder"], state[0], p)
            p = p + u
            u, b = second.update(grads["encoder"], state[1], q)
            return {"decoder": p, "encoder": q + u / optax.tree.norm(p)}, (a, b)

        state = first.init(params["decoder"]), second.init(params["encoder"])
        return step, (params, state, jnp.ones((8, 8)))

    step, args = make(lambda tx: tx)
    want = jax.jit(step)(*args)
    step, args = make(offloaded)
    refused = pytest.warns(oo.OffloadWarning, match="an update in a later scan needs")
    with contextlib.nullcontext() if late_gradients == "auto" else refused:
        fused = oo.jit(step, late_gradients=late_gradients)
        assert ulps(fused(*args), want) <= BOUND
        text = str(fused.schedule(*args))
    assert "of 3 iterations: 1 gradient" in text
    assert "left outside: an update in a later scan needs what its update" in text


def test_what_was_asked_for_and_is_not_done_warns():
    """With the reason, whether something could have waited or nothing was found."""
    tx = offloaded(CLIPPED)
    params = make_params()
    args = params, tx.init(params), BATCH

    def norms(grads, updates, params, new):
        return jax.tree.map(lambda x: jnp.sum(x * optax.tree.norm(grads)), params)

    def with_literal(*args):
        return *step_of(tx, norms)(*args), 1.0  # A result that has no variable.

    step = oo.stream(with_literal, late_gradients="host")
    with pytest.warns(
        oo.OffloadWarning,
        match=r"^late_gradients='host' was asked for, and cannot be had for the "
        r"gradients that the results '0/layers/in', .* updated with, which are on the "
        r"device whole: mul reads what it replaces, after the scan\.$",
    ):
        jax.eval_shape(step, *args)
    step = oo.stream(step_of(tx, nothing, accumulated), late_gradients="recompute")
    with pytest.warns(
        oo.OffloadWarning,
        match="^late_gradients='recompute' was asked for, and nothing waits: "
        "4 gradients of 16.00 KiB left outside: its scan sums it up over all "
        "iterations",
    ):
        jax.eval_shape(step, *args)


def test_statistics_of_a_forward_scan_are_no_gradients():
    """Means of layers that a forward scan stacks, averaged over steps."""

    def step(averages, layers, x):
        def body(h, w):
            h = jnp.tanh(h @ w)
            return h, jnp.mean(h, 0)

        h, means = lax.scan(body, x, layers)
        return 0.9 * averages + 0.1 * means, jnp.sum(h)

    args = jnp.zeros((4, 16)), jnp.ones((4, 16, 16)), jnp.ones((8, 16))
    text = str(oo.jit(step, donate_argnums=0).schedule(*args))
    assert text.startswith("scan of 4 iterations: 1 stacked result of 256 B never")
