"""A model's own decoding before its layers, computed of the rows that each takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import on_host
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._program import CODES as NAME

LAYERS, WIDTH, BLOCK = 4, 16, 16
BLOCKS = WIDTH * WIDTH // BLOCK
# By NumPy: every process imports this, and would compile what JAX draws them with.
DRAWN = np.random.default_rng(0)
# Not at the same distances.
TABLE = np.sinh(np.linspace(-1, 1, 16)).astype(np.float32)


def integers(shape, dtype, low=0, high=255):
    """Numbers of a narrow dtype."""
    return jnp.asarray(DRAWN.integers(low, high, shape)).astype(dtype)


def normal(*shape, scale=1.0):
    """Numbers in float32."""
    return jnp.asarray(scale * DRAWN.standard_normal(shape), jnp.float32)


def uniform(*shape, least=0.0):
    """Numbers in float32."""
    return jnp.asarray(DRAWN.uniform(least, 1, shape), jnp.float32)


CODES = (
    integers((LAYERS, BLOCKS, BLOCK // 2), jnp.uint8),
    uniform(LAYERS, BLOCKS, least=0.5).astype(jnp.bfloat16),
)
# As a `qwix.QArray` has them: codes of the same shape, and a scale for each tile.
SCALE = uniform(LAYERS, 4, 1)
MATRICES = normal(LAYERS, WIDTH, WIDTH)


def scaled(numbers, scale):
    """Numbers in blocks, times a scale for each, as matrices."""
    blocks = numbers.reshape(*scale.shape, BLOCK) * scale[..., None]
    return blocks.reshape(*scale.shape[:-1], WIDTH, WIDTH).astype(jnp.float32)


def halves(base):
    """Two codes in a byte, which are looked up."""
    codes, scale = base
    table = jnp.asarray(TABLE, jnp.bfloat16)
    return scaled(jnp.concatenate([table[codes & 15], table[codes >> 4]], -1), scale)


def taken(base):
    """Likewise by `jnp.take`, which is jitted, and looks whether a code is negative."""
    codes, scale = base
    table = jnp.asarray(TABLE, jnp.bfloat16)
    low = jnp.take(table, (codes & 15).astype(jnp.int8), axis=0)
    return scaled(jnp.stack([low, jnp.take(table, codes >> 4, mode="clip")], -1), scale)


def shifted(base):
    """Signed codes by shifts, and a constant of the whole shape."""
    codes, scale = base
    numbers = (
        codes[..., None] >> jnp.arange(0, 8, 4, jnp.uint8)[None, None, None]
    ) & 15
    signed = numbers.astype(jnp.int8)
    return scaled(
        jnp.where(signed > 7, signed - 16, jnp.where(signed, signed, 1)), scale
    )


def vmapped(base):
    """The decoding of one matrix, under `jax.vmap`."""

    def one(codes, scale):
        numbers = jnp.asarray(TABLE)[jnp.concatenate([codes & 15, codes >> 4], -1)]
        return (numbers * scale[:, None]).reshape(WIDTH, WIDTH)

    return jax.vmap(one)(*base)


def cast_bits(base):
    """Bytes that are two numbers of four bits."""
    codes, scale = base
    numbers = lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.int4)
    return scaled(numbers.astype(jnp.float32), scale)


def as_qwix(base):
    """The equations of `qwix.dequantize`: those of nf4 look up all numbers in a row."""
    codes, scale = base
    if codes.dtype == jnp.uint4:
        values = jnp.asarray(TABLE)[:, None].at[codes.reshape(-1)].get(mode="clip")
        numbers = jnp.squeeze(values, 1).reshape(codes.shape)
    else:
        numbers = codes.astype(scale.dtype)
    tiles = numbers.reshape(LAYERS, 4, WIDTH // 4, WIDTH)
    return (tiles * scale.reshape(LAYERS, 4, 1, 1)).reshape(codes.shape)


@jax.custom_jvp
def doubled(x):
    """A function with a derivative of its own."""
    return x * 2


doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0]))

FORMS = {
    "halves": (halves, CODES),
    "jit": (jax.jit(halves), CODES),
    "take": (taken, CODES),
    "shifts": (shifted, CODES),
    "vmap": (vmapped, CODES),
    "bits": (cast_bits, CODES),
    "nf4": (as_qwix, (integers(MATRICES.shape, jnp.uint4, 0, 15), SCALE)),
    "int4": (as_qwix, (integers(MATRICES.shape, jnp.int4, -7, 7), SCALE)),
    "int8": (as_qwix, (integers(MATRICES.shape, jnp.int8, -127, 127), SCALE)),
    "cast": (lambda w: w.astype(jnp.bfloat16), MATRICES),
    "custom": (lambda w: lax.stop_gradient(doubled(w.mT)), MATRICES),
}
ADAPTERS = {
    "a": normal(LAYERS, WIDTH, 2, scale=0.1),
    "b": normal(LAYERS, 2, WIDTH, scale=0.1),
}
X = normal(8, WIDTH)


def layer(h, w):
    """A layer with its adapter."""
    w, adapter = w
    h = h + jnp.tanh(h @ w) / 4 + h @ adapter["a"] @ adapter["b"]
    return h.astype(jnp.float32), None


def plain(decode, adapters, base, x):
    """The base decoded before the layers."""
    return jnp.mean(lax.scan(layer, x, (decode(base), adapters))[0] ** 2)


def checkpointed(decode, adapters, base, x):
    """Each layer a checkpoint."""
    layers = decode(base), adapters
    return jnp.mean(lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2)


def within(decode, adapters, base, x):
    """All of it in a checkpoint."""
    return jax.checkpoint(lambda base: plain(decode, adapters, base, x))(base)


def around(decode, adapters, base, x):
    """All layers in a checkpoint, and the decoding before it."""
    weights = decode(base)
    stack = jax.checkpoint(lambda w: lax.scan(layer, x, (w, adapters))[0])
    return jnp.mean(stack(weights) ** 2)


def called(decode, adapters, base, x):
    """All layers in a jitted function, and the decoding before it."""
    stack = jax.jit(lambda w: lax.scan(layer, x, (w, adapters))[0])
    return jnp.mean(stack(decode(base)) ** 2)


def in_layers(decode, adapters, base, x):
    """Each layer decodes its own, and nothing of that is a checkpoint."""

    def own(h, w):
        return layer(h, (decode(w[0]), w[1]))

    return jnp.mean(lax.scan(own, x, (base, adapters))[0] ** 2)


def step_of(loss, decode, microbatches=1):
    """A step that trains adapters, maybe over microbatches."""
    tx = optax.adamw(1e-2)

    def step(adapters, state, base, x):
        def one(total, x):
            value, grads = jax.value_and_grad(loss, 1)(decode, adapters, base, x)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = one(jax.tree.map(jnp.zeros_like, adapters), x)
        if microbatches > 1:
            parts = x.reshape(microbatches, -1, WIDTH)
            grads, values = lax.scan(one, jax.tree.map(jnp.zeros_like, adapters), parts)
        updates, state = tx.update(grads, state, adapters)
        return optax.apply_updates(adapters, updates), state, values

    return step, tx.init(ADAPTERS)


def text_of_same(step, *args, base, host):
    """The schedule of a step whose results are those of the plain one, bit by bit."""
    before, after = args[:2], args[2:]
    want = jax.jit(step)(*before, base, *after)
    jitted = oo.jit(step)
    got = jitted(*before, host, *after)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    return str(jitted.schedule(*before, host, *after))


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "loss", "scans"),
    [
        *((name, plain, 2) for name in FORMS),
        ("halves", checkpointed, 2),
        ("nf4", within, 3),
        ("take", around, 3),
        ("shifts", called, 2),
    ],
)
def test_decoded_by_rows(name, loss, scans):
    """In each scan that takes a row, forward and backward; never all of it."""
    decode, base = FORMS[name]
    step, state = step_of(loss, decode)
    text = text_of_same(step, ADAPTERS, state, X, base=base, host=on_host(base))
    assert f"of rows in each iteration of {scans} scans of {LAYERS}" in text
    assert "loaded whole" not in text


def test_microbatches():
    """In each iteration of each."""
    step, state = step_of(plain, halves, 2)
    text = text_of_same(step, ADAPTERS, state, X, base=CODES, host=on_host(CODES))
    assert "again in each of 2 iterations around" in text
    assert "loaded whole" not in text


def test_what_is_smaller_may_be_on_the_device():
    """Scales that do not rest: their rows are taken of what is there."""
    decode, (codes, scale) = FORMS["int8"]
    step, state = step_of(plain, decode)
    base, host = (codes, scale), (on_host(codes), scale)
    text = text_of_same(step, ADAPTERS, state, X, base=base, host=host)
    assert "1 argument of 1.00 KiB at rest on the host: 256 B of rows in each" in text
    assert "loaded whole" not in text


def test_what_is_as_large_is_not_kept_for_rows():
    """A sum with as much on the device is made before, as it was."""
    step, state = step_of(
        lambda _, a, w, x: plain(lambda w: w + w[::-1], a, w, x), None
    )
    text = text_of_same(step, ADAPTERS, state, X, base=MATRICES, host=on_host(MATRICES))
    assert "loaded whole by 'rev'" in text


@pytest.mark.parametrize("fn", [jnp.sort, jax.jit(lambda w: jnp.sort(w * 2, axis=0))])
def test_what_cannot_be_followed_says_so(fn):
    """All of it is loaded, by the name of an equation, also where that is in a call."""
    jitted = oo.jit(lambda w, x: lax.scan(lambda h, w: (h @ w, None), x, fn(w))[0])
    host = on_host(MATRICES)
    want = lax.scan(lambda h, w: (h @ w, None), X, fn(MATRICES))[0]
    np.testing.assert_allclose(jitted(host, X), want, rtol=1e-5)
    text = str(jitted.schedule(host, X))
    assert "loaded whole by '" in text
    assert "jit" not in text.partition("loaded whole by")[2].partition("\n")[0]


@pytest.mark.parametrize("loss", [plain, in_layers])
def test_decoded_rows_are_no_residuals(loss):
    """Without a checkpoint too: the forward scan stacks no matrices."""
    step, state = step_of(loss, halves)
    jaxpr = jax.make_jaxpr(oo.stream(step))(ADAPTERS, state, on_host(CODES), X).jaxpr
    (e,) = [e for e in jaxpr.eqns if e.primitive.name == "streamed_step"]
    scans = [x for x in e.params["jaxpr"].eqns if x.primitive.name == "scan"]
    forward, _ = scans
    shapes = [v.aval.shape for v in forward.outvars]
    assert (LAYERS, 8, WIDTH) in shapes
    assert not any(len(x) == 3 and x[-2] >= WIDTH for x in shapes)


def equations_around_scans(jitted, *args):
    """Those of a function, however it is wrapped, that are not in a scan's body."""

    def found(jaxpr):
        for e in jaxpr.eqns:
            yield e
            inner = [x for x in e.params.values() if hasattr(x, "eqns")]
            inner += [getattr(x, "jaxpr", None) for x in e.params.values()]
            if "scan" not in e.primitive.name:
                for x in inner:
                    yield from found(x) if hasattr(x, "eqns") else ()

    return list(found(jitted.trace(*args).jaxpr.jaxpr))


def named(decode):
    """The decoding of what is said to be codes."""
    return lambda base: decode(jax.tree.map(lambda x: checkpoint_name(x, NAME), base))


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["halves", "nf4", "int8"])
def test_codes_on_the_device_are_decoded_by_rows(name):
    """All matrices at once would be several times what the codes are.

    Integers of a byte are codes if they are named so, as ours are.
    """
    decode, base = FORMS[name]
    if name != "nf4":
        decode = named(decode)
    step, state = step_of(plain, decode)
    for fn, args in [
        (step, (ADAPTERS, state, base, X)),
        (lambda a, b, x: plain(decode, a, b, x), (ADAPTERS, base, X)),
    ]:
        jitted, want = oo.jit(fn), jax.jit(fn)(*args)
        for a, b in zip(
            jax.tree.leaves(jitted(*args)), jax.tree.leaves(want), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        made = [
            v.aval for e in equations_around_scans(jitted, *args) for v in e.outvars
        ]
        assert made
        assert " of codes on the device: each " in str(jitted.schedule(*args))
        assert not [
            x for x in made if x.dtype == jnp.float32 and x.size >= MATRICES.size
        ]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.int32])
def test_images_and_tokens_are_no_codes(dtype):
    """What is made of them before a scan is made there, as it was written."""
    table = normal(8, 32)

    def fn(table, images):
        rows = table[images] * (images.astype(jnp.float32) / 255)[..., None]
        return lax.scan(lambda h, x: (h + x, None), jnp.zeros((2, 32)), rows)[0]

    args = table, jnp.arange(8, dtype=dtype).reshape(4, 2)
    assert str(jax.make_jaxpr(oo.stream(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def peak(
    target, decode_outside, layers=8, width=1024, tokens=256, memory="pinned_host"
):
    """The most that is on the device, of a step whose base is decoded here or there."""
    blocks = width * width // 256
    struct = jax.ShapeDtypeStruct
    base = (
        struct((layers, blocks, 128), jnp.uint8),
        struct((layers, blocks), jnp.bfloat16),
    )
    adapters = {
        "a": struct((layers, width, 2), jnp.float32),
        "b": struct((layers, 2, width), jnp.float32),
    }

    def decode(base):
        codes, scale = base
        table = jnp.asarray(TABLE, jnp.bfloat16)
        numbers = jnp.concatenate([table[codes & 15], table[codes >> 4]], -1)
        return (numbers * scale[..., None]).reshape(*codes.shape[:-2], width, width)

    decode = named(decode)

    def loss(adapters, base, x):
        def own(h, w):
            row, adapter = w
            row = row if decode_outside else decode(row)
            return layer(h, (row.astype(jnp.float32), adapter))

        weights = decode(base) if decode_outside else base
        return jnp.mean(lax.scan(jax.checkpoint(own), x, (weights, adapters))[0] ** 2)

    compiled = oo.aot.compile(
        oo.stream(
            jax.grad(loss),
            residuals="host" if memory == "pinned_host" else "device",
        ),
        adapters,
        oo.set_memory_kind(base, ".*", memory),
        struct((tokens, width), jnp.float32),
        target=oo.aot.Target(target),
    )
    return oo.aot.peak(compiled).peak_bytes


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.skipif(not compat.COPIES_AT_POSITIONS, reason="refused before JAX 0.11.1")
@pytest.mark.parametrize("target", ["h100", "v5e:1x1"])
def test_the_peak_of_a_base_that_is_decoded_before(target):
    """At most that of layers that decode their own."""
    assert peak(target, True) <= 1.03 * peak(target, False)


@pytest.mark.slow
@pytest.mark.aot
def test_the_peak_of_codes_on_the_device():
    """Likewise, where nothing rests on the host; decoded at once it is 1.8 times."""
    found = peak("h100", True, memory="device")
    assert found <= 1.07 * peak("h100", False, memory="device")
