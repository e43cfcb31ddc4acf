"""Stacks of which a TPU moves no row, since it is no whole tile: they move whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_steps import train_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._emit import streamed
from optax_offload._places import memory, tpu_layout
from optax_offload._places.step_options import Options
from optax_offload._schedule import for_tpu
from optax_offload._step import streaming

LAYERS, WIDTH = 8, 128


@pytest.mark.parametrize(
    ("shape", "dtype", "row", "part"),
    [
        ((8, 64, 256), "float32", True, True),
        ((8, 64, 256), "bfloat16", True, True),
        ((8, 256), "float32", True, False),
        ((8, 256), "bfloat16", False, False),
        ((8, 256), "int8", False, False),
        ((8, 3, 256), "bfloat16", False, False),  # Its layers are the rows of tiles.
        ((8, 4), "float32", False, False),  # They are the lanes.
        ((8,), "float32", False, False),
    ],
)
def test_rows_that_move(shape, dtype, row, part):
    """What compilers for a v5e said (F24)."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    aval = jax.core.ShapedArray(x.shape, x.dtype)
    assert tpu_layout.row_moves(aval, 0) is row
    assert tpu_layout.part_of_row_moves(aval, 0) is part


def layer(h, w):
    """A layer with a matrix, a vector and a number."""
    h = h * w["scale"].astype(h.dtype)[None] + w["shift"].astype(h.dtype)
    return h + jnp.tanh(h) @ w["w"].astype(h.dtype), None


def loss(params, x):
    """Of checkpointed layers under a scan."""
    h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean(h.astype(jnp.float32) ** 2)


def twice(params, x):
    """Of microbatches, in each of which the layers are scanned."""

    def one(total, x):
        return total + loss(params, x), None

    return jax.lax.scan(one, 0.0, x.reshape(2, -1, WIDTH))[0]


def parameters(dtype, layers=LAYERS):
    """Stacked layers, and a matrix beside them."""
    keys = jax.random.split(jax.random.key(0), 3)
    made = {
        "w": jax.random.normal(keys[0], (layers, WIDTH, WIDTH)) / 12,
        "scale": 1 + jax.random.normal(keys[1], (layers, WIDTH)) / 9,
        "shift": jax.random.normal(keys[2], (layers,)),
    }
    return {"layers": jax.tree.map(lambda x: x.astype(dtype), made)}


TX = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}


def traced(step, args, **asked):
    """The plan of a step, its arguments and the structure of its results."""
    return streaming.traced(step, args, {}, Options(**asked))


def whole(plan):
    """The stacks that a TPU would have to move row by row."""
    return plan.whole_on_tpu


@pytest.mark.parametrize(
    ("tx", "loss", "at_rest"),
    [
        ("adam", loss, True),
        ("clipped", loss, True),
        ("clipped", loss, False),
        ("adam", twice, True),
    ],
    ids=["adam", "clipped", "state alone", "microbatches"],
)
def test_numbers_of_the_plan(tx, loss, at_rest):
    """What a TPU is given, run here: the same as others are given."""
    params = parameters(jnp.bfloat16)
    tx = oo.offload(TX[tx], oo.Rule(".*", min_bytes=1))
    state = tx.init(params)
    if at_rest:
        params = oo.set_memory_kind(params, ".*", "pinned_host")
    x = jax.random.normal(jax.random.key(1), (16, WIDTH))
    args = params, state, x
    step = train_step(tx, loss, value=True)
    plan, values, _ = traced(step, args, late_gradients="host", residuals="host")
    shapes = {v.aval.shape for v in whole(plan)}
    assert shapes >= {(LAYERS, WIDTH), (LAYERS,)}
    assert "on a TPU" in str(plan)
    ours = for_tpu(plan, (), plan.step.program.constants)
    assert not whole(ours)
    # What has whole tiles for rows is fused as before.
    matrices = [{v for v in taken(p) if len(v.aval.shape) == 3} for p in (ours, plan)]
    assert len(matrices[0]) == len(matrices[1])
    assert bool(matrices[0]) == (loss is not twice)
    assert not any(v.aval.shape in shapes for v in taken(ours))
    given = jax.jit(lambda *values: streamed(ours, values))(*values)
    want = jax.jit(lambda *values: streamed(plan, values))(*values)
    kinds = [[memory.memory_kind_of(x) for x in some] for some in (given, want)]
    assert kinds[0] == kinds[1]
    for a, b in zip(given, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)


def taken(plan):
    """What updates that are fused take from the host."""
    return [
        v
        for each in plan.scans
        for f in each.fused
        for v in f.rows.inputs
        if memory.on_host(v.aval)
    ]


def test_residuals_of_small_rows():
    """They stay on the device, between scans that would move rows of theirs."""

    def of_vectors(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.sin(h) * w, None), x, params)
        return jnp.sum(h.astype(jnp.float32))

    params = jnp.linspace(0.5, 1.5, LAYERS, dtype=jnp.bfloat16)
    args = params, jnp.linspace(0.0, 3.0, 2**13, dtype=jnp.bfloat16)
    plan, values, _ = traced(jax.grad(of_vectors), args, residuals="host")
    assert (LAYERS, 2**13) in {v.aval.shape for v in whole(plan)}
    ours = for_tpu(plan, (), plan.step.program.constants)
    assert not whole(ours)
    given, want = (jax.jit(lambda *x, p=p: streamed(p, x)[0]) for p in (ours, plan))
    np.testing.assert_allclose(
        *(np.asarray(f(*values), np.float32) for f in (given, want)), rtol=2e-2
    )


def test_a_plan_without_small_rows_is_as_it_was():
    """Of float32 vectors on one device."""
    params = parameters(jnp.float32)
    del params["layers"]["shift"]

    def loss(params, x):
        def layer(h, w):
            return h + jnp.tanh(h * w["scale"][None]) @ w["w"], None

        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    tx = oo.offload(TX["adam"], oo.Rule(".*", min_bytes=1))
    args = params, tx.init(params), jnp.ones((16, WIDTH))
    plan, _, _ = traced(train_step(tx, loss, value=True), args)
    assert plan.scans
    assert for_tpu(plan, (), {}) is plan
    assert "on a TPU" not in str(plan)


@pytest.mark.aot
@pytest.mark.xdist_group("tpu")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (AxisType.Auto, jnp.float32),
        pytest.param(None, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(None, jnp.float32, marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_a_tpu(kind, dtype):
    """Where what is before the layers has XLA shard the vectors themselves."""
    target = aot.Target("v5e:2x2")
    mesh = None if kind is None else target.mesh(axis_types=kind)
    width = 4 * WIDTH

    def struct(*shape, spec=(), dtype=dtype):
        sharding = mesh and NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {
        "embedding": struct(256, width),
        "layers": {
            "w": struct(LAYERS, width, width, spec=(None, None, "x")),
            "scale": struct(LAYERS, width),
            "shift": struct(LAYERS),
        },
    }

    def explicit(h, w):
        scale = jax.sharding.reshard(w["scale"], P("x"))
        h = jax.sharding.reshard(h * scale[None] + w["shift"], P(None, None))
        y = jnp.einsum("bi,ij->bj", h, w["w"], out_sharding=P(None, "x"))
        return jnp.tanh(y), None

    def of_tokens(params, tokens):
        is_explicit = kind == AxisType.Explicit
        spread = {"out_sharding": P(None, "x")} if is_explicit else {}
        h = params["embedding"].at[tokens].get(**spread)
        body = jax.checkpoint(explicit if is_explicit else layer)
        return jnp.mean(jax.lax.scan(body, h, params["layers"])[0] ** 2)

    tx = oo.offload(TX["adam"], oo.Rule(".*", min_bytes=1))
    state = oo.eval_shape(tx.init, params)
    params = oo.set_memory_kind(params, "layers/.*", "pinned_host")
    tokens = struct(1024, dtype=jnp.int32)
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    step = oo.stream(train_step(tx, of_tokens, value=True), residuals="host")
    out = (*where, NamedSharding(mesh, P())) if mesh else None
    with jax.sharding.use_abstract_mesh(mesh or target.mesh()):
        compiled = aot.compile(
            step,
            *(params, state, tokens),
            target=target,
            donate_argnums=(0, 1),
            out_shardings=out,
        )
    assert aot.host_computations(compiled) == ()
