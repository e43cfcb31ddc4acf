"""Steps that return not the new state itself, but what they make of it and the old."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close, kinds, quick_of
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import optax_offload as oo
from optax_offload import aot

LAYERS, WIDTH = 3, 16
LR = 1e-2
# All but the numbers: a leaf of the unrolled part has 1 KiB.
RULES = [oo.Rule(".*", min_bytes=1024)]
ENCODED = [oo.Rule(r".*/(mu|nu)/.*", codec="int8", min_bytes=1024)]
ADAMW = optax.adamw(LR)
OPTIMIZERS = {
    "adamw": (ADAMW, RULES),
    "clipped": (optax.chain(optax.clip_by_global_norm(0.1), ADAMW), RULES),
    "momentum": (optax.sgd(LR, momentum=0.9), RULES),
    "adafactor": (
        optax.adafactor(LR, momentum=0.9, min_dim_size_to_factor=8),
        RULES,
    ),
    "multi_steps": (optax.MultiSteps(ADAMW, 2), RULES),
    "encoded": (ADAMW, ENCODED),
    "masters": (oo.master_weights(ADAMW), RULES),
}
WAYS = [{"donate_argnums": (0, 1)}, {"fuse": False}, {}]


def make_params(layers=LAYERS, width=WIDTH):
    """Layers for a scan, and others that a Python loop takes."""
    keys = jax.random.split(jax.random.key(0), 3)
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    return {
        "layers": normal(keys[0], (layers, width, width)) / width**0.5,
        "loop": [normal(k, (width, width)) / width**0.5 for k in keys[1:]],
    }


def loss(params, x):
    """A loss of scanned layers, and of layers that are not."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    for w in params["loop"]:
        h = jnp.tanh(h @ w)
    return jnp.mean((h - 0.3) ** 2)


def where(ok, new, old):
    """One of two trees."""
    return jax.tree.map(functools.partial(jnp.where, ok), new, old)


def finite(tree):
    """Whether all numbers are."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def norm(tree):
    """Of all leaves but numbers."""
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree) if x.ndim))


def of_floats(fn):
    """A function of trees that changes their floats alone."""

    def each(x, *rest):
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        return fn(x, *rest).astype(x.dtype) if floats else x

    return lambda *trees: jax.tree.map(each, *trees)


def through(new):
    """State that went through what does not change it."""
    new = jax.tree.map(lambda x: lax.stop_gradient(jnp.asarray(x, x.dtype)), new)
    return jax.tree.map(jnp.copy, lax.optimization_barrier(new))


def tree_cond(ok, new, old):
    """One of two trees, by a conditional over both."""
    return lax.cond(ok, lambda: new, lambda: old)


def decayed(ok, new, old):
    """New state, or what is computed from the old in a branch."""
    return lax.cond(ok, lambda: new, lambda: of_floats(lambda x: x / 2)(old))


def by_a_norm(ok, new, old):
    """New state, scaled by the norm of all of it."""
    of_all = norm(new)
    return of_floats(lambda x: x / (1 + of_all))(new)


def swapped(new):
    """State with those of two layers exchanged."""
    first, *rest = new
    a, b = first.mu["loop"]
    return (first._replace(mu={**first.mu, "loop": [b, a]}), *rest)


# What becomes of state: of a predicate, of the new state and of the old.
MADE = {
    "where": where,
    "cond": tree_cond,
    "a mask": lambda ok, new, old: jax.tree.map(
        lambda a, b: jnp.where(jnp.arange(a.shape[-1]) % 2, a, b) if a.ndim else a,
        new,
        old,
    ),
    "a mean": lambda ok, new, old: of_floats(lambda a, b: b + 0.25 * (a - b))(new, old),
    "a reset": lambda ok, new, old: where(ok, new, jax.tree.map(jnp.zeros_like, new)),
    "a branch": decayed,
    "through": lambda ok, new, old: through(new),
    "through, where": lambda ok, new, old: where(ok, through(new), old),
    "rounded": lambda ok, new, old: of_floats(lambda x: x.astype(jnp.bfloat16))(new),
    # What follows is no part of the update.
    "scattered": lambda ok, new, old: jax.tree.map(
        lambda x: x.at[..., 0].set(0) if x.ndim else x, new
    ),
    "sorted": lambda ok, new, old: jax.tree.map(
        lambda x: jnp.sort(x, axis=0) if x.ndim else x, new
    ),
    "by a norm": by_a_norm,
    "if new is finite": lambda ok, new, old: where(finite(new), new, old),
}
BESIDE = {"scattered", "sorted", "by a norm", "if new is finite"}


def make_step(tx, make, *, of_gradients=False, params_too=True):
    """A train step that makes something of new state."""

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, new = tx.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        ok = finite(gradients) if of_gradients else jnp.isfinite(value)
        after = where(ok, after, params) if params_too else after
        return after, make(ok, new, state), value

    return step


def alike(name):
    """The optimizer of a name, offloaded and not."""
    inner, rules = OPTIMIZERS[name]
    plain = oo.low_bit(inner, rules) if rules is ENCODED else inner
    return oo.offload(inner, rules), plain


def check(step, plain, make_state, make_plain, **options):
    """Compares steps with those of the plain optimizer, one of which is not finite.

    Returns:
      The schedule of the step.
    """
    jitted, expected = oo.jit(step, **options), jax.jit(plain)
    got, want = make_params(), make_params()
    got, want = (got, make_state(got)), (want, make_plain(want))
    before = kinds(got)
    assert "pinned_host" in before
    batch = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    schedule = jitted.schedule(*got, batch)
    for scale in (1, jnp.nan, 0.5):
        got, want = jitted(*got, scale * batch)[:2], expected(*want, scale * batch)[:2]
        assert kinds(got) == before
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype in (np.uint8, np.uint16):
                assert np.mean(a != b) < 0.01
            else:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    return schedule


def checked(name, make, options, **how):
    """The schedule of a step with an optimizer, which has been compared."""
    tx, plain = alike(name)
    step, expected = (make_step(x, make, **how) for x in (tx, plain))
    return check(step, expected, tx.init, plain.init, **options)


@pytest.mark.parametrize("made", MADE)
def test_what_is_made_of_state(made):
    """It rests where it did, equal to plain; most is made by the update itself."""
    schedule = checked("adamw", MADE[made], WAYS[0], of_gradients=made == "where")
    assert bool(schedule.chosen.again) == (made in BESIDE)
    if made not in BESIDE:
        (scan,) = schedule.scans
        assert scan.late if made == "where" else scan.now
        return
    text = str(schedule)
    assert "loaded again after its update, for '" in text
    assert ", and stored where it rested: '0/mu/" in text


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_optimizers(name):
    """Whatever makes the state, and whatever it looks like."""
    assert not checked(name, where, WAYS[0]).chosen.again


@pytest.mark.parametrize("options", WAYS[1:], ids=["not fused", "not donated"])
def test_ways(options):
    """Fused or not, donated or not."""
    checked("adamw", tree_cond, options, params_too=False)


def of_wrapper(wrap):
    """Checks the steps of what is around an offloaded optimizer."""
    tx, plain = map(wrap, alike("adamw"))

    def step_of(tx):
        return make_step(tx, lambda ok, new, old: new, params_too=False)

    return check(step_of(tx), step_of(plain), tx.init, plain.init)


def skipping(inner):
    """Steps with gradients that are not finite are skipped, and counted."""

    def update(gradients, state, params):
        before, count = state
        ok = finite(gradients)
        updates, after = inner.update(gradients, before, params)
        updates = jax.tree.map(lambda x: jnp.where(ok, x, 0), updates)
        return updates, (where(ok, after, before), count + ~ok)

    return optax.GradientTransformation(
        lambda params: (inner.init(params), jnp.int32(0)), update
    )


def in_few(inner):
    """As `optax.MultiSteps` around, which skips what is not finite."""
    skip = optax.skip_not_finite
    return optax.MultiSteps(inner, 2, should_skip_update_fn=skip)


WRAPPERS = {
    "skipping": skipping,
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "multi_steps": in_few,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(name):
    """A transformation around `offload` may choose state in its own update."""
    of_wrapper(WRAPPERS[name])


def in_a_scan(tx, params, state, x):
    """Two steps in one call."""

    def one(carry, _):
        params, state = carry
        after = make_step(tx, where)(params, state, x)
        return after[:2], after[2]

    return lax.scan(one, (params, state), None, length=2)[0]


def in_a_while(tx, params, state, x):
    """Two steps, as many as are asked for."""

    def one(_, carry):
        params, state = carry
        return make_step(tx, where)(params, state, x)[:2]

    return lax.fori_loop(0, x.shape[0] // 2, one, (params, state))


def in_a_cond(tx, params, state, x):
    """A step that chooses, or none."""
    return lax.cond(
        x.sum() > -10,
        lambda: make_step(tx, where)(params, state, x)[:2],
        lambda: (params, state),
    )


def of_a_cond(tx, params, state, x):
    """A step in a conditional, of whose state something is made."""
    params, new = lax.cond(
        x.sum() > -10,
        lambda: make_step(tx, lambda ok, new, old: new)(params, state, x)[:2],
        lambda: (params, state),
    )
    return params, where(x[0, 0] < 0, new, state)


def then_in_a_cond(tx, params, state, x):
    """A step, and maybe another, which takes the state of the first."""
    params, state, _ = make_step(tx, lambda ok, new, old: new)(params, state, x)
    return in_a_cond(tx, params, state, x / 2)


def in_a_jit(tx, params, state, x):
    """A step that is jitted by itself."""
    return jax.jit(make_step(tx, where))(params, state, x)[:2]


INSIDE = {
    f.__name__: f
    for f in (in_a_scan, in_a_while, in_a_cond, then_in_a_cond, of_a_cond, in_a_jit)
}


@pytest.mark.parametrize(
    "name", quick_of([(name,) for name in INSIDE], {("in_a_scan",), ("of_a_cond",)})
)
def test_inside(name):
    """State may be chosen within a loop, a branch, or a jit; or after these."""
    tx, plain = alike("adamw")
    step, expected = (functools.partial(INSIDE[name], x) for x in (tx, plain))
    check(step, expected, tx.init, plain.init)


def test_a_copy_of_old_state():
    """The state of a step before may be chosen, from a copy that the step keeps."""
    tx, plain = alike("adamw")

    def step_of(tx):
        def step(params, states, x):
            state, before = states
            choose = functools.partial(make_step(tx, lambda ok, new, _: new), params)
            params, new, value = choose(state, x)
            return params, (where(value > 0.2, new, before), state), value

        return step

    def init_of(tx):
        return lambda params: (tx.init(params), tx.init(params))

    check(step_of(tx), step_of(plain), init_of(tx), init_of(plain), **WAYS[0])


def test_exchanged_state():
    """States of two leaves that are exchanged rest on the host, each in its place."""
    checked("adamw", lambda ok, new, old: swapped(new), WAYS[0])
    checked("adamw", lambda ok, new, old: where(ok, swapped(new), old), {})


def test_what_else_needs_new_state():
    """A metric of new state, beside a choice of it."""
    tx, plain = alike("adamw")

    def step_of(tx):
        def step(params, state, x):
            gradients = jax.grad(loss)(params, x)
            updates, new = tx.update(gradients, state, params)
            ok = finite(gradients)
            metric = norm(new[0].mu)
            params = optax.apply_updates(params, updates)
            return params, where(ok, new, state), (metric, 1.0)

        return step

    assert not check(step_of(tx), step_of(plain), tx.init, plain.init).chosen.again


def test_a_population():
    """Under `vmap` each member chooses for itself."""
    tx, plain = alike("adamw")

    def step_of(tx):
        def step(params, state, x):
            value, gradients = jax.value_and_grad(loss)(params, x)
            updates, new = tx.update(gradients, state, params)
            chosen = where(value > 0.2, new, state)
            return optax.apply_updates(params, updates), chosen, norm(new)

        return step

    params = jax.tree.map(lambda x: jnp.stack([x, x / 8]), make_params())
    state = jax.vmap(tx.init)(params)
    before = kinds(state)
    batch = jnp.ones((2, 4, WIDTH))
    got = jax.jit(jax.vmap(oo.stream(step_of(tx))))(params, state, batch)
    assert kinds(got[1]) == before
    state = jax.vmap(plain.init)(params)
    want = jax.jit(jax.vmap(step_of(plain)))(params, state, batch)
    assert_close(got, want, atol=1e-6)


def test_constrained_state():
    """A constraint says how state is sharded, and not where it is."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    constrained = functools.partial(
        lax.with_sharding_constraint, shardings=NamedSharding(mesh, PartitionSpec())
    )
    checked("adamw", lambda ok, new, old: constrained(where(ok, new, old)), {})


def test_state_that_arrives_on_the_device():
    """With on_misplaced='move' the first step after a restore may choose too."""
    inner, rules = OPTIMIZERS["adamw"]
    tx = oo.offload(inner, rules, on_misplaced="move")
    step = oo.jit(make_step(tx, where))
    params = make_params()
    with pytest.warns(oo.OffloadWarning, match="came to update on the device"):
        _, state, _ = step(params, inner.init(params), jnp.ones((4, WIDTH)))
    assert kinds(state) == kinds(tx.init(params))


def called_back(new):
    """State that a callback gives back."""
    floats = of_floats(
        lambda x: io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    )
    return floats(new)


@pytest.mark.parametrize("wrap", [oo.jit, lambda step: jax.jit(oo.stream(step))])
def test_state_that_cannot_be_kept_at_rest(wrap):
    """A call that would return it on the device raises, and names the leaves."""
    tx, _ = alike("adamw")
    step = make_step(tx, lambda ok, new, old: called_back(new))
    args = make_params(), tx.init(make_params()), jnp.ones((4, WIDTH))
    message = (
        r"returned on the device: \"0/mu/layers \(by 'io_callback' in .*"
        r"Leave that out, or move the result back"
    )
    with pytest.raises(ValueError, match=message):
        wrap(step)(*args)


def test_the_step_moves_it_back():
    """As the message says."""
    tx, _ = alike("adamw")

    def made(ok, new, old):
        return oo.set_memory_kind(called_back(new), r"0/(mu|nu)/.*", "pinned_host")

    params = make_params()
    state = tx.init(params)
    _, after, _ = oo.jit(make_step(tx, made))(params, state, jnp.ones((4, WIDTH)))
    assert kinds(after) == kinds(state)


def test_plain_jit_keeps_state_where_it_is():
    """There the choice is made on the host."""
    (tx, _), params = alike("adamw"), make_params()
    state = tx.init(params)
    _, after, _ = jax.jit(make_step(tx, where))(params, state, jnp.ones((4, WIDTH)))
    assert kinds(after) == kinds(state)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.xdist_group("gpu")
@pytest.mark.parametrize("of_gradients", [False, True], ids=["loss", "gradients"])
def test_peak_on_a_gpu(of_gradients):
    """Choosing takes a row more than not to, and nothing of the host."""
    tx = oo.offload(ADAMW)
    structs = jax.eval_shape(lambda: make_params(8, 1024))
    state = oo.eval_shape(tx.init, structs)
    batch = jax.ShapeDtypeStruct((256, 1024), jnp.float32)

    def compiled(make, **how):
        step = oo.stream(make_step(tx, make, params_too=False, **how))
        target = aot.Target("h100")
        return aot.compile(
            step, structs, state, batch, target=target, donate_argnums=(0, 1)
        )

    without = compiled(lambda ok, new, old: new)
    chosen = compiled(where, of_gradients=of_gradients)
    row = 4 * 1024**2
    waiting = 2 * row * of_gradients  # Those that a Python loop has gradients of.
    assert (
        aot.peak(chosen).peak_bytes <= aot.peak(without).peak_bytes + 2 * row + waiting
    )
    assert aot.peak(chosen).host_temporary_bytes == 0


def test_numbers_of_state_on_the_host_that_are_chosen_twice():
    """A count that `optax.MultiSteps` around chooses, and then a flag of the step."""

    def step_of(tx):
        def step(state, params, keep):
            updates, new = tx.update(params, state, params)
            both = new, optax.apply_updates(params, updates)
            old = state, params
            return jax.tree.map(lambda a, b: jnp.where(keep, b, a), both, old)

        return step

    found = []
    for jit, offload in (
        (jax.jit, lambda tx: tx),
        (oo.jit, lambda tx: oo.offload(tx, oo.Rule(".*", min_bytes=0))),
    ):
        tx = optax.MultiSteps(offload(optax.adam(0.1)), 2)
        params = {"w": jnp.ones((4, 8))}
        state, step = tx.init(params), jit(step_of(tx), donate_argnums=(0, 1))
        for i in range(5):
            state, params = step(state, params, jnp.array(i == 2))
        found.append((state, params))
    assert_close(*found, rtol=1e-6, atol=0)
