"""Steps in the user's own loops and branches compute what they computed."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import assert_close, plain, quick_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from limited import limited
from scanned_models import (
    BATCH,
    DONATED,
    layer,
    loss_with,
    make_params,
    make_step,
    offloaded,
)

import optax_offload as oo
from optax_offload._ground import compat

BATCHES = jnp.stack([BATCH, BATCH + 1, BATCH * 3 % 32])


def in_scan(step):
    """As rejax and dynamax have it."""

    def steps(params, state, batches):
        def one(carry, tokens):
            *carry, value = step(*carry, tokens)
            return tuple(carry), value

        (params, state), values = lax.scan(one, (params, state), batches)
        return params, state, values

    return steps


def in_fori_loop(step):
    """Of a length that is known."""

    def steps(params, state, batches):
        def one(i, carry):
            return step(*carry[:2], batches[i])

        return lax.fori_loop(0, len(BATCHES), one, (params, state, jnp.float32(0)))

    return steps


def in_while_loop(step):
    """As often as an argument says."""

    def steps(params, state, batches):
        def one(carry):
            i, params, state, _ = carry
            return i + 1, *step(params, state, batches[i])

        def goes_on(carry):
            return batches[0, 0] + carry[0] < len(BATCHES)

        return lax.while_loop(goes_on, one, (0, params, state, jnp.float32(0)))[1:]

    return steps


def in_cond(step):
    """A step that may be skipped, as each second one is."""

    def steps(params, state, batches):
        value = jnp.float32(0)
        for n, tokens in enumerate(batches):
            params, state, value = lax.cond(
                jnp.sum(tokens) + n > 10**6 * (n % 2),
                step,
                lambda params, state, _, value=value: (params, state, value),
                params,
                state,
                tokens,
            )
        return params, state, value

    return steps


def in_two_scans(step):
    """Epochs of steps."""
    epoch = in_scan(step)

    def epochs(params, state, batches):
        def one(carry, _):
            params, state = carry
            params, state, values = epoch(params, state, batches)
            return (params, state), values

        (params, state), values = lax.scan(one, (params, state), None, length=2)
        return params, state, values

    return epochs


FORMS = {
    "scan": in_scan,
    "fori_loop": in_fori_loop,
    "while_loop": in_while_loop,
    "cond": in_cond,
    "two scans": in_two_scans,
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
}


def kinds(tree):
    """The memory kinds of arrays with axes."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1}


def check(steps, inner, around=lambda tx: tx, *, params=None, at_rest="", **options):
    """Two calls of several steps each, against plain ones; and the plan of a call.

    Args:
      steps: Makes a function of parameters, a state and batches, given an optimizer.
      inner: The optimizer.
      around: Makes a transformation of it that is around the offloaded one.
      params: The parameters.
      at_rest: The paths of those that rest on the host.
      **options: Options of `oo.jit`.
    """
    params = make_params() if params is None else params
    tx, want = around(offloaded(inner)), jax.jit(steps(around(plain(inner))))
    state = around(plain(inner)).init(params)
    given = jax.tree.map(jnp.copy, params)
    if at_rest:
        given = oo.set_memory_kind(given, at_rest, "pinned_host")
    placed = kinds(given)
    moved = tx.init(given)
    got = oo.jit(steps(tx), **DONATED, **options)
    plan = got.schedule(given, moved, BATCHES)
    value = found = None
    for _ in range(2):
        before = given
        params, state, value = want(params, state, BATCHES)
        given, moved, found = got(given, moved, BATCHES)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert_close((given, moved, found), (params, state, value))
    assert kinds(moved) == {"pinned_host"}
    assert kinds(given) == placed
    return plan


@pytest.mark.parametrize(
    ("form", "optimizer"),
    quick_of(
        itertools.product(FORMS, OPTIMIZERS),
        {*itertools.product(FORMS, ["adamw"]), ("scan", "adafactor")},
    ),
)
def test_updates_are_fused_in_bodies(form, optimizer):
    """State at rest is carried there, and no gradient of layers exists."""
    steps = FORMS[form]
    plan = check(lambda tx: steps(make_step(tx)), OPTIMIZERS[optimizer]())
    assert plan.inside
    assert not plan.scans
    assert plan.gradient_bytes == len(plan.inside) * 2 * 4 * 16 * 24 * 4


@pytest.mark.parametrize(
    ("form", "late_gradients"),
    quick_of(
        itertools.product(
            ["scan", "while_loop", "cond"], ["auto", "host", "recompute"]
        ),
        {("scan", "auto"), ("while_loop", "recompute"), ("cond", "host")},
    ),
)
def test_late_gradients_in_bodies(form, late_gradients):
    """They wait in each turn, in the way that was asked for."""

    def clipped(tx):
        return optax.chain(optax.clip_by_global_norm(0.5), tx)

    plan = check(
        lambda tx: FORMS[form](make_step(tx)),
        optax.adamw(1e-2),
        clipped,
        late_gradients=late_gradients,
    )
    late = [scan for step in plan.steps for scan in step.scans if scan.late]
    ways = {scan.way for scan in late}
    assert ways
    assert late_gradients == "auto" or ways == {late_gradients}
    assert all(f.gradient_bytes for scan in late for f in scan.late)


@pytest.mark.parametrize("at_rest", ["layers/.*", ".*"])
@pytest.mark.parametrize("form", ["scan", "while_loop", "cond"])
def test_layers_at_rest_in_bodies(form, at_rest):
    """Rows of parameters are loaded in a scan within a loop, and return there."""
    plan = check(
        lambda tx: FORMS[form](make_step(tx)), optax.adamw(1e-2), at_rest=at_rest
    )
    assert plan.inside
    assert plan.gradient_bytes
    assert "of rows in each iteration of" in str(plan)
    assert ("again in each of 3 iterations around" in str(plan)) == (form == "scan")


@pytest.mark.parametrize(
    ("form", "residuals"),
    quick_of(
        itertools.product(["scan", "while_loop", "cond"], ["device", "host"]),
        {("while_loop", "device"), ("cond", "host")},
    ),
)
def test_layers_of_a_python_loop_at_rest_in_bodies(form, residuals, monkeypatch):
    """Each turn of the user's loop is cut into segments."""
    limited(monkeypatch, segment_bytes=1)
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, least_segments=3, least_residual_bytes=1)

    def unrolled(h, layers):
        for w in layers:
            h, _ = layer(h, w)
        return h

    params = make_params()
    stacked = params["layers"]
    params["layers"] = [{k: w[i] for k, w in stacked.items()} for i in range(4)]
    plan = check(
        lambda tx: FORMS[form](make_step(tx, loss_with(unrolled))),
        optax.adamw(1e-3),
        params=params,
        at_rest="layers/.*",
        residuals=residuals,
    )
    chains = [step.chain for step in plan.steps if step.chain]
    assert len(chains) == len(plan.inside)
    assert all(len(x.segments) > 6 for x in chains)
    assert all(bool(x.residuals) == (residuals == "host") for x in chains)


def of_microbatches(tx, loss):
    """A step of the mean gradient of batches that are scanned."""

    def step(params, state, batches):
        def one(total, tokens):
            value, grads = jax.value_and_grad(loss)(params, tokens)
            return jax.tree.map(jnp.add, total, grads), value

        total, values = lax.scan(one, jax.tree.map(jnp.zeros_like, params), batches)
        grads = jax.tree.map(lambda g: g / len(batches), total)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values

    return step


@pytest.mark.parametrize(
    ("residuals", "of", "clip"),
    [
        ("device", lambda fn: fn, True),
        ("host", jax.checkpoint, False),
        ("uncut", lambda fn: fn, False),
    ],
    ids=["device", "host", "uncut"],
)
def test_microbatches_of_a_python_loop(residuals, of, clip, monkeypatch):
    """A turn takes what it loads, and not the scan all of it."""
    limited(monkeypatch, segment_bytes=1)
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(
        monkeypatch,
        least_segments=999 if residuals == "uncut" else 3,
        least_residual_bytes=1,
        least_taken_bytes=1,
        least_flops_per_byte=0,
        least_products=1,
    )

    def unrolled(h, layers):
        h = jnp.repeat(h, 64, 0)
        for w in layers:
            h = of(lambda h, w: layer(h, w)[0])(h, w)
        return h[::64]

    params = make_params()
    stacked = params["layers"]
    params["layers"] = [{k: w[i] for k, w in stacked.items()} for i in range(4)]
    adam = optax.adamw(1e-3)
    plan = check(
        lambda tx: of_microbatches(tx, loss_with(unrolled)),
        optax.chain(optax.clip_by_global_norm(0.1), adam) if clip else adam,
        params=params,
        at_rest="layers/.*",
        residuals="host" if residuals == "host" else "device",
    )
    chains = [x.chain for x in plan.steps if x is not plan and x.chain]
    assert len(chains) == (residuals != "uncut")
    assert bool(plan.residual_bytes) == (residuals == "host")
    for found in chains:
        assert max(len(s.loads) for s in found.segments) < 4 * len(stacked)
        assert bool(found.residuals) == (residuals == "host")


@pytest.mark.parametrize(
    "form", ["scan", pytest.param("while_loop", marks=pytest.mark.slow)]
)
def test_effects_in_bodies_are_had_as_often(form, capfd):
    """A step prints once in each turn."""

    def steps(tx):
        step = make_step(tx)

        def printing(params, state, tokens):
            *found, value = step(params, state, tokens)
            jax.debug.print("the loss is {}", value)
            return *found, value

        return FORMS[form](printing)

    plan = check(steps, optax.adamw(1e-2))
    jax.effects_barrier()
    assert plan.gradient_bytes
    assert capfd.readouterr().out.count("the loss is") == 2 * 2 * len(BATCHES)


def test_state_in_bodies_stays_spread():
    """On a mesh in Auto mode, where no type in a body says how state is spread."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, P(None, None, "x"))
    whole = NamedSharding(mesh, P())
    params = jax.tree.map(
        lambda w: jax.device_put(w, spread if w.ndim == 3 else whole), make_params()
    )
    inner = optax.adamw(1e-2)
    tx = offloaded(inner)
    state = tx.init(params)
    step = oo.jit(in_scan(make_step(tx)))
    want = jax.jit(in_scan(make_step(inner)))
    found = step(params, state, BATCHES)
    assert_close(found, want(params, inner.init(params), BATCHES))
    for before, after in zip(
        jax.tree.leaves(state[0].mu), jax.tree.leaves(found[1][0].mu), strict=True
    ):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
