"""Saving and restoring: what belongs on the host is there, and never on the device."""

import functools
import pickle
from typing import Any

import flax.serialization
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo

ocp = pytest.importorskip("orbax.checkpoint")
ocp_v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")

RULES = oo.Rule(r".*/(mu|nu)/.*", min_bytes=8)
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
OFFLOADED = optax.chain(
    optax.clip_by_global_norm(1.0), oo.offload(optax.adam(1e-2), RULES)
)


class Linen(nn.Module):
    """With statistics, and one kernel that says how it is sharded."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="first")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("x", None))
        return nn.Dense(8, kernel_init=init, name="second")(x)


class State(TrainState):
    batch_stats: Any


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.second = nnx.Linear(32, 8, kernel_init=init, rngs=rngs)


def make_linen(tx):
    """A TrainState with batch statistics."""
    model = Linen()
    variables = model.init(jax.random.key(0), jnp.zeros((2, 16)))
    return State.create(
        apply_fn=Linen.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )


def make_nnx(tx):
    """The state of a model and of its optimizer."""
    model = Nnx(nnx.Rngs(0))
    return nnx.state((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


def make_bare(tx):
    """A tree of dicts."""
    params = {"layers_9": jnp.ones((40, 16)), "layers_10": jnp.ones((3, 16, 8))}
    return {"params": params, "opt_state": tx.init(params)}


MAKERS = {"linen": make_linen, "nnx": make_nnx, "bare": make_bare}


def shardings_of(form, make, mesh):
    """As Flax says from its metadata; of bare states by their first axis."""
    if form == "linen":
        return nn.get_sharding(jax.eval_shape(make), mesh)
    if form == "nnx":
        return nnx.get_named_sharding(jax.eval_shape(make), mesh)
    return jax.tree.map(
        lambda x: NamedSharding(
            mesh, P("x") if x.ndim and x.shape[0] % 4 == 0 else P()
        ),
        jax.eval_shape(make),
    )


@functools.lru_cache
def state_and_template(form, tx, devices):
    """A state, and the template that was made without it."""
    make = functools.partial(MAKERS[form], tx)
    mesh = harness.mesh_of(devices)
    with jax.set_mesh(mesh):  # nnx asks for it where there is metadata
        template = oo.eval_shape(make, out_shardings=shardings_of(form, make, mesh))
        shardings = jax.tree.map(lambda x: x.sharding, template)
        state = jax.jit(make, out_shardings=shardings)()
    # Zeros would hide a leaf that was mixed up with another.
    leaves, structure = jax.tree.flatten(state)
    numbered = [
        jax.device_put(np.full(x.shape, i, x.dtype), x.sharding)
        for i, x in enumerate(leaves, start=1)
    ]
    return jax.tree.unflatten(structure, numbered), template


def places(tree):
    """The shape, dtype and sharding of each leaf."""
    return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]


@pytest.fixture
def placed(monkeypatch):
    """The bytes that are put into each memory kind, as they are put."""
    totals = {}
    device_put = jax.device_put

    def put(x, *args, **kwargs):
        y = device_put(x, *args, **kwargs)
        if not isinstance(x, np.ndarray):
            return y
        kind = y.sharding.memory_kind
        totals[kind] = totals.get(kind, 0) + y.nbytes
        return y

    monkeypatch.setattr(jax, "device_put", put)
    return totals


def standard(path, state):
    """Saves with Orbax's StandardCheckpointer."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)

    def restore(*template):
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, *template)

    return restore


def manager(path, state):
    """Saves with Orbax's CheckpointManager."""
    with ocp.CheckpointManager(path) as m:
        m.save(1, args=ocp.args.StandardSave(state))

    def restore(*template):
        with ocp.CheckpointManager(path) as m:
            return m.restore(1, args=ocp.args.StandardRestore(*template))

    return restore


def v1(path, state):
    """Saves with Orbax's newer interface."""
    ocp_v1.save(path, state)
    return lambda *template: ocp_v1.load(path, *template)


# Each saves, and returns what restores.
LIBRARIES = {"StandardCheckpointer": standard, "CheckpointManager": manager, "v1": v1}


@pytest.mark.parametrize(
    ("form", "library", "devices"),
    [
        *((form, library, 4) for form in MAKERS for library in LIBRARIES),
        *(
            pytest.param(form, "v1", 1, marks=pytest.mark.accelerator)
            for form in MAKERS
        ),
    ],
)
def test_kinds_are_kept(form, library, devices, tmp_path, placed):
    """Every byte is put once, where it belongs."""
    state, template = state_and_template(form, OFFLOADED, devices)
    assert places(template) == places(state)
    assert harness.kinds_in(state) == {"device", "pinned_host"}
    restore = LIBRARIES[library](tmp_path / "state", state)
    placed.clear()
    restored = restore(template)
    report = oo.memory_report(restored)
    assert placed == report.totals_per_host
    assert places(restored) == places(state)
    # What a step is traced with: JAX can be of two minds about an array.
    assert [jax.typeof(x) for x in jax.tree.leaves(restored)] == [
        jax.typeof(x).update(weak_type=False) for x in jax.tree.leaves(state)
    ]
    assert harness.bits(restored) == harness.bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(template)


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize(("saved", "wanted"), [(ADAM, OFFLOADED), (OFFLOADED, ADAM)])
def test_offloaded_and_plain_are_interchangeable(form, saved, wanted, tmp_path, placed):
    """And on other meshes: four devices, then two."""
    state, _ = state_and_template(form, saved, 4)
    restore = standard(tmp_path / "state", state)
    other, template = state_and_template(form, wanted, 2)
    placed.clear()
    restored = restore(template)
    assert placed == oo.memory_report(restored).totals_per_host
    assert ("pinned_host" in harness.kinds_in(restored)) == (wanted is OFFLOADED)
    assert places(restored) == places(other)
    assert harness.bits(restored) == harness.bits(state)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(4, 2, marks=pytest.mark.slow), (1, 1)]
)
def test_training_goes_on(before, after, tmp_path):
    """Two plain steps, then two offloaded ones on fewer devices: as four plain."""

    def parameters(devices):
        if devices == 1:
            return harness.make_params()
        sharding = NamedSharding(harness.mesh_of(devices), P())
        return jax.device_put(harness.make_params(), sharding)

    plain = optax.adam(1e-2)
    offloaded = oo.offload(optax.adam(1e-2), RULES)
    params = parameters(before)
    want, _ = harness.run_updates(plain, params, plain.init(params), steps=4)
    start, _ = harness.run_updates(plain, params, plain.init(params), steps=2)
    _, *saved = start[-1]
    restore = standard(tmp_path / "state", saved)
    template = oo.eval_shape(lambda p: [offloaded.init(p), p], parameters(after))
    state, params = restore(template)
    oo.memory_report(state, RULES).check()
    got, compiled = harness.run_updates(offloaded, params, state, steps=2)
    assert harness.bits(got[-1]) == harness.bits(want[-1])
    assert compiled == 1
    oo.memory_report(got[-1][1], RULES).check()


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_without_a_template(library, tmp_path):
    """Orbax then puts all of it on the device. That is what the templates are for."""
    state, _ = state_and_template("bare", OFFLOADED, 1)
    restored = LIBRARIES[library](tmp_path / "state", state)()
    assert harness.kinds_in(restored) == {"device"}
    with pytest.raises(oo.MemoryKindError, match="0/mu/layers_10: planned pinn"):
        oo.memory_report(restored, RULES, under="opt_state/1").check()


@pytest.mark.parametrize("library", LIBRARIES)
def test_other_shapes(library, tmp_path):
    """An error of Orbax's that names both, and nothing padded or cut."""
    tx = oo.offload(optax.adam(1e-2), RULES)
    state = tx.init({"w": jnp.ones((16, 8))})
    restore = LIBRARIES[library](tmp_path / "state", state)
    for rows in (8, 32):
        template = oo.eval_shape(tx.init, {"w": jnp.ones((rows, 8))})
        with pytest.raises(
            ValueError, match=rf"\({rows}, 8\) is not compatible .* \(16, 8\)"
        ):
            restore(template)
    template = oo.eval_shape(tx.init, {"v": jnp.ones((16, 8))})
    with pytest.raises(ValueError, match="do not match"):
        restore(template)


def test_pytree_restore_takes_all_from_the_file(tmp_path):
    """Shapes and places, unless the template is given a second time."""
    state, template = state_and_template("bare", OFFLOADED, 1)
    standard(tmp_path / "state", state)
    restore_args = ocp.checkpoint_utils.construct_restore_args(template)
    with ocp.PyTreeCheckpointer() as checkpointer:
        alone = ocp.args.PyTreeRestore(template)
        with pytest.warns(UserWarning, match="Sharding info not provided"):
            restored = checkpointer.restore(tmp_path / "state", args=alone)
        assert harness.kinds_in(restored) == {"device"}
        both = ocp.args.PyTreeRestore(template, restore_args=restore_args)
        restored = checkpointer.restore(tmp_path / "state", args=both)
        assert places(restored) == places(state)


def replica_parallel(path, state):
    """Saves with each replica writing its part."""
    ocp_v1.save(path, state)


def one_replica(path, state):
    """Saves with one replica writing all."""
    saving = ocp_v1.options.ArrayOptions.Saving(use_replica_parallel=False)
    options = ocp_v1.options.ArrayOptions(saving=saving)
    with ocp_v1.Context(array_options=options):
        ocp_v1.save(path, state)


def one_replica_of_the_older_api(path, state):
    """Saves the same with Orbax's older interface."""
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))


@pytest.mark.parametrize(
    ("save", "through_the_device"),
    [
        (replica_parallel, True),
        (one_replica, False),
        (one_replica_of_the_older_api, False),
    ],
)
def test_saving_replicated_state(save, through_the_device, tmp_path, monkeypatch):
    """By default each replica saves a slice, and Orbax cuts it on the device."""
    sharding = NamedSharding(harness.mesh_of(4), P(), memory_kind="pinned_host")
    state = {"mu": jax.device_put(np.ones((256, 128), np.float32), sharding)}
    slices = []
    slice_in_dim = jax.lax.slice_in_dim

    def cut(*args, **kwargs):
        slices.append(slice_in_dim(*args, **kwargs))
        return slices[-1]

    monkeypatch.setattr(jax.lax, "slice_in_dim", cut)
    save(tmp_path / "state", state)
    assert bool(slices) == through_the_device
    assert harness.kinds_in(slices) <= {"device"}
    restored = ocp_v1.load(tmp_path / "state", state)
    assert harness.bits(restored) == harness.bits(state)


def through_bytes(state, template):
    """Writes with Flax's serialization and reads again."""
    if isinstance(state, nnx.State):  # which flax.serialization does not know
        state = jax.tree.leaves(state)
        leaves = through_bytes(state, jax.tree.leaves(template))
        return jax.tree.unflatten(jax.tree.structure(template), leaves)
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(state))


def through_pickle(state, template):
    """Writes with pickle and reads again."""
    # Flax's `apply_fn` and optax's functions cannot be pickled; the leaves can.
    leaves = pickle.loads(pickle.dumps(jax.device_get(jax.tree.leaves(state))))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize(("saved", "wanted"), [(ADAM, OFFLOADED), (OFFLOADED, ADAM)])
def test_bytes(form, saved, wanted):
    """NumPy arrays come back; one `jax.device_put` puts them in place."""
    state, _ = state_and_template(form, saved, 4)
    other, template = state_and_template(form, wanted, 2)
    shardings = jax.tree.map(lambda x: x.sharding, template)
    for through in (through_bytes, through_pickle):
        restored = jax.device_put(through(state, template), shardings)
        assert ("pinned_host" in harness.kinds_in(restored)) == (wanted is OFFLOADED)
        assert places(restored) == places(other)
        assert harness.bits(restored) == harness.bits(state)


def misplaced(state, template):
    """The paths of leaves that are not where a template has them."""
    return [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for (keys, x), y in zip(
            jax.tree_util.tree_flatten_with_path(state)[0],
            jax.tree.leaves(template),
            strict=True,
        )
        if x.sharding.memory_kind != y.sharding.memory_kind
        or not x.sharding.is_equivalent_to(y.sharding, x.ndim)
    ]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_flax_nnx_shards_eagerly(axis_type):
    """By its metadata, where a mesh is set; in Auto mode onto the device.

    Not so what is made under jit, with the shardings of a template.
    """
    mesh = harness.mesh_of(4, axis_type)
    make = functools.partial(make_nnx, OFFLOADED)
    with jax.set_mesh(mesh):
        model = Nnx(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OFFLOADED, wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        template = oo.eval_shape(make, out_shardings=shardings_of("nnx", make, mesh))
    assert len({x.sharding.spec for x in jax.tree.leaves(template)}) > 1
    if axis_type == AxisType.Explicit:
        assert misplaced(state, template) == []
        return
    moments = [f"1/opt_state/1/0/{name}/second/kernel/value" for name in ("mu", "nu")]
    assert misplaced(state, template) == moments
    shardings = jax.tree.map(lambda x: x.sharding, template)
    with jax.set_mesh(mesh):
        nnx.update((model, optimizer), jax.jit(make, out_shardings=shardings)())
    assert misplaced(nnx.state((model, optimizer)), template) == []
    oo.memory_report(nnx.state(optimizer), RULES, under="opt_state/1").check()
