"""Forms of models: which gradients are found, and that nothing else changes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from program import emitted
from scanned_models import (
    BATCH,
    DONATED,
    layer,
    loss,
    loss_with,
    make_params,
    make_step,
    offloaded,
    scanned,
    train,
)

import optax_offload as oo
from benchmarks.common.differences import ulps

# In units of the last place of each leaf's maximum; 18.6 was seen, of linen.
BOUND = 32
FUSED = "backward scan of 4 iterations: 2 gradients of 12.00 KiB never"


def scan_with(body=layer, **options):
    """A loss whose layers are scanned in some way."""
    return loss_with(lambda h, layers: lax.scan(body, h, layers, **options)[0])


@jax.custom_vjp
def activation(x):
    """With a derivative of its own."""
    return jnp.tanh(x)


def _forward(x):
    y = jnp.tanh(x)
    return y, y


activation.defvjp(_forward, lambda y, g: (g * (1 - y * y),))


def with_custom_vjp(h, w):
    """A layer with such an activation."""
    return h + activation(h @ w["in"]) @ w["out"], None


def bfloat16(tree):
    """Compute parameters of masters."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def with_auxiliary(params, tokens):
    """A mean over what each layer returns, as a router's loss."""

    def body(h, w):
        return layer(h, w)[0], jnp.mean(h**2)

    h, aux = lax.scan(body, params["embedding"][tokens], params["layers"])
    return jnp.mean((h @ params["head"]) ** 2) + jnp.mean(aux)


def offloads_activations(h, w):
    """A layer whose input is named."""
    return layer(checkpoint_name(h, "h"), w)


to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def groups_of_layers(h, layers):
    """A scan over pairs of layers of a scan over these."""
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), layers)
    return lax.scan(lambda h, pair: (scanned(h, pair), None), h, pairs)[0]


def with_dropout(params, tokens):
    """A random key for each layer."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), tokens[0]), 4)

    def body(h, x):
        w, key = x
        keep = jax.random.bernoulli(key, 0.9, h.shape)
        return layer(jnp.where(keep, h, 0), w)

    h = params["embedding"][tokens]
    h, _ = lax.scan(jax.checkpoint(body), h, (params["layers"], keys))
    return jnp.mean((h @ params["head"]) ** 2)


def in_loop(h, layers):
    """Layers that are looked up by their number."""
    return lax.fori_loop(
        0, 4, lambda i, h: layer(h, jax.tree.map(lambda x: x[i], layers))[0], h
    )


LOSSES = {
    "scan": (loss, FUSED),
    "unroll": (scan_with(unroll=2), FUSED),
    "unroll not dividing": (scan_with(unroll=3), FUSED),
    "unrolled": (scan_with(unroll=True), FUSED),
    "split transpose": (scan_with(_split_transpose=True), FUSED),
    "reverse": (scan_with(reverse=True), FUSED),
    "checkpoint": (scan_with(jax.checkpoint(layer)), FUSED),
    "custom_vjp": (scan_with(with_custom_vjp), FUSED),
    "activations on the host": (
        scan_with(jax.checkpoint(offloads_activations, policy=to_host)),
        FUSED,
    ),
    "cast before": (
        loss_with(lambda h, w: scanned(bfloat16(h), bfloat16(w)).astype(jnp.float32)),
        "2 gradients of 6.00 KiB never",
    ),
    "cast inside": (
        scan_with(lambda h, w: (layer(h, bfloat16(w))[0].astype(jnp.float32), None)),
        FUSED,
    ),
    "auxiliary": (with_auxiliary, FUSED),
    "dropout": (with_dropout, FUSED),
    "layers used twice": (
        loss_with(lambda h, w: scanned(scanned(h, w), w)),
        "2 gradients of 12.00 KiB left outside: a later scan adds to it",
    ),
    "groups": (
        loss_with(groups_of_layers),
        "2 gradients of 12.00 KiB left outside: reshape needs all of it at once",
    ),
    "checkpoint of all layers": (
        loss_with(jax.checkpoint(scanned)),
        FUSED,
    ),
    "checkpoint of the model": (
        jax.checkpoint(loss),
        FUSED,
    ),
    "loop over numbers": (
        loss_with(in_loop),
        "2 gradients of 12.00 KiB left outside: its scan sums it up over all iter",
    ),
}


# Near relatives of others.
SLOW = {"unroll", "unrolled", "reverse", "checkpoint of the model"}
SLOW |= {"checkpoint of all layers", "cast before"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LOSSES],
)
def test_three_steps(name):
    """Offloaded and fused against neither; and nothing is said of what is none."""
    loss, said = LOSSES[name]
    tx = optax.adamw(1e-2)
    want = train(jax.jit(make_step(tx, loss), **DONATED), tx, steps=3)
    tx = offloaded(tx)
    step = oo.jit(make_step(tx, loss), **DONATED)
    with jax.debug_key_reuse(True):
        got = train(step, tx, steps=3)
    assert ulps(got, want) <= BOUND
    text = str(step.schedule(*got[:2], BATCH))
    assert said in text
    assert ("left outside" in text) == ("left outside" in said)
    assert ("nothing is fused" in text) == (
        "left outside" in said and "later scan" not in said
    )


def test_stacked_groups():
    """Parameters of groups of layers are updated group by group."""

    def loss(params, x):
        def group(h, ws):
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)

        return jnp.sum(lax.scan(lambda h, ws: (group(h, ws)[0], None), x, params)[0])

    params = jax.random.normal(jax.random.key(0), (3, 2, 16, 16)) / 4
    text = check(loss, params, jnp.ones((8, 16)))
    assert text.startswith("backward scan of 3 iterations: 1 gradient of 6.00 KiB")


def check(loss, params, batch, tx=None):
    """Compares three steps, and returns what the schedule says."""
    tx = tx or optax.adamw(1e-2)
    want = train(jax.jit(make_step(tx, loss)), tx, params, batch, steps=3)
    tx = offloaded(tx)
    step = oo.jit(make_step(tx, loss))
    got = train(step, tx, params, batch, steps=3)
    assert ulps(got, want) <= BOUND
    return str(step.schedule(*got[:2], batch))


def test_layers_along_the_second_axis():
    """As of `nn.scan` with ``variable_axes={"params": 1}``."""

    def loss(params, tokens):
        layers = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), params["layers"])
        h = scanned(params["embedding"][tokens], layers)
        return jnp.mean((h @ params["head"]) ** 2)

    params = make_params()
    params["layers"] = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), params["layers"])
    assert check(loss, params, BATCH).startswith(FUSED)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True])
def test_encoder_and_decoder(clip):
    """Two scans, each updated in its own backward scan."""

    def loss(params, tokens):
        h = scanned(params["encoder"]["embedding"][tokens], params["encoder"]["layers"])
        h = scanned(h * params["bridge"][None], params["decoder"]["layers"])
        return 4 * jnp.mean((h @ params["decoder"]["head"]) ** 2)

    params = {
        "encoder": make_params(),
        "decoder": jax.tree.map(lambda x: x / 2, make_params()),
        "bridge": jnp.ones(16),
    }
    tx = optax.adamw(1e-2)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(0.1), tx)
    text = check(loss, params, BATCH, tx)
    assert text.count(FUSED) == 2
    assert "left outside" not in text


def test_an_update_that_takes_what_a_later_scan_gives():
    """It waits: else that scan would run before, whole, and then again."""

    def scale(updates, state, params=None):
        a, b = map(optax.tree.norm, (updates["a"], updates["b"]))
        scales = {"a": b, "b": a}
        return {k: optax.tree.scale(scales[k], u) for k, u in updates.items()}, state

    by_the_other = optax.GradientTransformation(lambda p: optax.EmptyState(), scale)
    tx = offloaded(optax.chain(by_the_other, optax.sgd(1e-2, 0.9)))
    params = {"a": make_params(), "b": make_params()}
    step = make_step(tx, lambda p, x: loss(p["a"], x) + loss(p["b"], x))
    step = oo.jit(step, late_gradients="host")
    args = params, tx.init(params), BATCH
    text = str(step.schedule(*args))
    for said in ("need all gradients first", "updated with their rows"):
        assert text.count(f"{said}: 2 gradients of 12.00 KiB") == 1
    primitives = [e.primitive.name for e in emitted(step.trace(*args).jaxpr).eqns]
    assert primitives.count("scan") == 4  # Two forward, two backward.


@pytest.mark.parametrize("hidden", [16, 24])
def test_one_update_reads_what_another_replaces(hidden):
    """Both leaves are read as they were before the step, of one type or of two."""

    def step(params, x):
        def loss(params):
            def body(h, w):
                return jnp.tanh(h @ w["a"]) @ w["b"], None

            return jnp.sum(lax.scan(body, x, params)[0] ** 2)

        grads = jax.grad(loss)(params)
        turned = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), params)
        other = {"a": turned["b"], "b": turned["a"]}
        return jax.tree.map(lambda p, g, o: p - 0.1 * (g - o), params, grads, other)

    keys = jax.random.split(jax.random.key(0))
    shapes = (4, 16, hidden), (4, hidden, 16)
    a, b = (jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True))
    params, x = {"a": a, "b": b}, jnp.ones((8, 16))
    fused = oo.jit(step)
    planned = fused.schedule(params, x)
    assert "backward scan of 4 iterations: 2 gradients" in str(planned)
    # Each in the buffer that `jax.jit` donates to it.
    a, b = planned.step.program.invars[:2]
    assert [v for f in planned.scans[0].fused for v in f.replaced.values()] == [a, b]
    assert ulps(fused(params, x), jax.jit(step)(params, x)) <= BOUND


class Block(nn.Module):
    """A layer of Flax Linen, as `nn.scan` takes it."""

    @nn.compact
    def __call__(self, h, _):
        """The layer's output, wider inside."""
        return h + nn.Dense(16)(jnp.tanh(nn.Dense(24)(h))), None


class Model(nn.Module):
    """An embedding, layers with `nn.scan` and `nn.remat`, and a head."""

    @nn.compact
    def __call__(self, tokens):
        """The output for each token."""
        h = nn.Embed(32, 16)(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        return nn.Dense(32)(layers(name="layers")(h, None)[0])


def test_linen():
    """A `TrainState`, with `nn.scan` and `nn.remat`."""
    model = Model()
    params = model.init(jax.random.key(0), BATCH)["params"]

    def step(state, tokens):
        def loss(params):
            return jnp.mean(state.apply_fn({"params": params}, tokens) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def run(tx, jit):
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=tx
        )
        for _ in range(3):
            state = jit(state, BATCH)
        return state

    fused = oo.jit(step)
    got = run(oo.offload(optax.adamw(1e-2), oo.Rule(".*", min_bytes=8)), fused)
    want = run(optax.adamw(1e-2), jax.jit(step))
    assert ulps((got.params, got.opt_state), (want.params, want.opt_state)) <= BOUND
    text = str(fused.schedule(got, BATCH))
    assert "backward scan of 4 iterations: 4 gradients" in text
    assert "left outside" not in text
