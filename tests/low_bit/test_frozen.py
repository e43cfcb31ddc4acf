"""A step uses encoded parameters as if they were in their own dtype, and keeps them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from harness import quick_of
from jax import lax

import optax_offload as oo
from optax_offload._low_bit import Encoded

LAYERS, WIDTH, INNER, RANK = 3, 128, 512, 4
ALL = oo.Rule(".*", min_bytes=0)
NAMES = ["nf4", "nf4-double", "int8-linear"]


def normal(key, *shape):
    """Weights of about unit gain."""
    values = np.random.default_rng(key).standard_normal(shape, np.float32)
    return jnp.asarray(values, jnp.bfloat16) / shape[-2] ** 0.5


@functools.cache
def base(codec, unrolled=False) -> Any:
    """Matrices that rest on the host, encoded, and norms; scanned or in a list."""
    lead = () if unrolled else (LAYERS,)

    def layer(key):
        return {
            "up": normal(key, *lead, WIDTH, INNER),
            "down": normal(key + 1, *lead, INNER, WIDTH),
            "norm": jnp.ones((*lead, WIDTH), jnp.bfloat16),
        }

    made = [layer(2 * i) for i in range(LAYERS)] if unrolled else layer(0)
    return oo.place(made, [oo.Rule(".*", codec=codec, min_bytes=0)])


@functools.cache
def decoded(codec, unrolled=False) -> Any:
    """The same, decoded."""
    return oo.low_bit_decode(base(codec, unrolled))


def on_device(tree):
    """The same on the device, for plain `jax.jit`."""
    return jax.device_put(tree, jax.memory.Space.Device)


def adapters(unrolled=False) -> Any:
    """Of one matrix of each layer."""
    lead = () if unrolled else (LAYERS,)

    def layer(key):
        a = normal(key, *lead, WIDTH, RANK).astype(jnp.float32)
        return {"a": a, "b": jnp.zeros((*lead, RANK, INNER))}

    return [layer(50 + i) for i in range(LAYERS)] if unrolled else layer(50)


def block(h, weights):
    """One layer."""
    layer, adapter = weights
    y = h * layer["norm"][None]
    low = y @ adapter["a"].astype(y.dtype) @ adapter["b"].astype(y.dtype)
    return h + jax.nn.gelu(y @ layer["up"] + low) @ layer["down"], None


def forward(layers, adapters, x):
    """All layers, in a scan or in a loop."""
    if isinstance(layers, list):
        for weights in zip(layers, adapters, strict=True):
            x, _ = block(x, weights)
        return x
    return lax.scan(jax.checkpoint(block), x, (layers, adapters))[0]


def loss_of(layers, adapters, x):
    """How far the result is from ones."""
    y = forward(layers, adapters, x)
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1))


def step_with(tx):
    """A step that trains adapters."""

    def step(adapters, state, layers, x):
        loss = functools.partial(loss_of, layers)
        loss, gradients = jax.value_and_grad(loss)(adapters, x)
        updates, state = tx.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    return step


def inputs():
    """A batch."""
    return normal(99, 16, WIDTH)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(1e-1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}


@pytest.mark.parametrize(
    ("optimizer", "codec", "jitted", "form"),
    quick_of(
        [
            *itertools.product(["adamw"], NAMES, ["jit"], ["scanned", "unrolled"]),
            ("adamw", "nf4", "stream", "scanned"),
            ("adamw", "nf4", "stream", "unrolled"),
            # Optimizers do not know how layers are run.
            ("lion", "nf4", "jit", "scanned"),
            ("momentum", "nf4", "jit", "unrolled"),
            ("clipped", "nf4", "jit", "unrolled"),
        ],
        {("adamw", "nf4", "jit", "scanned"), ("adamw", "nf4", "jit", "unrolled")},
    ),
)
def test_losses_are_those_over_the_decoded_base(optimizer, codec, jitted, form):
    """Adapters train to the last digit, and codes stay where and what they are."""
    tx = oo.offload(OPTIMIZERS[optimizer], ALL)
    step, x, unrolled = step_with(tx), inputs(), form == "unrolled"
    losses = []
    for layers in (base(codec, unrolled), decoded(codec, unrolled)):
        ways: dict[str, Any] = {
            "jit": oo.jit(step, donate_argnums=(0, 1)),
            "stream": jax.jit(oo.stream(step)),
        }
        fn = ways[jitted]
        params = adapters(unrolled)
        state = tx.init(params)
        found = []
        for _ in range(3):
            params, state, loss = fn(params, state, layers, x)
            found.append(float(loss))
        losses.append(found)
    assert losses[0][2] < losses[0][0]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("unrolled", [False, True])
def test_gradients_of_the_base_are_said(unrolled):
    """Where they are used, as in a norm; not where they are only asked for."""

    def step(rate, adapters, layers, x, *, clipped):
        both = jax.grad(loss_of, (0, 1))(layers, adapters, x)
        scale = optax.tree.norm(both) if clipped else 1
        return optax.tree.scale(rate / scale, both[1])

    # A number is an argument of the program too.
    args = 0.1, adapters(unrolled), base("nf4", unrolled), inputs()
    plan_of = oo.jit(step, static_argnames="clipped", donate_argnums=1).schedule
    first = "'0/down', '0/up'" if unrolled else "'down', 'up'"
    with pytest.warns(oo.OffloadWarning, match=f"so frozen: {first}"):
        plan_of(*args, clipped=True)
    plan_of(*args, clipped=False)


@pytest.mark.parametrize(
    "unrolled",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["scanned", "unrolled"],
)
def test_evaluation(unrolled):
    """As over the decoded base: compiled, not compiled, in a jit, and by hand."""
    layers, params, x = base("nf4", unrolled), adapters(unrolled), inputs()
    plain = on_device(decoded("nf4", unrolled))
    want = np.asarray(jax.jit(forward)(plain, params, x), np.float32)

    def by_hand(layers, params, x):
        return forward(oo.low_bit_decode(layers), params, x)

    with jax.disable_jit():
        one_by_one = oo.jit(forward)(layers, params, x)
    for got in (
        oo.jit(forward)(layers, params, x),
        oo.jit(forward)(on_device(layers), adapters=params, x=x),
        oo.jit(lambda *xs: oo.jit(forward)(xs[0], xs[1], xs[2]))(layers, params, x),
        oo.jit(by_hand)(layers, params, x),
        jax.jit(by_hand)(on_device(layers), params, x),
        one_by_one,
    ):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=0.1)


def test_templates():
    """A step is traced, lowered and described for structs as for arrays."""
    tx = oo.offload(optax.adam(1e-2), ALL)
    step: Any = oo.jit(step_with(tx))
    layers, params = base("nf4"), adapters()
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), layers
    )
    state = oo.eval_shape(tx.init, params)
    out, _, loss = step.eval_shape(params, state, structs, inputs())
    assert (out["a"].shape, loss.shape) == (params["a"].shape, ())
    assert "at rest on the host" in str(step.schedule(params, state, layers, inputs()))


def replacing(params, x):
    """A step that trains the base itself."""
    gradients = jax.grad(lambda p: loss_of(p["base"], p["adapters"], x))(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients)


def training(params, x):
    """A step that passes the base on."""
    loss = functools.partial(loss_of, params["base"])
    gradients = jax.grad(loss)(params["adapters"], x)
    new = jax.tree.map(lambda p, g: p - g, params["adapters"], gradients)
    return params | {"adapters": new}, params["base"]["up"]


def test_what_is_passed_on_stays_encoded():
    """In its place, and in another: the same codes, in the same memory."""
    params = {"base": base("nf4"), "adapters": adapters()}
    new, up = oo.jit(training)(params, inputs())
    again, _ = oo.jit(training, donate_argnums=0)(jax.tree.map(jnp.copy, new), inputs())
    for node in (new["base"]["up"], up, again["base"]["up"]):
        assert isinstance(node, Encoded)
        np.testing.assert_array_equal(node.codes, params["base"]["up"].codes)
    assert again["base"]["up"].codes.sharding.memory_kind == "pinned_host"
    assert not np.array_equal(again["adapters"]["b"], params["adapters"]["b"])


def test_a_step_that_would_replace_them():
    """It is named what it would replace, and what to do instead."""
    params = {"base": base("nf4"), "adapters": adapters()}
    told = r"encoded, as codec 'nf4': 'base/down', 'base/up'\. .* train adapters: .*"
    for step in (
        oo.jit(replacing, donate_argnums=0),
        oo.jit(lambda params, x: (replacing(params, x), x), donate_argnames="params"),
        jax.jit(oo.stream(replacing)),
    ):
        with pytest.raises(ValueError, match=told + "codec='bfloat16-remainder'"):
            step(params, inputs())


@pytest.mark.parametrize("fn", [lambda w, x: w * 2, lambda w, x: (w * 2, x)])
def test_a_step_that_would_replace_one_that_is_an_argument(fn):
    """Its path is the argument's position."""
    copy = jax.tree.map(jnp.copy, base("nf4")["up"])
    with pytest.raises(ValueError, match=r"encoded, as codec 'nf4': '0'\. "):
        oo.jit(fn, donate_argnums=0)(copy, inputs())
    others = oo.jit(lambda w, x: ({"a": [w * 2]}, w), donate_argnums=0)(copy, 1.0)
    assert isinstance(others[1], Encoded)


def test_no_optimizer_keeps_state_of_them():
    """Of a whole tree it would; of adapters, or with a mask, it does not."""
    params = {"base": base("nf4"), "adapters": adapters()}
    adam = optax.adam(1e-3)
    told = r"'0/mu/base/down', '0/mu/base/up'.* encoded, .* optax.masked\(tx, mask\)"
    tx = oo.offload(adam, ALL)
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=told):
            init(params)
    mask = {"base": False, "adapters": True}
    oo.offload(optax.masked(adam, mask), ALL).init(params)
    tx.init(params["adapters"])


def test_merging_replaces_nothing():
    """A function that donates nothing may return what is like its arguments."""

    def merged(layers, adapters):
        low = jnp.matmul(adapters["a"], adapters["b"])
        return layers | {"up": layers["up"] + low.astype(jnp.bfloat16)}

    made = oo.jit(merged)(base("nf4"), adapters())
    np.testing.assert_array_equal(made["up"], decoded("nf4")["up"])
    assert isinstance(made["down"], Encoded)


class Dense(nn.Module):
    """A layer of Linen."""

    @nn.compact
    def __call__(self, x):
        """Applies it."""
        return nn.Dense(INNER, dtype=jnp.bfloat16)(x)


def test_linen():
    """Variables are encoded as any tree is."""
    variables = Dense().init(jax.random.key(0), inputs())
    rules = [oo.Rule("params/.*/kernel", codec="nf4", min_bytes=0)]
    frozen = oo.place(variables, rules)
    plain = on_device(oo.low_bit_decode(frozen))
    want = jax.jit(Dense().apply)(plain, inputs())
    got = oo.jit(lambda v, x: Dense().apply(v, x))(frozen, inputs())
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("whole", [True, False], ids=["object", "state"])
def test_nnx(whole):
    """The value of a parameter is encoded; the step's object has it decoded."""
    model = nnx.Linear(WIDTH, INNER, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    frozen = oo.place(state, [oo.Rule("kernel", codec="nf4", min_bytes=0)])
    plain = on_device(oo.low_bit_decode(frozen))
    want = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(plain, inputs())
    if whole:
        got = oo.jit(lambda model, x: model(x))(nnx.merge(graph, frozen), inputs())
    else:
        step = oo.jit(lambda state, x: nnx.merge(graph, state)(x))
        got = step(frozen, inputs())
    np.testing.assert_array_equal(got, want)


def generated(layers, x):
    """What layers make of their own result, as often as it is small."""

    def again(found):
        count, y = found
        return count + 1, lax.scan(lambda h, w: (jnp.tanh(h @ w), None), y, layers)[0]

    return lax.while_loop(lambda found: found[0] < 3, again, (0, x))[1]


def chosen(layers, x):
    """What layers make, or nothing."""

    def scanned() -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]

    return lax.cond(x[0, 0] > 0, scanned, lambda: x)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("fn", [generated, chosen])
def test_loops_and_branches_decode_rows(fn, kind):
    """What has layers inside decodes each where it is used, and never all before."""
    w, x = normal(0, 16, WIDTH, WIDTH), jnp.ones((8, WIDTH), jnp.bfloat16)
    layers = oo.place(w, oo.Rule(".*", kind, codec="nf4", min_bytes=0))
    plain = on_device(oo.low_bit_decode(layers))
    want = jax.jit(fn)(plain, x)
    np.testing.assert_allclose(
        np.asarray(oo.jit(fn)(layers, x), np.float32),
        np.asarray(want, np.float32),
        atol=0.1,
    )
    found: Any = oo.jit(fn).lower(layers, x).compile().memory_analysis()
    assert found.temp_size_in_bytes < 0.5 * w.nbytes
    if kind == "pinned_host":
        assert "whole" not in str(oo.jit(fn).schedule(layers, x))


def test_what_is_decoded_whole_beside_a_scan_is_told():
    """A schedule names what takes all of a base whose layers are scanned as well."""

    def fn(layers, x):
        found, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers["up"])
        return found, jnp.sum(layers["up"])

    w = {"up": normal(0, LAYERS, WIDTH, WIDTH)}
    layers = oo.place(w, oo.Rule(".*", codec="nf4", min_bytes=0))
    lines = str(oo.jit(fn).schedule(layers, jnp.ones((8, WIDTH), jnp.bfloat16)))
    assert "of rows in each iteration of 1 scan" in lines
    assert "loaded whole by" in lines


def test_members_of_a_batch_that_loop_until_their_own_end():
    """As `jax.vmap` has it: those that have ended keep what they have."""

    def fn(layers, xs, ends):
        def one(x, end):
            def again(found):
                count, y = found
                y, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), y, layers)
                return count + 1, y

            return lax.while_loop(lambda found: found[0] < end, again, (0, x))

        return jax.vmap(one)(xs, ends)

    layers = oo.place(
        normal(0, 4, WIDTH, WIDTH), oo.Rule(".*", codec="nf4", min_bytes=0)
    )
    plain = on_device(oo.low_bit_decode(layers))
    args = jnp.ones((2, 8, WIDTH), jnp.bfloat16), jnp.array([1, 3])
    for got, want in zip(
        oo.jit(fn)(layers, *args), jax.jit(fn)(plain, *args), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.1
        )


def test_not_decoded():
    """What uses one as an array is told who decodes it, whatever it asks for."""
    w = base("nf4")["up"]
    x = jnp.ones((2, WIDTH), jnp.bfloat16)
    told = r"argument of a function under oo\.jit or oo.stream"
    uses = [lambda w: x @ w, lambda w: w.T, lambda w: w.astype(jnp.float32)]
    for use in uses:
        for call in (use, jax.jit(use), lambda _, use=use: oo.jit(lambda: use(w))()):
            with pytest.raises((TypeError, AttributeError), match=told):
                call(w)
    assert not hasattr(w, "sharding")
    with pytest.raises(AttributeError, match="no attribute 'color'"):
        _ = w.color
    of_state = oo.place({"w": jnp.ones((256, 512))}, oo.Rule("w", codec="int8"))
    with pytest.raises(
        TypeError, match=r"int8 is for optimizer state.*'nf4', 'nf4-dou"
    ):
        oo.jit(lambda params, x: x @ params["w"])(of_state, x)
