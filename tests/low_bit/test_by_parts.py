"""Parameters are encoded as rules say, wherever they come from, part by part."""

import logging
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from harness import quick_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._ground import progress
from optax_offload._low_bit import Encoded, by_parts, codec_of

NAMES = ["nf4", "nf4-double", "int8-linear"]
SHAPES = {"stacked": (3, 130, 512), "table": (300, 1024), "heads": (256, 8, 64)}


def base(dtype=ml_dtypes.bfloat16):
    """Matrices, and what is left as it is."""
    rng = np.random.default_rng(0)
    made = {k: rng.standard_normal(shape).astype(dtype) for k, shape in SHAPES.items()}
    return made | {"norms": np.ones((80, 512), dtype), "count": np.int32(3)}


def rule(codec, **more):
    """A rule for all, also for what is small."""
    return [oo.Rule(".*", codec=codec, min_bytes=0, **more)]


def assert_same(got, want):
    """Equal parts in one structure, and equal kinds of memory."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    kinds = [
        [x.sharding.memory_kind for x in jax.tree.leaves(tree)] for tree in (got, want)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "codec", quick_of([(name,) for name in NAMES], {("nf4-double",)})
)
def test_wherever_they_come_from(codec, tmp_path, monkeypatch):
    """NumPy's, mapped files, transposed views, arrays of the device and of the host."""
    monkeypatch.setattr(by_parts, "PART_VALUES", 2**14)
    given = base()
    want = oo.place(given, rule(codec))
    for name, shape in SHAPES.items():
        assert isinstance(want[name], Encoded)
        assert (want[name].shape, want[name].dtype) == (shape, jnp.bfloat16)
        assert want[name].codes.sharding.memory_kind == "pinned_host"
        fits = codec_of(codec).fitting(given[name])
        parts = jax.jit(lambda x, fits=fits: Encoded.of(x, fits, ""))(given[name])
        jax.tree.map(np.testing.assert_array_equal, want[name], parts)
    assert isinstance(want["norms"], jax.Array)

    def mapped(name, x):
        file = np.memmap(tmp_path / name, x.dtype, "w+", shape=x.shape)
        file[:] = x
        file.flush()
        return np.memmap(tmp_path / name, x.dtype, "r", shape=x.shape)

    views = {k: np.array(x.T, order="C").T for k, x in given.items() if x.ndim}
    others = {
        "files": {k: mapped(k, x) for k, x in given.items() if x.ndim},
        "views": views,
        "device": jax.tree.map(jnp.asarray, given),
        "host": oo.place(given, oo.Rule(".*", min_bytes=0)),
    }
    for other in others.values():
        got = oo.place({**given, **other}, rule(codec))
        assert_same(got, want)


def test_no_more_than_a_part_is_on_the_device(monkeypatch):
    """Of a leaf of several parts, each is encoded and fetched before the next."""
    monkeypatch.setattr(by_parts, "PART_VALUES", 2**14)
    sizes = []
    encode = by_parts._encode

    def spy(codec, x):
        sizes.append(x.size)
        return encode(codec, x)

    monkeypatch.setattr(by_parts, "_encode", spy)
    given = base()
    oo.place(given, rule("nf4"))
    assert max(sizes) <= 2**14
    assert sum(sizes) == sum(given[name].size for name in SHAPES)


def test_progress_is_in_the_log(monkeypatch, caplog):
    """As of a long transfer."""
    monkeypatch.setattr(by_parts, "PART_VALUES", 2**14)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1)
    with caplog.at_level(logging.INFO, "optax_offload"):
        oo.place(base(), rule("nf4"))
    assert caplog.messages
    assert all(re.match(r"place: \d+\.\d of 0\.0 GiB", m) for m in caplog.messages)


def test_they_rest_where_the_rule_says():
    """On the device too, and a rule that keeps a part on the device keeps all of it."""
    placed = oo.place(base(), [oo.Rule(".*", "device", codec="nf4")])
    assert isinstance(placed["table"], Encoded)
    assert placed["table"].codes.sharding.memory_kind == "device"


def test_templates_give_templates():
    """Of the same structure, types and memories: to compile before files are read."""
    want = oo.place(base(), rule("nf4-double"))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), base())
    got = oo.place(structs, rule("nf4-double"))

    def seen(tree):
        return [
            (x.shape, x.dtype, x.sharding.memory_kind) for x in jax.tree.leaves(tree)
        ]

    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert seen(got) == seen(want)


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, "x"), P("x")], ids=str)
def test_each_device_has_its_shards_codes(codec, spec):
    """Of an array that is sharded, and of NumPy's beside one."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = np.random.default_rng(0).standard_normal((4, 128, 1024)).astype(np.float32)
    one = oo.place({"w": x}, rule(codec))["w"]
    for kind in ("device", "pinned_host"):
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        sharded = jax.device_put(x, sharding)
        for given in (sharded, x):
            state = {"w": given, "like": {"w": jnp.zeros_like(sharded)}}
            if given is x and kind == "pinned_host":
                continue
            node = oo.place(state, [oo.Rule("w", codec=codec, min_bytes=0)])["w"]
            shard = sharding.shard_shape(x.shape)
            for part, whole in zip(
                jax.tree.leaves(node), jax.tree.leaves(one), strict=True
            ):
                np.testing.assert_array_equal(part, whole)
                assert part.sharding.memory_kind == "pinned_host"
                here = part.sharding.shard_shape(part.shape)
                assert here[:2] == shard[:2]
                if part.ndim == 3:
                    assert here[2] * x.shape[2] == shard[2] * part.shape[2]


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("spec", [P(None, "x", "y"), P("x", ("y",))], ids=str)
def test_explicit_sharding(codec, spec):
    """Types say how each part is sharded, and what is decoded of them."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    values = np.random.default_rng(0).standard_normal((4, 128, 8, 128), np.float32)
    with jax.set_mesh(mesh):
        x = jax.device_put(values, NamedSharding(mesh, spec))
        node = oo.place({"w": x}, rule(codec))
        one = oo.place({"w": values}, rule(codec))
        fn = oo.jit(lambda tree: 2 * tree["w"])
        got = fn(node)
        np.testing.assert_array_equal(got, fn(one))
    assert node["w"].codes.sharding.spec[:2] == got.sharding.spec[:2]
    assert got.sharding.is_equivalent_to(x.sharding, 4)


def test_other_codecs_and_none():
    """What is encoded is encoded otherwise, or decoded, by other rules."""
    nf4 = oo.place(base(), rule("nf4"))
    assert oo.place(nf4, rule("nf4"))["table"].codes is nf4["table"].codes
    plain = oo.place(nf4, oo.Rule(".*", min_bytes=0))
    assert plain["table"].sharding.memory_kind == "pinned_host"
    jax.tree.map(np.testing.assert_array_equal, plain, oo.low_bit_decode(nf4))
    assert_same(oo.place(nf4, rule("nf4-double")), oo.place(plain, rule("nf4-double")))


def test_values_that_are_not_finite():
    """All such leaves are named, of NumPy and of JAX."""
    given = base()
    given["table"][5, 3] = np.nan
    given["stacked"][1, 2, 3] = np.inf
    for tree in (given, jax.tree.map(jnp.asarray, given)):
        with pytest.raises(ValueError, match="'stacked', 'table': values that are inf"):
            oo.place(tree, rule("nf4"))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((128, 96)), "'w' cannot be nf4: 64 does not divide its last axis, 96"),
        (np.ones((128, 512), int), "'w' cannot be nf4: int64 is no floating type"),
    ],
)
def test_leaves_that_cannot_be(x, message):
    """What is large and cannot be encoded is an error that says how to leave it out."""
    with pytest.raises(ValueError, match=message + r"\nGive them a rule of their own"):
        oo.place({"w": x}, rule("nf4"))
    rules = [oo.Rule("w", min_bytes=0), oo.Rule(".*", codec="nf4", optional=True)]
    assert oo.place({"w": x.astype(np.float32)}, rules)["w"].shape == x.shape


def test_blocks_that_shards_would_cut():
    """An error, as of blocks that do not divide the axis."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((128, 256)), NamedSharding(mesh, P(None, "x")))
    with pytest.raises(
        ValueError, match="64 does not divide its last axis, 32 on each"
    ):
        oo.place({"w": x}, rule("nf4"))


def test_of_float64():
    """As JAX takes it, without a warning: in float32, where that is its widest."""
    x = base(np.float64)["table"]
    got, want = (oo.place({"w": x.astype(d)}, rule("nf4")) for d in (float, np.float32))
    assert_same(got, want)


def test_codes_that_were_restored_without_a_template():
    """They are not taken for weights, and the error says how to restore them."""
    codes, scales = np.zeros((128, 128), np.uint16), np.ones((128, 8), np.float32)
    restored = {"w": {"codes_nf4_512": codes, "scales": scales}}
    with pytest.raises(ValueError, match=r"'w/codes_nf4_512': codes of .* no template"):
        oo.place(restored, rule("nf4"))


@pytest.mark.parametrize("codec", NAMES)
def test_not_for_state(codec):
    """Wherever its rules are given."""
    params = {"w": jnp.ones((128, 512))}
    state = optax.adam(1e-3).init(params)
    told = f"codec '{codec}' in the rule of '.*', which is for frozen parameters"
    for make in (oo.offload, oo.low_bit):
        with pytest.raises(ValueError, match=re.escape(told)):
            make(optax.adam(1e-3), oo.Rule(".*", codec=codec))
    with pytest.raises(ValueError, match=f"codec is '{codec}', which is for frozen"):
        oo.low_bit(optax.adam(1e-3), ".*", codec=codec)
    with pytest.raises(ValueError, match="codec of frozen parameters, for '0/mu/w', "):
        oo.place(state, rule(codec))


def test_of_a_whole_train_state():
    """Under the path of its parameters."""
    params = {"w": np.ones((128, 512), np.float32)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init({"a": jnp.ones(3)})}
    placed = oo.place(state, rule("nf4"), under="params")
    assert isinstance(placed["params"]["w"], Encoded)
