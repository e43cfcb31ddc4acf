"""What rests on the host and is taken inside of `jax.shard_map`, against plain."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_close
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_steps import train_step

import optax_offload as oo
from optax_offload import aot

DEVICES, LAYERS, WIDTH = 4, 3, 8
RULE = oo.Rule(".*", min_bytes=8)


def layers(layer, remat=False):
    """A scan over layers."""
    body = jax.checkpoint(layer) if remat else layer
    return lambda w, x: lax.scan(lambda h, w: (body(h, w), None), x, w)[0]


def dense(h, w):
    """A layer."""
    return jnp.tanh(h @ w)


def indexed(w, x):
    """Something that differs by device."""
    return layers(dense)(w, x * (1 + lax.axis_index("d")))


def normed(h, w):
    """A statistic of the local batch."""
    return h @ w / jnp.sqrt(jnp.mean(h * h))


# What each device does, how its parameters are sharded, and its results; more of them.
CASES = {
    "experts": (layers(lambda h, w: dense(h, w[0])), P(None, "d"), P("d"), {}),
    "experts, summed": (
        layers(lambda h, w: jnp.tanh(jnp.einsum("bi,eij->bj", h, w)), remat=True),
        P(None, "d"),
        P("d"),
        {},
    ),
    "statistic": (layers(normed), P(), P("d"), {"check_vma": False}),
    "mean": (lambda w, x: lax.pmean(layers(dense)(w, x), "d"), P(), P(), {}),
    "index": (indexed, P(), P("d"), {}),
    "gathered": (
        layers(lambda h, w: dense(h, lax.all_gather(w, "d", axis=1, tiled=True))),
        P(None, None, "d"),
        P("d"),
        {},
    ),
}
MESHES = {
    "Auto": (AxisType.Auto, True),
    "Auto, not set": (AxisType.Auto, False),
    "Explicit": (AxisType.Explicit, True),
}


def mesh_of(kind):
    """A mesh, and the context that it is used in."""
    axis_type, is_set = MESHES[kind]
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(axis_type,), devices=devices)
    return mesh, jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def values(mesh, spec, experts=False):
    """Parameters and a batch."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, *(DEVICES,) * experts, WIDTH, WIDTH)
    w = jnp.asarray(rng.standard_normal(shape) / 3, jnp.float32)
    x = jnp.asarray(rng.standard_normal((8, WIDTH)), jnp.float32)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return put(w, spec), put(x, P("d"))


def check_step(make, w, x, steps=2):
    """A step with everything at rest, against one with everything on the device."""
    tx = optax.sgd(0.1, momentum=0.9)
    ours = oo.offload(tx, RULE)
    rest = oo.set_memory_kind(jnp.copy(w), "", "pinned_host")
    plain, step = jax.jit(make(tx)), oo.jit(make(ours))
    want, got = (w, tx.init(w)), (rest, ours.init(rest))
    for _ in range(steps):
        want, got = plain(*want[:2], x), step(*got[:2], x)
    assert_close(got, want, rtol=1e-7)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(got[:2])}
    assert kinds == {"pinned_host"}
    return step.schedule(rest, ours.init(rest), x)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in CASES for k in MESHES if k == "Auto" or n in ("experts", "mean")],
)
def test_models(name, kind):
    """Rows of each device's shard are loaded in its scan, forward and in a step."""
    fn, spec, out, more = CASES[name]
    mesh, context = mesh_of(kind)
    w, x = values(mesh, spec, "experts" in name)
    specs = {"in_specs": (spec, P("d")), "out_specs": out, **more}
    model = jax.shard_map(fn, mesh=mesh, **specs)
    with context:
        rest = oo.set_memory_kind(w, "", "pinned_host")
        np.testing.assert_array_equal(oo.jit(model)(rest, x), jax.jit(model)(w, x))
        assert "of rows in each iteration" in str(oo.jit(model).schedule(rest, x))
        loss = lambda w, x: jnp.mean(model(w, x) ** 2)  # noqa: E731
        schedule = check_step(lambda tx: train_step(tx, loss, value=True), w, x)
    assert "of rows in each iteration" in str(schedule)
    assert "loaded whole" not in str(schedule)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("spec", [P(), P(None, None, "d")], ids=str)
def test_an_update_inside(kind, spec):
    """State and parameters come out of it where they rest."""
    mesh, context = mesh_of(kind)
    w, x = values(mesh, spec)

    def loss(w, x):
        whole = w if spec == P() else lax.all_gather(w, "d", axis=2, tiled=True)
        return jnp.mean(layers(dense)(whole, x) ** 2) / DEVICES

    def make(tx):
        def local(w, state, x):
            w, state, value = train_step(tx, loss, value=True)(w, state, x)
            return w, state, lax.psum(value, "d")

        taken, made = (spec, spec, P("d")), (spec, spec, P())
        return jax.shard_map(local, mesh=mesh, in_specs=taken, out_specs=made)

    with context:
        schedule = check_step(make, w, x)
    reason = (
        "not fused, and streams its state where it is: the update is in a shard_map"
    )
    assert reason in str(schedule)


SPREADS = {
    "gathered row by row": (P(None, None, "d"), P()),
    "spread row by row": (P(), P(None, "d")),
    "gathered whole": (P("d"), P()),
}


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [*((name, 1) for name in SPREADS), ("gathered row by row", 2)],
)
def test_parameters_that_are_sharded_otherwise(name, microbatches):
    """In Auto mode JAX reshards what a `shard_map` takes, so rows are resharded too."""
    has, taken = SPREADS[name]
    mesh, context = mesh_of("Auto")
    w, x = values(mesh, P())
    w = jax.device_put(jnp.concatenate([w, w[:1]]), NamedSharding(mesh, has))

    def local(w, x):
        whole = lax.all_gather(w, "d", axis=1, tiled=True) if taken != P() else w
        return layers(dense, remat=True)(whole, x)

    specs = {"in_specs": (taken, P("d")), "out_specs": P("d")}
    model = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)

    def loss(w, x):
        each = x.reshape(microbatches, -1, WIDTH)
        return lax.map(lambda x: jnp.mean(model(w, x) ** 2), each).mean()

    with context:
        check_step(lambda tx: train_step(tx, loss, value=True), w, x, steps=1)


def test_a_jit_inside_constrains_what_it_did():
    """Where it is entered for the rows in it, its shardings constrain values."""
    mesh, context = mesh_of("Auto")
    w, x = values(mesh, P())
    over = [NamedSharding(mesh, spec) for spec in (P(), P("d"), P(None, "d"))]
    model = jax.jit(layers(dense), in_shardings=over[:2], out_shardings=over[2])
    step = oo.jit(lambda w, x: 2 * model(w, x))
    rest = oo.set_memory_kind(w, "", "pinned_host")
    with context:
        text = step.lower(rest, x).as_text()
        np.testing.assert_allclose(step(rest, x), 2 * model(w, x), atol=1e-5)
    assert "of rows in each iteration" in str(step.schedule(rest, x))
    assert len(re.findall(r'sharding_constraint %\w+ <@\w+, \[{"d"}, {}\]>', text)) == 1
    assert len(re.findall(r'sharding_constraint .* <@\w+, \[{}, {"d"}\]>', text)) == 1


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "has"),
    [
        pytest.param(t, has, marks=pytest.mark.xdist_group(t))
        for t in ("h100:4", "v5e:2x2")
        for has in (P(), P(None, None, "x"))
    ],
)
def test_rows_on_chips(target, has):
    """Copy engines move rows, whole parameters are nowhere, and nothing on a host."""
    target = aot.Target(target)
    mesh = target.mesh(axis_types=(AxisType.Auto,))
    model = jax.shard_map(
        layers(dense), mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")
    )
    sharding = NamedSharding(mesh, has, memory_kind="pinned_host")
    shape = (8, 512, 512)
    w = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct(
        (64, 512), jnp.float32, sharding=NamedSharding(mesh, P("x"))
    )
    compiled = aot.compile(oo.jit(model), w, x, target=target)
    row = 512 * 512 * 4
    assert aot.peak(compiled).peak_bytes < 5 * row
    moved = aot.transfers(compiled)
    assert all(t.nbytes <= row and "copy engine" in str(t) for t in moved)
    assert not aot.host_computations(compiled)
