"""Effects, refs, transformations and leak checks: as of a step that is not fused."""

import collections
import contextlib
import functools
import gc
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from scanned_models import offloaded
from small_steps import train_step

import optax_offload as oo

LAYERS = 4
NEVER = "never on the device whole"
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
X = jnp.ones((2, 8))


def make_params(layers=LAYERS):
    """Stacked layers."""
    return {"w": jax.random.normal(jax.random.key(0), (layers, 8, 8)) / 3}


def apply(params, x, body=lambda h, w: (jnp.tanh(h @ w), None)):
    """A loss of scanned layers."""
    return jnp.mean(lax.scan(body, x, params["w"])[0] ** 2)


make_step = functools.partial(train_step, loss=apply, value=True)


class Calls(list):
    """The names of the effects that were had, in their order."""

    def note(self, name, *args, ordered=False):
        """Notes a name when its turn comes, with what it is computed from."""
        jax.debug.callback(lambda *_: self.append(name), *args, ordered=ordered)

    def ask(self, name, *args, ordered=False):
        """The same, with a number for a result."""

        def answer(*_):
            self.append(name)
            return np.float32(0.5)

        return io_callback(answer, SCALAR, *args, ordered=ordered)

    def in_update(self, name):
        """A transformation that has effects: beside, with a norm, in a cond."""

        def update(updates, state, params=None):
            self.note(name)
            self.note(f"{name}, norm", optax.tree.norm(updates))
            state = lax.cond(
                state > 0,
                lambda s: (self.note(f"{name}, again"), s + 1)[1],
                lambda s: (self.note(f"{name}, first"), s + 1)[1],
                state,
            )
            scale = self.ask(f"{name}, asked")
            return jax.tree.map(lambda u: u * scale, updates), state

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    def of(self, step, tx):
        """The parameters after two steps; what is noted are their effects."""
        self.clear()
        params, state = make_params(), tx.init(make_params())
        for _ in range(2):
            params, state, *_ = step(params, state, X)
        jax.block_until_ready((params, state))
        jax.effects_barrier()
        return params


def assert_near(got: Any, want: Any):
    """Values of a fused and a plain step."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def noisy_loss(calls, places):
    """A loss with effects in the bodies of its scan and of a loop."""

    @jax.custom_vjp
    def noisy(h):
        return h

    def backward(_, g):
        calls.note("backward", g[0, 0])
        return (g,)

    noisy.defvjp(lambda h: (h, None), backward)

    def body(h, w):
        if "forward" in places:
            calls.note("forward", h[0, 0])
        return jnp.tanh((noisy(h) if "backward" in places else h) @ w), None

    def loss(params, x):
        count = lax.while_loop(
            lambda n: n < 2, lambda n: (calls.note("loop", n), n + 1)[1], 0
        )
        inner = jax.checkpoint(body) if "remat" in places else body
        return apply(params, x, inner) + 0 * count

    return loss


def step_with_effects(calls, tx, places=()):
    """Effects before the backward pass and after it, with results and without."""
    step = make_step(tx, loss=noisy_loss(calls, places))

    def noted(params, state, x):
        calls.note("begins")
        params, state, value = step(params, state, x)
        calls.note("loss", value)
        jax.debug.print("a step")
        io_callback(lambda _: calls.append("io"), None, value)
        if "late" in places:
            calls.note("late", optax.tree.norm(params))
        return params, state, value

    return noted


CLIP = optax.clip_by_global_norm(0.1)
EFFECTS: dict[str, Any] = {
    "in the step": (lambda calls: optax.adam(0.1), ["forward"], "auto", NEVER),
    "in an update": (
        lambda calls: optax.chain(calls.in_update("update"), optax.adam(0.1)),
        ["late"],
        "auto",
        NEVER,
    ),
    "in the backward scan": (
        lambda calls: optax.adam(0.1),
        ["remat", "forward", "backward"],
        "auto",
        NEVER,
    ),
    "after what waits": (
        lambda calls: optax.chain(CLIP, optax.adam(0.1), calls.in_update("update")),
        ["late"],
        "recompute",
        "times, for a norm of a norm",
    ),
    "in a scan that would run twice": (
        lambda calls: optax.chain(CLIP, calls.in_update("update"), optax.adam(0.1)),
        ["backward"],
        "recompute",
        "it has to wait, and its scan, which has effects, runs once",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.accelerator)
        if name in ("in the step", "in an update")
        else name
        for name in EFFECTS
    ],
)
def test_each_effect_is_had_as_often_as_without(name):
    """In a step that is fused, and in one that cannot be because of them."""
    make, places, late_gradients, said = EFFECTS[name]
    calls = Calls()
    tx = make(calls)
    want = calls.of(jax.jit(step_with_effects(calls, tx, places)), tx)
    counts = collections.Counter(calls)
    tx = offloaded(tx)
    step = oo.jit(step_with_effects(calls, tx, places), late_gradients=late_gradients)
    refused = pytest.warns(oo.OffloadWarning, match=said)
    with refused if "has to wait" in said else contextlib.nullcontext():
        got = calls.of(step, tx)
        assert collections.Counter(calls) == counts
        assert said in str(step.schedule(got, tx.init(got), X))
    assert all(n % 2 == 0 or "first" in x or "again" in x for x, n in counts.items())
    assert_near(got["w"], want["w"])


ASKED = ("asked", "rate", "asked again")


@pytest.mark.parametrize("late_gradients", ["auto", "recompute"])
def test_ordered_effects_are_in_their_order(late_gradients):
    """Also of what waits, and of an answer that the updates take before the scan.

    JAX keeps callbacks in order, and what is asked, but not one among the other.
    """
    calls = Calls()
    clipped = late_gradients == "recompute"
    tx = optax.chain(CLIP, optax.adam(0.1)) if clipped else optax.adam(0.1)

    def body(h, w):
        calls.note("forward", ordered=True)
        return jnp.tanh(h @ w), None

    def step(params, state, x):
        value, grads = jax.value_and_grad(apply)(params, x, body)
        calls.note("loss", value, ordered=True)
        if clipped:
            calls.note("norm", optax.tree.norm(grads), ordered=True)
        calls.note("last before", ordered=True)
        calls.ask("asked", ordered=True)
        rate = calls.ask("rate", ordered=True)
        updates, state = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        params = optax.apply_updates(params, updates)
        calls.note("first after", ordered=True)
        calls.ask("asked again", ordered=True)
        calls.note("new", optax.tree.norm(params), ordered=True)
        lax.cond(rate > 0, lambda: calls.note("in a cond", ordered=True), lambda: None)
        return params, state

    want = calls.of(jax.jit(step), tx)
    order = sorted(calls, key=ASKED.__contains__)
    fused = oo.jit(step, late_gradients=late_gradients)
    got = calls.of(fused, tx)
    assert sorted(calls, key=ASKED.__contains__) == order
    assert_near(got["w"], want["w"])
    assert NEVER in str(fused.schedule(got, tx.init(got), X))


def test_gradients_do_not_wait_on_the_host_beside_ordered_effects():
    """JAX does not compile both."""
    tx = optax.chain(CLIP, optax.adam(0.1))

    def step(params, state, x):
        jax.debug.callback(lambda: None, ordered=True)
        return make_step(tx)(params, state, x)

    why = r"JAX compiles no step with ordered effects \(ordered=True\)"
    with pytest.warns(oo.OffloadWarning, match=why):
        said = oo.jit(step, late_gradients="host").schedule(
            make_params(), tx.init(make_params()), X
        )
    assert re.search(why, str(said))


@pytest.mark.parametrize("at_rest", ["state", "params"])
def test_ordered_effects_beside_host_memory_are_said(at_rest):
    """JAX would say that a list has two entries and another has one."""
    tx = optax.adam(0.1)
    tx = oo.offload(tx, oo.Rule(".*", min_bytes=0)) if at_rest == "state" else tx
    params = make_params()
    if at_rest == "params":
        params = oo.set_memory_kind(params, ".*", "pinned_host")

    @oo.jit(static_argnums=3)
    def step(params, state, x, ordered):
        jax.debug.callback(lambda: None, ordered=ordered)
        return make_step(tx)(params, state, x)

    args = params, oo.jit(tx.init)(params), X
    step(*args, False)
    path = {"state": "1/0/mu/w", "params": "0/w"}[at_rest]
    with pytest.raises(ValueError, match=rf"ordered=True.*'argument {path}'.*Leave"):
        step(*args, True)


def test_effects_of_an_update_that_is_not_fused():
    """Not once for each slice of state, nor for both versions of an update."""
    calls = Calls()

    def update(updates, count, params=None):
        def noted(u):
            calls.note("cond")
            return 2 * u

        def scale(u):
            return lax.cond(count > 0, noted, lambda u: u, u)

        calls.note("update")
        return jax.tree.map(scale, updates), count + 1

    noisy = optax.GradientTransformation(lambda params: jnp.int32(1), update)
    tx = optax.chain(optax.adam(0.1), noisy)
    params = {"w": jnp.ones((64, 64))}
    for inner in (tx, optax.MultiSteps(tx, 2)):
        tx = oo.offload(inner, oo.Rule(".*", min_bytes=64), window_bytes=2**14)
        calls.clear()
        with pytest.warns(oo.OffloadWarning, match=r"be updated in slices \(.*cond"):
            got = jax.jit(tx.update)(params, tx.init(params), params)
        jax.block_until_ready(got)
        jax.effects_barrier()
        assert sorted(calls) == ["cond", "update"]


def step_with_refs(tx, closed_over):
    """A step that reads, writes and adds to refs; its parameters are one too."""

    def step(state, x, weights, seen):
        rate = seen[0]
        value, grads = jax.value_and_grad(apply)({"w": weights[...]}, x)
        seen[1] = value
        updates, state = tx.update(grads, state, {"w": weights[...]})
        jax.ref.addupdate(seen, (2,), 1.0)
        closed_over[...] += seen[1]
        weights[...] += updates["w"] * rate
        seen[0] = rate / 2 + optax.tree.norm(updates)
        return state, seen[0] + closed_over[...]

    return step


def test_refs():
    """Read before a step and written after it, in any order with what is fused."""
    found = []
    plain = optax.adam(0.1)
    for tx, wrap in (
        (plain, jax.jit),
        (offloaded(plain), oo.jit),
        (offloaded(plain), lambda f: jax.jit(oo.stream(f), donate_argnums=0)),
    ):
        refs = [jax.new_ref(make_params()["w"]), jax.new_ref(jnp.ones(3))]
        refs.append(jax.new_ref(jnp.float32(0)))
        *given, closed_over = refs
        step = wrap(step_with_refs(tx, closed_over))
        state, results = tx.init(make_params()), []
        for _ in range(2):
            state, result = step(state, X, *given)
            results.append(result)
        found.append([*results, *(ref[...] for ref in refs)])
        if wrap is oo.jit:
            assert NEVER in str(step.schedule(state, X, *given))
    want, *others = found
    for got in others:
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_gradients_summed_in_refs_of_the_step():
    """Of microbatches in a loop of Python, and counted in a scan of the step's."""

    def step_of(tx):
        def step(params, state, x):
            sums = jax.tree.map(jax.new_ref, jax.tree.map(jnp.zeros_like, params))
            count = jax.new_ref(jnp.zeros(()))

            def counted(c, _):
                count[...] += 1
                return c, None

            for part in jnp.split(x, 2):
                grads = jax.grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, part)
                jax.tree.map(lambda r, g: r.addupdate(g), sums, grads)
                jax.lax.scan(counted, 0, part)
            updates, state = tx.update(jax.tree.map(jax.freeze, sums), state, params)
            return optax.apply_updates(params, updates), state, count[...]

        return step

    x = jnp.linspace(-1, 1, 4 * 64).reshape(4, 64)
    found = []
    for tx, jit in ((optax.adam(0.1), jax.jit), (offloaded(optax.adam(0.1)), oo.jit)):
        step = jit(step_of(tx), donate_argnums=(0, 1))
        params = {"w": jnp.ones((64, 8))}
        state, count = tx.init(params), jnp.zeros(())
        for _ in range(2):
            params, state, count = step(params, state, x)
        assert count == 4
        found.append(params["w"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_a_ref_in_an_offloaded_update_is_refused():
    """By its name where it has one."""

    def update(updates, state, params=None, *, seen=None, **_):
        (kept if seen is None else seen)[...] += 1
        return updates, state

    kept = jax.new_ref(jnp.float32(0))
    using = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = offloaded(optax.chain(using, optax.adam(0.1)))
    params = make_params()
    for extra, said in (
        ({}, r"'Ref\{float32\[\]\}', closed over"),
        ({"seen": kept}, ""),
    ):
        said = said or r"the extra argument 'seen'"
        with pytest.raises(TypeError, match=rf"uses a ref \({said}\).* optax.chain\("):
            tx.update(params, tx.init(params), params, **extra)


def test_what_jax_makes_of_a_fused_step():
    """A population's step, and tangents, are those of the plain one."""
    tx = offloaded(optax.adam(0.1))
    step = make_step(tx)
    fused = oo.stream(step)
    params = make_params()
    state = tx.init(params)
    population = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    states = jax.jit(jax.vmap(tx.init))(population)

    def tangent(f):
        return lambda x: jax.jvp(lambda x: f(params, state, x)[0]["w"], (x,), (x,))

    def batched(f):
        return lambda x: jax.vmap(f, (0, 0, None))(population, states, x)

    for of in (tangent, batched):
        want = jax.jit(of(step))(X)
        for f in (fused, oo.jit(fused)):
            got = jax.jit(of(f))(X)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert x.sharding.memory_kind == y.sharding.memory_kind
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [3, LAYERS])
def test_no_tracer_leaks(layers):
    """Nothing that an equation keeps keeps traced values."""
    tx = offloaded(optax.adam(0.1))
    params = make_params(layers)
    state = tx.init(params)
    args = (params, state, X)
    gc.collect()  # What other tests left is closed here, and not while it is traced.
    with jax.checking_leaks():
        tx.update(params, tx.init(params), params)
        for fuse in (True, False):
            step = oo.jit(make_step(tx), fuse=fuse)
            step.schedule(*args)
            step.lower(*args)
        jax.jit(oo.stream(make_step(tx))).lower(*args)


def test_ordered_effects_in_a_function_that_jax_compiles():
    """What is in host memory within it is neither taken nor returned by it."""

    @oo.jit
    def inner(x):
        jax.debug.callback(lambda: None, ordered=True)
        return x + 1, oo.set_memory_kind(x, ".*", "pinned_host")

    x = jnp.ones((16, 16))
    assert jnp.all(jax.jit(lambda x: inner(x)[0])(x) == 2)
    with pytest.raises(ValueError, match="compiles no function that has an ordered"):
        inner(x)
