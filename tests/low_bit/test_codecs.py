"""Codes and scales are those of the published formats, written down here once more."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_offload._low_bit import codecs, dynamic_map
from optax_offload._low_bit.codecs import CODECS, codec_of
from optax_offload._low_bit.encoded import Encoded
from optax_offload._places.rules import CODEC_NAMES

# Those with blocks: name, sign, and the block.
FORMATS = [
    ("int8", True, 256),
    ("int8", False, 256),
    ("int8-companded", True, 32),
    ("int8-companded", False, 32),
    ("float8", True, 256),
]
formats = pytest.mark.parametrize(("name", "signed", "block"), FORMATS)
SHAPE = (24, 512)


def published_map(signed):
    """The table of Dettmers et al., appendix of arXiv 2110.02861, in float64.

    A decade is cut evenly into fractions, twice as many in each decade as in the one
    below; the values are the middles of the fractions. Zero and one come last.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *-middles] if signed else [*middles]
    return np.sort(values)


def nearest_in(table, x):
    """The position of what is nearest, found by search."""
    return np.abs(x[..., None] - table).argmin(-1).astype(np.uint8)


def short_scale(x):
    """Float32 numbers of at least zero with 8 bits of fraction, as bits of 16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x4000) >> 15).astype(np.uint16)


def scale_values(name, scales):
    """Scales as float64."""
    if name == "int8-companded":
        scales = (scales.astype(np.uint32) << 15).view(np.float32)
    return scales.astype(np.float64)


def reference(name, signed, block, x):
    """Codes and scales in numpy and float64, each scale in its dtype."""
    x = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, block)
    at = np.abs(x).argmax(-1)[..., None]
    scales = np.take_along_axis(x, at, -1)[..., 0].astype(np.float32)
    if name != "int8":
        scales = np.abs(scales)
    y = x
    if name == "int8-companded" and not signed:
        y, scales = np.sqrt(x), np.sqrt(scales)
    if name == "int8-companded":
        scales = short_scale(scales)
    y = y / np.where(scales == 0, 1, scale_values(name, scales))[..., None]
    zero = 0
    if name == "int8":
        codes = nearest_in(published_map(signed), y)
        zero = 127 if signed else 0
    elif name == "float8":
        codes = np.clip(448 * y, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    else:
        y = np.clip(y, -1, 1)
        y = 127 * 2 * y / (1 + np.abs(y)) if signed else 255 * y
        codes = np.floor(y + 0.5).astype(np.int8 if signed else np.uint8)
    # Where nothing is negative, what is above zero is not zero.
    above = (x > 0) & np.all(x >= 0, axis=-1, keepdims=True)
    codes = np.where(
        above & (codes.view(np.uint8) == zero), np.uint8(zero + 1), codes.view(np.uint8)
    ).view(codes.dtype)
    return codes.reshape(*codes.shape[:-2], -1), scales


def reference_values(name, signed, block, codes, scales):
    """What codes stand for, in numpy and float64."""
    y = codes.reshape(*codes.shape[:-1], -1, block)
    if name == "int8":
        y = published_map(signed)[y]
    elif name == "float8":
        y = y.astype(np.float64) / 448
    else:
        y = y.astype(np.float64) / (127 if signed else 255)
        y = y / (2 - np.abs(y)) if signed else y
    y = y * scale_values(name, scales)[..., None]
    if name == "int8-companded" and not signed:
        y = y * y
    return y.reshape(codes.shape)


def moments(signed, shape=SHAPE, seed=0):
    """Heavy-tailed: normal numbers whose scales are spread over some decades."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))
    x = 1e-3 * x * np.exp(rng.standard_normal((*shape[:-1], 1)))
    return (x if signed else x * x).astype(np.float32)


@functools.cache
def encode(name, signed):
    """The function, compiled once."""
    return jax.jit(codec_of(name, signed).encode)


def encoded(name, signed, x):
    """Codes and scales, in numpy."""
    codes, scales = encode(name, signed)(jnp.asarray(x))
    if scales is None:
        return np.asarray(codes), None
    dtype = {"float8": ml_dtypes.float8_e4m3fn, "int8": np.uint8}.get(name)
    dtype = dtype or (np.int8 if signed else np.uint8)
    return bytes_of(name, codes).view(dtype), np.asarray(scales)


def bytes_of(name, words):
    """The codes of 8 bits in words of 16: of each chunk half in the lower bytes."""
    words = np.asarray(words)
    assert words.dtype == np.uint16
    words = words.reshape(*words.shape[:-1], -1, codec_of(name).chunk // 2)
    codes = np.concatenate([words & 0xFF, words >> 8], -1).astype(np.uint8)
    return codes.reshape(*codes.shape[:-2], -1)


@functools.cache
def decode(name, signed):
    """The function, compiled once."""
    return jax.jit(codec_of(name, signed).decode)


def decoded(name, signed, x):
    """What is left of values."""
    return np.array(decode(name, signed)(*encode(name, signed)(jnp.asarray(x))))


def positions(name, codes):
    """Codes as numbers, of which neighbours differ by one."""
    if name != "float8":
        return codes.astype(np.int64)
    bits = codes.view(np.uint8).astype(np.int64)
    return np.where(bits < 128, bits, 128 - bits)


def assert_published(name, signed, block, x):
    """Scales as published, and codes; near a midpoint the neighbour's may be."""
    codes, scales = encoded(name, signed, x)
    want, want_scales = reference(name, signed, block, x)
    assert scales is not None
    assert want_scales is not None
    assert (codes.dtype, scales.dtype) == (want.dtype, want_scales.dtype)
    np.testing.assert_array_equal(scales, want_scales)
    away = np.abs(positions(name, codes) - positions(name, want))
    assert away.max(initial=0) <= 1
    other = away > 0
    # A value on the midpoint of two codes, but for some ulp, is as far from either.
    left = reference_values(name, signed, block, codes, scales)[other]
    right = reference_values(name, signed, block, want, scales)[other]
    x = x.astype(np.float64)[other]
    unit = np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)
    # The root of a value has its midpoint elsewhere than the value.
    if name == "int8-companded":
        assert other.mean() < 1e-3
    else:
        assert np.all(np.abs(np.abs(left - x) - np.abs(right - x)) <= 4 * unit)
    assert other.mean() < 0.01


def test_names_are_those_of_rules():
    """Rules are read without this wing, and know the names."""
    assert tuple(CODECS) == CODEC_NAMES
    assert [codec.name for codec in CODECS.values()] == list(CODECS)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed):
    """All 256 values, in order, and each its own code."""
    table = np.asarray(dynamic_map.table(signed))
    want = published_map(signed)
    assert want.size == 256
    np.testing.assert_allclose(table, want, rtol=3e-7, atol=0)
    np.testing.assert_array_equal(
        dynamic_map.encode(jnp.asarray(table), signed), np.arange(256)
    )


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_of_the_map(signed):
    """On both sides of each midpoint."""
    table = published_map(signed)
    middle = (table[:-1] + table[1:]) / 2
    for side in (-1, 1):
        x = (middle * (1 + side * np.sign(middle) * 1e-6)).astype(np.float32)
        np.testing.assert_array_equal(
            dynamic_map.encode(jnp.asarray(x), signed), nearest_in(table, x)
        )


@formats
def test_codes_and_scales_are_the_published_ones(name, signed, block):
    """Of heavy-tailed moments, and what they are decoded to."""
    x = moments(signed)
    assert_published(name, signed, block, x)
    codes, scales = encoded(name, signed, x)
    np.testing.assert_allclose(
        decoded(name, signed, x),
        reference_values(name, signed, block, codes, scales),
        rtol=1e-6,
    )


def special(kind, signed):
    """Two blocks of 256 of a kind."""
    x = moments(signed, (1, 512))
    if kind == "zeros":
        x[:] = 0
    elif kind == "minus zeros":
        x[:] = -0.0
    elif kind == "one outlier":
        x[0, 77] = 1e4 if signed else 1e8
    elif kind == "equal":
        x[:] = 0.3
    elif kind == "equal and opposite":
        x[:] = np.where(np.arange(512) % 2, 0.3, -0.3)
    elif kind == "denormals":
        x[:] = np.arange(512) * 1e-42
    elif kind == "a zero block":
        x[0, :256] = 0
    return x


@formats
@pytest.mark.parametrize(
    "kind", ["zeros", "minus zeros", "one outlier", "equal", "a zero block"]
)
def test_edges_are_as_published(name, signed, block, kind):
    """Nothing is divided by zero, and zeros stay zeros."""
    x = special(kind, signed)
    assert_published(name, signed, block, x)
    back = decoded(name, signed, x)
    assert np.all(np.isfinite(back))
    np.testing.assert_array_equal(back[x == 0], 0)


@formats
def test_a_block_of_equal_values_keeps_them(name, signed, block):
    """To the format's precision; the signed map has no -1, but -0.993."""
    x = special("equal", signed)
    within = 4e-3 if name == "int8-companded" else 2e-7
    np.testing.assert_allclose(decoded(name, signed, x), x, rtol=within)
    if signed:
        x = special("equal and opposite", signed)
        within = {"int8": 0.0071}.get(name, within)
        np.testing.assert_allclose(decoded(name, signed, x), x, rtol=within)


@pytest.mark.parametrize("name", ["int8", "int8-companded", "float8", "bfloat16"])
@pytest.mark.parametrize("signed", [True, False])
def test_denormals_are_kept_or_become_zero(name, signed):
    """Never NaN: a scale that is no normal number counts as none."""
    x = special("denormals", signed)
    back = decoded(name, signed, x)
    assert np.all(np.isfinite(back))
    np.testing.assert_allclose(back, x, rtol=0, atol=x.max())


@formats
def test_only_zero_becomes_zero(name, signed, block):
    """In blocks without negative numbers, whatever the codes are; as a second moment.

    Beside a negative number what is far below the largest becomes zero, as published.
    """
    x = np.zeros((16, 2 * block), np.float32)
    x[:, ::2] = 10.0 ** np.linspace(3, -35, block)
    back = decoded(name, signed, x)
    assert np.all((back > 0) == (x > 0))
    assert np.all(np.diff(back[0, ::2]) <= 0)
    if signed:
        x[:, 1::block] = -1e3
        assert np.mean(decoded(name, signed, x)[:, ::2] == 0) > 0.5


@pytest.mark.parametrize("name", ["int8", "int8-companded"])
def test_negative_numbers_without_a_sign_are_told(name):
    """All of their block is NaN, and other blocks are as they were."""
    block = codec_of(name, False).block
    x = moments(False, (16, 512))
    without = decoded(name, False, x)
    for value in (-1e-12, np.nan):
        x[3, 5] = value
        back = decoded(name, False, x)
        assert np.all(np.isnan(back[3, :block]))
        back[3, :block] = without[3, :block]
        np.testing.assert_array_equal(back, without)


@pytest.mark.parametrize("name", ["int8", "int8-companded", "float8", "bfloat16"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rows", [1, 16])
def test_what_is_not_finite_is_told(name, value, rows):
    """All of its block is not finite; so far as there are blocks.

    Of some shapes XLA's CPU compiler has a number as the maximum of numbers and a NaN.
    """
    codec = codec_of(name, True)
    x = moments(True, (rows, 512))
    without = decoded(name, True, x)
    x[-1, 300] = value
    back = decoded(name, True, x)
    start = 300 // codec.block * codec.block
    block = slice(start, start + codec.block)
    assert not np.any(np.isfinite(back[-1, block]))
    back[-1, block] = without[-1, block]
    np.testing.assert_array_equal(back, without)


def floats32():
    """Float32 numbers by their bits: all exponents, signs, and middles of bfloat16."""
    bits = st.integers(0, 2**32 - 1)
    upper = st.integers(0, 2**16 - 1)
    near = st.builds(
        lambda upper, lower: upper << 16 | lower,
        upper,
        st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
    )
    return st.lists(st.one_of(bits, near), min_size=64, max_size=64)


@jax.jit
def halves(x):
    """The parameter, what it lacks, and both together."""
    codec = codecs.Bfloat16Remainder()
    param, (codes, _) = codec.upper(x), codec.encode(x)
    return param, codes, codec.decode_with(codes, param)


def finite_floats32():
    """As these, all of them finite, and at times all subnormal or all very large."""
    ends = st.sampled_from([0, 0x80000000, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF])
    masks = st.sampled_from(
        [(0xFFFFFFFF, 0), (0x807FFFFF, 0), (0x807FFFFF, 0x7F000000)]
    )

    def finite(bits, ends, mask):
        bits = np.array([*ends, *bits[len(ends) :]], np.uint32)
        bits = (bits & np.uint32(mask[0])) | np.uint32(mask[1])
        above = (bits & np.uint32(0x7F800000)) == 0x7F800000
        return np.where(above, bits - np.uint32(0x00800000), bits).view(np.float32)

    return st.builds(finite, floats32(), st.lists(ends, max_size=32), masks)


@functools.cache
def there_and_back(name, signed):
    """What is decoded of a block of 64, and whether it would be encoded as before."""

    def fn(x):
        codec = codec_of(name, signed).fitting(x)
        encoded = Encoded.of(x, codec, "w")
        decoded = encoded.decoded()
        again = Encoded.of(decoded, codec, "w")
        parts = zip(jax.tree.leaves(encoded), jax.tree.leaves(again), strict=True)
        return decoded, jnp.array([jnp.all(x == y) for x, y in parts])

    return jax.jit(fn)


@pytest.mark.parametrize(
    ("name", "signed"),
    [*(f[:2] for f in FORMATS), ("bfloat16", True), ("bfloat16-stochastic", True)],
)
@given(finite_floats32())
@settings(deadline=None, max_examples=40)
def test_finite_values_stay_finite(name, signed, x):
    """Of all float32: subnormal, 3.4e38, and both in a block; and so do their codes.

    What is decoded is encoded as it was, zeros stay zeros, the largest is kept, and
    without negative numbers beside them what is above zero stays above.
    """
    x = x if signed else np.abs(x)
    back, same = there_and_back(name, signed)(x)
    back = np.asarray(back)
    assert np.all(np.isfinite(back))
    assert np.all(same)
    np.testing.assert_array_equal(back[x == 0], 0)
    normal = np.abs(x) >= np.finfo(np.float32).tiny
    # A number that rounds half of a word's bits, twice where it is squared.
    top, size = np.abs(x).argmax(), np.abs(x).max().astype(np.float64)
    if size > 2.0**-100:
        assert abs(abs(float(back[top])) / size - 1) < 0.008
    if np.all(x >= 0):
        assert np.all(back[normal] > 0)


@given(floats32())
@settings(deadline=None, max_examples=25)
def test_a_remainder_and_its_parameter_are_exact(bits):
    """Of every float32: ties, denormals, zeros, infinities; a NaN stays one."""
    x = np.array(bits, np.uint32).view(np.float32)
    param, codes, back = halves(jnp.asarray(x))
    assert (param.dtype, codes.dtype) == (jnp.bfloat16, jnp.int16)
    back = np.asarray(back)
    nan = np.isnan(x)
    assert np.all(np.isnan(back[nan]))
    np.testing.assert_array_equal(back[~nan].view(np.uint32), x[~nan].view(np.uint32))
    # And the parameter is the nearest there is, halves away from zero.
    with np.errstate(invalid="ignore"):  # of signalling NaN
        nearest = x.astype(ml_dtypes.bfloat16)
    tie = (x.view(np.uint32) & 0xFFFF) == 0x8000
    compared = np.isfinite(x) & ~tie
    np.testing.assert_array_equal(
        np.asarray(param)[compared].view(np.uint16), nearest[compared].view(np.uint16)
    )
    away = (x.view(np.uint32) >> 16) + 1
    np.testing.assert_array_equal(
        np.asarray(param)[tie & np.isfinite(x)].view(np.uint16),
        away[tie & np.isfinite(x)],
    )


def test_a_remainder_alone_has_no_value():
    """It is an error to ask for it."""
    with pytest.raises(TypeError, match="has no value without its parameter"):
        codecs.Bfloat16Remainder().decode(jnp.zeros(4, jnp.int16), None)


def test_bfloat16_is_the_nearest():
    """As the conversion of ml_dtypes."""
    x = moments(True)
    np.testing.assert_array_equal(
        encoded("bfloat16", True, x)[0], x.astype(ml_dtypes.bfloat16)
    )


def linear(x):
    """8 bits in even steps: what these formats are not."""
    x = x.reshape(-1, 256)
    scale = np.abs(x).max(-1, keepdims=True) / (127 if x.min() < 0 else 255)
    return (np.round(x / scale) * scale).reshape(SHAPE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bfloat16", 0.002),
        ("int8", 0.034),
        ("float8", 0.033),
        ("int8-companded", 0.048),
        ("linear", 0.6),
    ],
)
def test_the_error_of_an_update(name, expected):
    """The relative error of what Adam would do with them, as docs/low-bits.md has it.

    Magnitudes are spread over several decades within a block. An update whose second
    moment became zero has no bound, and counts as wholly wrong.
    """
    rng = np.random.default_rng(2)
    spread = 1e-3 * np.exp(rng.standard_normal(SHAPE))
    mu = (spread * rng.standard_normal(SHAPE)).astype(np.float32)
    nu = (spread**2 * np.exp(0.3 * rng.standard_normal(SHAPE))).astype(np.float32)

    def left(signed, x):
        return linear(x) if name == "linear" else decoded(name, signed, x)

    want = mu / (np.sqrt(nu) + 1e-8)
    got = left(True, mu) / (np.sqrt(left(False, nu)) + 1e-8)
    error = np.mean(np.minimum(np.abs(got - want) / np.abs(want), 1))
    assert 0.6 * expected < error < 1.6 * expected


def test_codec_of_an_unknown_name():
    """The message has those there are."""
    with pytest.raises(
        ValueError, match="codec is 'int3'; it must be one of 'int8', 'int8-companded'"
    ):
        codec_of("int3")


def test_formats_without_a_choice_of_sign_have_one():
    """So that states of either rule are of one structure."""
    assert codec_of("float8", False) == codec_of("float8", True)
    assert codec_of("int8", False) != codec_of("int8", True)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "why"),
    [
        ("int8", (4096,), jnp.int32, "int32 is no floating type"),
        ("int8", (15, 256), jnp.float32, "under 4096 values"),
        ("int8", (64, 96), jnp.float32, "64 does not divide its last axis, 96"),
        ("int8", (64, 320), jnp.float32, None),
        ("int8-companded", (64, 320), jnp.float32, None),
        ("int8-companded", (64, 96), jnp.float32, "64 does not divide its last axis"),
        ("int8", (16, 256), jnp.bfloat16, None),
        ("bfloat16", (16, 256), jnp.bfloat16, "bfloat16 is as small"),
        ("int8", (16, 256), jnp.float8_e4m3fn, "float8_e4m3fn is as small"),
        ("bfloat16", (4097,), jnp.float32, None),
    ],
)
def test_why_not(name, shape, dtype, why):
    """Each reason to keep a leaf's dtype."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    told = codec_of(name).fitting(x).why_not(x)
    assert (told or "").startswith(why or "")
    assert (told is None) == (why is None)


@pytest.mark.parametrize(("last", "block"), [(512, 256), (384, 128), (64, 64)])
def test_blocks_divide_the_last_axis(last, block):
    """The largest that do, and each value is within its block's error."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, last)), jnp.float32)
    codec = codec_of("int8").fitting(x)
    assert codec.block == block
    codes, scales = jax.jit(codec.encode)(x)
    assert scales is not None
    assert scales.shape == (64, last // block)
    largest = np.repeat(np.asarray(scales), block, axis=-1)
    error = np.abs(np.asarray(jax.jit(codec.decode)(codes, scales)) - np.asarray(x))
    assert np.max(error / largest) < 0.0072  # Half the widest gap, 0.9 / 64.


@pytest.mark.parametrize("name", CODECS)
def test_bits_at_rest(name):
    """As many as the parts of an encoded leaf have."""
    codec, x = codec_of(name), moments(True)
    codes, scales, *tops = encode(name, True)(jnp.asarray(x))
    nbytes = codes.nbytes + (0 if scales is None else scales.nbytes)
    assert 8 * nbytes == codec.bits * x.size
    assert len(tops) == ("tops" in codec.parts)
    assert codes.size * codec.codes_in_word == x.size
    assert ("scales" in codec.parts) == (scales is not None)
