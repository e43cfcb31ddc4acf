"""A step that does not update moves nothing, and one that does streams."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close
from small_jaxprs import names, on_device, program_of, run
from updates import traced

import optax_offload as oo
from optax_offload import aot
from optax_offload._program import Input, Output, Update, branches, variables

MOMENTS = r".*/(mu|nu)/.*"


def params_of(n=3, shape=(256, 128)):
    """Parameters of one shape."""
    keys = jax.random.split(jax.random.key(0), n)
    return {f"w{i}": jax.random.normal(k, shape) for i, k in enumerate(keys)}


def branches_of(tx, host=MOMENTS):
    """The branches of an update, and the paths of what each of its versions moves."""
    update = traced(tx, params_of(), path=host)
    found = branches.find_branches(update)
    if found is None:
        return None, []
    return found, [sorted(moved(version)) for version in found.versions]


def moved(update):
    """The names of the moments that a version loads."""
    program = update.program
    used = {v for i in program.live for v in variables(program.equations[i].invars)}
    paths = {output.alias: output.path for output in update.outputs}
    return {paths[i].split("/")[-2] for i in update.loads if program.invars[i] in used}


def multi_steps(**kwargs):
    """Adam, once in three steps."""
    return optax.MultiSteps(optax.adam(1e-2), 3, **kwargs).gradient_transformation()


conditionally_mask = optax.conditionally_mask(
    optax.adam(1e-2), lambda step: jnp.equal(step % jnp.int32(2), 0)
)


@pytest.mark.parametrize(
    ("tx", "host", "want"),
    [
        (multi_steps(), MOMENTS, [[], ["mu", "nu"]]),
        (
            multi_steps(),
            ".*(mu|nu|acc_grads)/.*",
            [["acc_grads"], ["acc_grads", "mu", "nu"]],
        ),
        (
            multi_steps(should_skip_update_fn=optax.skip_not_finite),
            MOMENTS,
            [["mu", "nu"], []],
        ),
        (optax.apply_if_finite(optax.adam(1e-2), 3), MOMENTS, [[], ["mu", "nu"]]),
        (
            conditionally_mask,
            MOMENTS,
            [[], ["mu", "nu"]],
        ),
    ],
    ids=["MultiSteps", "all of it", "skip", "apply_if_finite", "conditionally_mask"],
)
def test_a_version_that_keeps_state_does_not_load_it(tx, host, want):
    """What each version of an update moves."""
    assert branches_of(tx, host)[1] == want


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.MultiSteps(optax.sgd(1e-2), 3).gradient_transformation(),
    ],
    ids=["adam", "clip and adamw", "no state"],
)
def test_an_update_without_a_predicate_is_one(tx):
    """An update that always does the same has no versions."""
    assert branches_of(tx)[0] is None


def test_a_cond_of_which_both_sides_update_is_one():
    """There is nothing to be won: each moves all."""

    def update(updates, state, params=None):
        def by(factor):
            return lambda s: jax.tree.map(lambda x, u: x * factor + u, s, updates)

        first = jax.tree.leaves(updates)[0]
        mu = jax.lax.cond(first[0, 0] > 0, by(0.9), by(0.8), state["mu"])
        return mu, {"mu": mu}

    tx = optax.GradientTransformation(
        lambda p: {"mu": jax.tree.map(jnp.zeros_like, p)}, update
    )
    assert branches_of(tx, r"(.*/)?mu/.*")[0] is None


def small(fn):
    """An update of a gradient and a state, of which a number says what is done."""

    def update(g, count, m):
        u, new = fn(count, g, m)
        return u, count + 1, new

    program = program_of(
        update, on_device(8, 4), on_device(dtype=jnp.int32), on_device(8, 4)
    )
    inputs = Input(), Input(), Input(on_host=True, slice_axis=0)
    outputs = (
        Output("g", "device", 0, is_update=True),
        Output("count", "device", 1, is_update=False),
        Output("m", "pinned_host", 2, is_update=False),
    )
    return Update(program, inputs, outputs)


def moved_in(version):
    """The loads that live equations of a version take."""
    program = version.program
    used = {v for i in program.live for v in variables(program.equations[i].invars)}
    return {i for i in version.loads if program.invars[i] in used}


def selected(count, g, m):
    """Every second step updates, and keeps the state else; its update is dropped."""
    emit = count % 2 == 1
    new = 0.9 * m + g
    return new * emit.astype(jnp.float32), jnp.where(emit, new, m)


def decided(count, g, m):
    """As a cond."""
    return jax.lax.cond(
        count % 2 == 1,
        lambda g, m: (0.9 * m + g, 0.9 * m + g),
        lambda g, m: (jnp.zeros_like(g), m),
        g,
        m,
    )


@pytest.mark.parametrize("fn", [selected, decided])
def test_a_version_for_each_value(fn):
    """Each is the update with the predicate known, and computes as much of it."""
    update = small(fn)
    found = branches.find_branches(update)
    assert found is not None
    keeps, updates = found.versions
    # The counter is no output of a version: it is computed beside both.
    assert set(found.outputs) == {0, 2}
    assert found.outputs[2] == 2
    beside = [update.program.equations[i] for i in found.beside]
    assert names(beside) == ["add"]
    before = [update.program.equations[i] for i in found.before]
    assert found.predicate in {v for e in before for v in e.outvars}
    for version in (keeps, updates):
        assert {"cond", "select_n"}.isdisjoint(names(version.program.equations))
    g, m = np.full((8, 4), 3, np.float32), np.ones((8, 4), np.float32)
    kept = run(keeps.program, g, np.int32(0), m)
    np.testing.assert_array_equal(kept[0], np.zeros_like(g))
    np.testing.assert_array_equal(kept[2], m)
    done = run(updates.program, g, np.int32(1), m)
    np.testing.assert_allclose(done[0], 0.9 * m + g)
    np.testing.assert_allclose(done[2], 0.9 * m + g)
    assert moved_in(keeps) == set()
    assert moved_in(updates) == {2}


def test_an_update_that_is_dropped_is_zero_by_choice():
    """A product with zero would be NaN of what is not finite: so zero is selected."""
    update = small(selected)
    found = branches.find_branches(update)
    assert found is not None
    (dropped,) = found.dropped.items()
    assert dropped == (update.program.outvars[0], 0)
    zero = branches.as_zero(update)
    assert zero == {update.program.outvars[0]: (found.predicate, 0)}
    keeps, _ = found.versions
    bad = np.full((8, 4), np.inf, np.float32)
    (u, *_) = run(keeps.program, bad, np.int32(0), bad)
    np.testing.assert_array_equal(u, np.zeros_like(u))
    # A cond's own zero is not ours to select.
    assert branches.as_zero(small(decided)) == {}


def always(count, g, m):
    """An update that is the same in every step."""
    return g, 0.9 * m + g


def by_state(count, g, m):
    """What decides depends on the state itself."""
    return g, jnp.where(m[0, 0] > 0, m, m + g)


def by_leaf(count, g, m):
    """Each number is decided for itself."""
    return g, jnp.where(g > 0, m, m + g)


def loud(count, g, m):
    """As `selected`, with an effect."""
    jax.debug.print("{}", g[0, 0])
    return selected(count, g, m)


@pytest.mark.parametrize("fn", [always, by_state, by_leaf, loud])
def test_no_versions(fn):
    """Where nothing decides, or only what is loaded does, and of effects."""
    update = small(fn)
    assert branches.find_branches(update) is None
    assert branches.as_zero(update) == {}


def history(tx, steps=7, nan_at=None):
    """Updates, state and parameters of each step; one may have gradients of NaN."""
    params = params_of()
    state = tx.init(params)

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    for i in range(steps):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x * (i + 1)), params_of())
        if i == nan_at:
            grads = jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), grads)
        updates, state, params = step(grads, state, params)
        yield updates, state, params


@pytest.mark.parametrize("slice_axis", [None, 0])
@pytest.mark.parametrize(
    ("tx", "nan_at"),
    [
        (multi_steps(), None),
        (multi_steps(should_skip_update_fn=optax.skip_not_finite), 3),
        (optax.apply_if_finite(optax.adam(1e-2), 3), 3),
        (conditionally_mask, None),
    ],
    ids=["MultiSteps", "skip", "apply_if_finite", "conditionally_mask"],
)
def test_values_are_those_of_the_plain_one(tx, nan_at, slice_axis):
    """Steps that update, that keep, and one that is rejected."""
    ours = oo.offload(tx, oo.Rule(".*", min_bytes=8, slice_axis=slice_axis))
    for got, want in zip(history(ours, 7, nan_at), history(tx, 7, nan_at), strict=True):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type)
            x, y = np.asarray(x), np.asarray(y)
            unit = np.finfo(np.float32).eps * max(1.0, np.max(np.abs(y)))
            np.testing.assert_allclose(x, y, rtol=0, atol=float(64 * unit))


def test_a_random_key_that_both_versions_leave_out():
    """It depends on no state in host memory, and there is no zero of it."""
    noisy = optax.chain(optax.noisy_sgd(0.1, eta=0.1, key=0), optax.trace(0.9))
    plain = optax.MultiSteps(noisy, 2)
    params = params_of(2)
    tx = oo.offload(plain)
    got, want = tx.init(params), plain.init(params)
    for _ in range(4):
        updates, got = jax.jit(tx.update)(params, got, params)
        wanted, want = jax.jit(plain.update)(params, want, params)
        assert_close(updates, wanted, rtol=1e-6, atol=0)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100", "v5e:2x2"])
@pytest.mark.parametrize("name", ["MultiSteps", "apply_if_finite"])
def test_state_that_is_kept_is_in_no_transfer(target, name):
    """Transfers are all in a loop that runs once or not at all; no host copies."""
    tx = {
        "MultiSteps": multi_steps(),
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    }[name]
    ours = oo.offload(tx, MOMENTS)
    chip = aot.Target(target)
    replicated = jax.NamedSharding(chip.mesh(), jax.P())
    params = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        for k, x in params_of().items()
    }
    state = oo.eval_shape(ours.init, params)

    def update(state, grads):
        # State first: JAX pairs donated arguments with results by shape, in order.
        updates, state = ours.update(grads, state)
        return state, updates

    compiled = aot.compile(update, state, params, target=chip, donate_argnums=0)
    assert aot.peak(compiled).host_temporary_bytes == 0
    assert aot.host_computations(compiled) == ()
    text = compiled.as_text() or ""
    entry = text[text.index("\nENTRY") :]
    entry = entry[: entry.index("\n}")]
    lines = [line for line in entry.splitlines() if "S(5)" in line]
    moves = ("copy", "dynamic-slice", "dynamic-update-slice", "fusion", "conditional")
    moving = [x for x in lines if any(f" {move}" in x.split("(")[0] for move in moves)]
    assert [x for x in lines if " while(" in x]
    assert moving == []
