"""Parameters and residuals that rest on the host: every form of step, against plain."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness import kinds_in, on_host, plain, quick_of
from jax import lax
from limited import limited
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
)
from small_steps import train_step

import optax_offload as oo
from benchmarks.common.differences import ulps
from optax_offload._ground import compat

# In units of the last place, after three steps; 11 were seen.
BOUND = 16


@pytest.fixture(autouse=True)
def small_residuals(monkeypatch):
    """These models keep less than what is worth a transfer."""
    limited(monkeypatch, least_residual_rows_bytes=0)


def trained(step, params, state, batch=BATCH, steps=3):
    """The results of the last step."""
    rest = []
    for _ in range(steps):
        params, state, *rest = step(params, state, batch)
    return params, state, *rest


def as_bfloat16(h, w):
    """A layer that keeps casts of its parameters for the backward pass."""
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    return layer(h.astype(jnp.bfloat16), cast)[0].astype(jnp.float32), None


def decayed(params, tokens):
    """A loss that takes parameters in a scan and outside of it."""
    norm = sum(jnp.sum(x**2) for x in jax.tree.leaves(params["layers"]))
    return loss(params, tokens) + 1e-3 * norm


def grouped(h, w):
    """Scans of layers in a scan of groups."""
    return lax.scan(lambda h, g: (lax.scan(layer, h, g)[0], None), h, w)[0]


def twice(h, w):
    """Two scans that share their parameters."""
    return lax.scan(layer, lax.scan(layer, h, w)[0], w)[0]


LOSSES = {
    "scanned": loss,
    "checkpointed layers": loss_with(
        lambda h, w: lax.scan(jax.checkpoint(layer), h, w)[0]
    ),
    "checkpointed whole": jax.checkpoint(loss),
    "checkpointed stack": loss_with(jax.checkpoint(scanned)),
    "reverse": loss_with(lambda h, w: lax.scan(layer, h, w, reverse=True)[0]),
    "unrolled by two": loss_with(lambda h, w: lax.scan(layer, h, w, unroll=2)[0]),
    "written out": loss_with(lambda h, w: lax.scan(layer, h, w, unroll=True)[0]),
    "casts": loss_with(lambda h, w: lax.scan(as_bfloat16, h, w)[0]),
    "shared": loss_with(twice),
    "outside too": decayed,
    "nested": loss_with(grouped),
}


# Followed as "scanned" and "checkpointed stack" are.
ALIKE = {"checkpointed whole", "unrolled by two", "written out", "casts"}


def params_of(name):
    """The parameters of a loss."""
    params = make_params()
    if name == "nested":
        groups = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), params["layers"])
        params["layers"] = groups
    return params


@functools.cache
def plain_results(name):
    """Three steps of plain adamw."""
    tx, params = optax.adamw(1e-2), params_of(name)
    step = jax.jit(make_step(tx, LOSSES[name]))
    return trained(step, params, tx.init(params))


@pytest.mark.parametrize(
    ("name", "residuals"),
    quick_of(
        itertools.product(LOSSES, ["device", "host"]),
        {
            ("scanned", "device"),
            *((name, "host") for name in LOSSES if name not in ALIKE),
        },
    ),
)
def test_losses(name, residuals):
    """All parameters on the host; values, memory kinds, and one compilation."""
    tx = offloaded(optax.adamw(1e-2))
    step = oo.jit(make_step(tx, LOSSES[name]), residuals=residuals, **DONATED)
    params = on_host(params_of(name))
    got = trained(step, params, tx.init(params))
    bound = 2**17 if name == "casts" else BOUND  # bfloat16 numbers, rounded elsewhere.
    assert ulps(got, plain_results(name)) <= bound
    assert kinds_in(got[0]) == {"pinned_host"}
    assert step._cache_size() == 1
    text = str(step.schedule(*got[:2], BATCH))
    assert re.search(r"of rows in each iteration of \d scans? of \d", text)
    assert not re.search("whole by.*(closed_call|eval_jaxpr)", text)
    assert "what replaces it returns there" in text


def accumulated(tx):
    """A step over microbatches in a scan."""

    def step(params, state, tokens):
        def one(total, tokens):
            value, grads = jax.value_and_grad(loss)(params, tokens)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = lax.scan(one, zeros, tokens.reshape(2, 4))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values

    return step


def test_microbatches():
    """Each loads the rows again, and what replaces them returns to the host."""
    inner = optax.adamw(1e-2)
    plain_step = jax.jit(accumulated(inner))
    want = trained(plain_step, make_params(), inner.init(make_params()))
    tx = offloaded(inner)
    params = on_host(make_params())
    step = oo.jit(accumulated(tx), **DONATED)
    got = trained(step, params, tx.init(params))
    assert ulps(got, want) <= BOUND
    assert kinds_in(got[0]) == {"pinned_host"}
    assert kinds_in([x for x in jax.tree.leaves(got[1]) if x.ndim]) == {"pinned_host"}
    schedule = str(step.schedule(*got[:2], BATCH))
    assert "of rows in each iteration of" in schedule
    assert "again in each of 2 iterations around" in schedule


def test_a_frozen_base():
    """Adapters are trained; what they adapt is loaded row by row, and never stored."""
    base = make_params()
    shapes = {"a": (4, 16, 2), "b": (4, 2, 16)}
    adapters = {k: jnp.full(s, 0.01) for k, s in shapes.items()}
    tx = optax.adamw(1e-2)

    def loss(adapters, batch):
        base, tokens = batch

        def adapted(h, w):
            w, (a, b) = w
            return layer(h, w)[0] + h @ a @ b, None

        layers = base["layers"], (adapters["a"], adapters["b"])
        h = lax.scan(adapted, base["embedding"][tokens], layers)[0]
        return jnp.mean((h @ base["head"]) ** 2)

    step = train_step(tx, loss)
    want = trained(jax.jit(step), adapters, tx.init(adapters), (base, BATCH))
    streamed = oo.jit(step)
    batch = on_host(base), BATCH
    got = trained(streamed, adapters, tx.init(adapters), batch)
    assert ulps(got, want) <= BOUND
    assert kinds_in(got) == {"device"}
    text = str(streamed.schedule(adapters, tx.init(adapters), batch))
    assert "2 arguments of 12.00 KiB at rest on the host" in text
    assert "returns" not in text


def test_evaluation():
    """A function that trains nothing loads rows too; plain `jax.jit` refuses it."""
    params = on_host(make_params())
    loss = LOSSES["scanned"]
    evaluate = oo.jit(loss)
    want = jax.jit(loss)(make_params(), BATCH)
    np.testing.assert_allclose(evaluate(params, BATCH), want, rtol=1e-6)
    text = str(evaluate.schedule(params, BATCH))
    assert "3.00 KiB of rows in each iteration of 1 scan of 4" in text
    with pytest.raises(ValueError, match="memory_space"):
        jax.jit(loss)(params, BATCH)


def test_casts_are_not_kept():
    """The backward pass loads the rows again; no scan stacks what is made of them."""
    step = oo.stream(make_step(offloaded(optax.sgd(0.1)), LOSSES["casts"]))
    params = on_host(make_params())
    jaxpr = jax.make_jaxpr(step)(params, optax.sgd(0.1).init(params), BATCH).jaxpr
    (e,) = [e for e in jaxpr.eqns if e.primitive.name == "streamed_step"]
    scans = [x for x in e.params["jaxpr"].eqns if x.primitive.name == "scan"]
    forward, _ = scans
    shapes = [v.aval.shape for v in forward.outvars]
    assert (4, 16, 24) not in shapes
    assert (4, 24, 16) not in shapes


def test_residuals_alone():
    """Parameters and state are on the device; what is kept is not."""
    tx = optax.adamw(1e-2)
    step = oo.jit(make_step(plain(tx)), residuals="host")
    got = trained(step, make_params(), tx.init(make_params()))
    assert ulps(got, plain_results("scanned")) <= BOUND
    assert kinds_in(got) == {"device"}
    text = str(step.schedule(*got[:2], BATCH))
    assert "of residuals rest on the host between the forward and the backward" in text


def test_residuals_asked_for_and_none_there():
    """A step without scans keeps nothing row by row: it says so."""
    step = oo.jit(lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w), residuals="host")
    with pytest.warns(oo.OffloadWarning, match="^residuals='host' was asked for, and"):
        step(jnp.ones((4, 4)), jnp.ones((2, 4)))


@pytest.mark.aot
def test_an_old_jax_on_a_gpu_is_refused(monkeypatch):
    """Its compiler copies other rows than it should (U10)."""
    monkeypatch.setattr(compat, "COPIES_AT_POSITIONS", False)
    target = oo.aot.Target("h100")
    params = oo.set_memory_kind(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_params()),
        "layers/.*",
        "pinned_host",
    )
    with pytest.raises(NotImplementedError, match=r"Use JAX 0\.11\.1 or newer"):
        oo.aot.compile(
            oo.stream(jax.grad(LOSSES["scanned"])),
            *(params, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)),
            target=target,
        )


def test_what_replaces_a_parameter():
    """The new parameter, and not how far it went, nor its gradient."""

    def step(params, x):
        def loss(p):
            return jnp.sum(jnp.tanh(x @ p)) + jnp.linalg.norm(p)

        grads = jax.grad(loss)(params)
        new = params - 0.1 * grads
        return new - params, grads, new, params

    params = on_host(jnp.ones((4, 4)))
    *others, new, old = oo.jit(step)(params, jnp.ones((2, 4)))
    assert kinds_in(others) == {"device"}
    assert kinds_in([new, old]) == {"pinned_host"}


def test_what_a_state_keeps_of_parameters_stays_where_it_is():
    """`contrib.mechanize` keeps the first ones, of which the new ones are made."""
    tx = optax.contrib.mechanize(optax.adam(1e-2))
    params = make_params()
    state = tx.init(jax.tree.map(jnp.copy, params))
    step = oo.jit(make_step(tx), **DONATED)
    params, state, _ = step(on_host(params), state, BATCH)
    assert kinds_in(params) == {"pinned_host"}
    assert kinds_in(state) == {"device"}


@pytest.mark.parametrize("returned", ["nothing", "another dtype", "moved"])
def test_what_is_donated_is_not_lost(returned):
    """An argument on the host whose buffer no result would take."""

    def step(params, x):
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]
        if returned == "nothing":
            return jnp.sum(h)
        other = jax.tree.map(jnp.sqrt, params)
        if returned == "moved":
            return oo.set_memory_kind(other, ".*", "pinned_host"), jnp.sum(h)
        return jax.tree.map(jnp.bfloat16, params), jnp.sum(h)

    params = on_host({"w": jnp.ones((4, 8, 8))})
    jitted = oo.jit(step, donate_argnums=0)
    if returned == "moved":
        assert kinds_in(jitted(params, jnp.ones((2, 8)))[0]) == {"pinned_host"}
        assert params["w"].is_deleted()
        return
    with pytest.raises(ValueError, match=r"no result replaces them there: '0/w'"):
        jitted(params, jnp.ones((2, 8)))
    assert not params["w"].is_deleted()


def make_layers(keys, width=16):
    """Parameters that a scan makes, a layer in an iteration."""

    def make(_, key):
        up, down = jax.random.split(key)
        shape = (width, 2 * width)
        return None, {
            "in": jax.random.normal(up, shape) / 4,
            "out": jax.random.normal(down, shape[::-1]) / 4,
        }

    return {"layers": lax.scan(make, None, keys)[1]}


def make_all(tx, width, keys):
    """Parameters and state, on the host."""
    params = make_layers(keys, width)
    params = oo.set_memory_kind(params, "layers/.*", "pinned_host")
    return params, tx.init(params)


@pytest.mark.accelerator
def test_making_it():
    """Row by row, with the values that it has whole."""
    tx = offloaded(optax.adamw(1e-2))
    make = functools.partial(make_all, tx, 16)
    keys = jax.random.split(jax.random.key(0), 4)
    made = oo.jit(make)
    got, want = made(keys), jax.jit(make)(keys)
    assert ulps(got, want) <= 1
    assert kinds_in(got[0]) == {"pinned_host"}
    assert kinds_in([x for x in jax.tree.leaves(got[1]) if x.ndim]) == {"pinned_host"}
    assert "are stored row by row as scans make them" in str(made.schedule(keys))


class Stack(nnx.Module):
    """Layers under `nnx.scan`, each a checkpoint."""

    def __init__(self, rngs):
        """Makes the layers, stacked."""
        self.layers = make_square(rngs)

    def __call__(self, x):
        """Applies them."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(layer, x):
            return x + jnp.tanh(layer(x))

        return apply(self.layers, x)


@nnx.split_rngs(splits=4)
@nnx.vmap(in_axes=0, out_axes=0)
def make_square(rngs):
    """A stack of square layers."""
    return nnx.Linear(16, 16, rngs=rngs)


def nnx_step(tx):
    """A step as NNX's guides write it, and the state of its model and optimizer."""

    def create():
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graph, state = nnx.split(create())

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))
        value, grads = loss(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, state


def test_a_model_that_is_handed_through_its_scan():
    """As `nnx.value_and_grad` does: its parameters are those that went in."""
    x = jnp.ones((4, 16)) / 2
    step, want = nnx_step(optax.adamw(1e-2))
    plain_step = jax.jit(step)
    step, state = nnx_step(offloaded(optax.adamw(1e-2)))
    got = oo.set_memory_kind(state, "0/layers/.*", "pinned_host")
    jitted = oo.jit(step, donate_argnums=0)
    for _ in range(3):
        want, _ = plain_step(want, x)
        got, _ = jitted(got, x)
    assert ulps(got, want) <= BOUND
    assert kinds_in(nnx.filter_state(got, nnx.Param)) == {"pinned_host"}
    text = str(jitted.schedule(got, x))
    assert "loaded whole" not in text
    assert "backward scan of 4 iterations: 2 gradients" in text
    assert "left outside" not in text


@nnx.split_rngs(splits=4)
@nnx.vmap(in_axes=0, out_axes=0)
def make_block(rngs):
    """A block of a stack, as nnx makes one."""
    return nnx.Linear(16, 32, rngs=rngs)


def vmapped(keys):
    """The parameters of a stack, of a vmapped initialiser."""
    return jax.vmap(lambda key: {"w": jax.random.normal(key, (16, 32)) / 4})(keys)


def vmapped_by_nnx(keys):
    """The parameters of a stack, of `nnx.vmap`."""
    blocks = make_block(nnx.Rngs(keys[0]))
    return nnx.to_pure_dict(nnx.state(blocks))


@pytest.mark.parametrize("make", [vmapped, vmapped_by_nnx])
def test_what_a_vmapped_initialiser_makes(make, monkeypatch):
    """Row by row too, with the values that it has whole, and zeros as well."""
    limited(monkeypatch, least_stack_bytes=0)

    def moved(keys):
        return oo.set_memory_kind(make(keys), ".*", "pinned_host")

    keys = jax.random.split(jax.random.key(0), 4)
    made = oo.jit(moved)
    got, want = made(keys), jax.jit(make)(keys)
    assert ulps(got, want) <= 1
    assert kinds_in(got) == {"pinned_host"}
    nbytes = sum(x.nbytes for x in jax.tree.leaves(want))
    line = f"{nbytes / 1024:.2f} KiB are stored row by row as scans make them"
    assert line in str(made.schedule(keys))


def test_what_is_not_made_by_rows(monkeypatch):
    """Numbers of one key for all rows, and what something else takes too."""
    limited(monkeypatch, least_stack_bytes=0)

    def moved(key):
        one = jax.random.normal(key, (4, 16, 32))
        other = jnp.ones((4, 8)) * jax.random.normal(key)
        return oo.set_memory_kind({"one": one, "other": other}, ".*", "pinned_host"), (
            jnp.sum(other)
        )

    made = oo.jit(moved)
    assert "stored row by row" not in str(made.schedule(jax.random.key(0)))
    got, want = made(jax.random.key(0)), jax.jit(moved)(jax.random.key(0))
    assert ulps(got, want) <= 1


WIDTH = 512


def compiled(function, *args, **options):
    """A program for an H100."""
    target = oo.aot.Target("h100")
    return oo.aot.peak(oo.aot.compile(function, *args, target=target, **options))


def trained_on_a_chip(layers):
    """The peaks of making a model and of a step, on the device and on the host."""
    tx = oo.offload(optax.adamw(1e-2))
    make = oo.stream(functools.partial(make_all, tx, WIDTH))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), layers))
    params, state = oo.eval_shape(make, keys)
    x = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)

    def step(params, state, x):
        body = jax.checkpoint(layer)
        grads = jax.grad(lambda p: jnp.mean(lax.scan(body, x, p["layers"])[0] ** 2))
        updates, state = tx.update(grads(params), state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    init = compiled(make, keys, out_shardings=shardings)
    train = compiled(
        oo.stream(step, residuals="host"),
        *(params, state, x),
        donate_argnums=(0, 1),
        out_shardings=shardings,
    )
    return init, train


@pytest.mark.aot
def test_the_memory_of_one_vmapped_row():
    """To make twice the rows takes no more of the device."""

    def make(keys):
        made = jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)))(keys)
        return oo.set_memory_kind(made, ".*", "pinned_host")

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    whole, by_rows = compiled(make, keys), compiled(oo.stream(make), keys)
    assert whole.temporary_bytes >= 16 * 4 * WIDTH**2
    assert by_rows.temporary_bytes <= 3 * 4 * WIDTH**2


@pytest.mark.aot
@pytest.mark.skipif(not compat.COPIES_AT_POSITIONS, reason="refused before JAX 0.11.1")
def test_the_memory_of_one_layer():
    """Twice the layers take no more of the device, to make and to train."""
    few, many = trained_on_a_chip(16), trained_on_a_chip(32)
    row = 4 * 2 * WIDTH * 2 * WIDTH
    for before, after in zip(few, many, strict=True):
        assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=0.01)
        assert after.peak_bytes <= 8 * row
    init, train = many
    assert init.host_temporary_bytes == 0
    # Residuals, and nothing else.
    assert train.host_temporary_bytes == 32 * 4 * 256 * WIDTH
    assert train.host_argument_bytes == 32 * 3 * row


@pytest.mark.parametrize("what", ["parameters", "state"])
def test_what_a_step_moves_to_the_device_is_there(what):
    """By name, although a step is traced as if it were there already."""
    params = jax.device_put({"w": jnp.ones((64, 64))}, jax.devices()[0])
    tx = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=8))
    state = tx.init(params)
    given = oo.set_memory_kind(params, ".*", "pinned_host")

    @oo.jit
    def step(params, state):
        if what == "parameters":
            return oo.set_memory_kind(params, ".*", "device")
        _, state = tx.update(params, state, params)
        return oo.set_memory_kind(state[0].mu, ".*", "device")

    assert step(given, state)["w"].sharding.memory_kind == "device"
