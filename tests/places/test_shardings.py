"""`state_shardings`: a trainer's shardings, with the kinds that `offload` gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from flax.training.train_state import TrainState
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._ground import trees
from optax_offload._places import memory

RULES = ".*/(mu|nu)/.*"
AXIS_RULES = [("embed", "x"), ("mlp", None)]
# Of float32: the kernel is 128 KiB, and the bias, of 512 bytes, is under `min_bytes`.
IN, OUT = 256, 128


def make_bare(tx):
    """A state of dictionaries."""
    params = {"dense": {"kernel": jnp.ones((IN, OUT)), "bias": jnp.ones(OUT)}}
    return {"params": params, "opt_state": tx.init(params)}


def make_linen(tx, partitioning):
    """A Flax linen state, its kernel boxed."""
    model = nn.Dense(
        OUT, kernel_init=partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    )
    params = model.init(jax.random.key(0), jnp.ones((2, IN)))["params"]
    return TrainState.create(apply_fn=nn.Dense.__call__, params=params, tx=tx)


def make_nnx(tx, metadata):
    """A Flax nnx state, its kernel with metadata."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), metadata)
    model = nnx.Linear(IN, OUT, kernel_init=init, rngs=nnx.Rngs(0))
    return nnx.state((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


@pytest.fixture
def tx():
    """Adam, its moments in host memory."""
    return oo.offload(optax.adam(1e-3), RULES)


def specs_of(shapes):
    """As EasyLM and others make them: by the names of leaves."""
    return jax.tree.map(lambda x: P("x") if x.ndim == 2 else P(), shapes)


def kinds(tree):
    """The memory kinds of a tree of shardings or arrays, by path."""
    return {p: memory.memory_kind_of(x) for p, x in trees.leaves_with_paths(tree)}


FORMS = {
    "named shardings": lambda make, mesh: {
        "shardings": jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs_of(jax.eval_shape(make))
        )
    },
    "specs and a mesh": lambda make, mesh: {
        "shardings": specs_of(jax.eval_shape(make)),
        "mesh": mesh,
    },
    "those of the parameters": lambda make, mesh: {
        "shardings": {
            "params": specs_of(jax.eval_shape(make)["params"]),
            "opt_state": None,
        },
        "mesh": mesh,
    },
    "structs": lambda make, mesh: {
        "shardings": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=NamedSharding(mesh, P("x") if x.ndim == 2 else P()),
            ),
            jax.eval_shape(make),
        )
    },
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_trainer_has(tx, form, axis_type):
    """Each form gives the same shardings, and a jitted init with them the kinds."""
    mesh = mesh_of(axis_type=axis_type)
    make = functools.partial(make_bare, tx)
    got = oo.state_shardings(make, **FORMS[form](make, mesh))
    assert jax.tree.structure(got) == jax.tree.structure(jax.eval_shape(make))
    mu = got["opt_state"][0].mu["dense"]
    assert (mu["kernel"].spec, mu["kernel"].memory_kind) == (P("x"), "pinned_host")
    assert (mu["bias"].spec, mu["bias"].memory_kind) == (P(), "device")
    assert got["params"]["dense"]["kernel"] == NamedSharding(
        mesh, P("x"), memory_kind="device"
    )
    state = jax.jit(make, out_shardings=got)()
    assert kinds(state) == kinds(got)
    oo.memory_report(state, RULES, under="opt_state").check()


def test_min_bytes_count(tx):
    """What README said before put leaves onto the host that `offload` leaves."""
    make = functools.partial(make_bare, tx)
    plain = jax.tree.map(lambda x: NamedSharding(mesh_of(), P()), jax.eval_shape(make))
    by_hand = oo.set_memory_kind(plain, "opt_state/" + RULES, "pinned_host")
    state = jax.jit(make, out_shardings=by_hand)()
    with pytest.raises(oo.MemoryKindError, match=r"bias: planned device, is pinned"):
        oo.memory_report(state, RULES, under="opt_state").check()
    got = oo.state_shardings(make, shardings=by_hand)
    state = jax.jit(make, out_shardings=got)()
    oo.memory_report(state, RULES, under="opt_state").check()


def test_steps_stay_in_place(tx):
    """As ``in_shardings`` and ``out_shardings`` of a step, over three steps."""
    mesh = mesh_of()
    make = functools.partial(make_bare, tx)
    shardings = oo.state_shardings(
        make, shardings=specs_of(jax.eval_shape(make)), mesh=mesh
    )

    def step(state):
        grads = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    step = jax.jit(
        step, in_shardings=(shardings,), out_shardings=shardings, donate_argnums=0
    )
    state = jax.jit(make, out_shardings=shardings)()
    for _ in range(3):
        state = step(state)
    assert kinds(state) == kinds(shardings)


def test_the_optimizer_alone(tx):
    """With abstract parameters, and nothing said: moments go like them."""
    sharding = NamedSharding(mesh_of(), P("x"))
    params = {"w": jax.ShapeDtypeStruct((IN, OUT), jnp.float32, sharding=sharding)}
    got = oo.state_shardings(tx.init, params)
    assert got[0].mu["w"] == sharding.with_memory_kind("pinned_host")
    assert got[0].count.is_fully_replicated


def test_a_prefix_of_one(tx):
    """One spec for all of it."""
    params = {"w": jnp.ones((IN, OUT)), "b": jnp.ones(OUT)}
    got = oo.state_shardings(tx.init, params, shardings=P(), mesh=mesh_of())
    assert kinds(got) == {
        "0/count": "device",
        "0/mu/b": "device",
        "0/mu/w": "pinned_host",
        "0/nu/b": "device",
        "0/nu/w": "pinned_host",
    }


def test_a_mesh_that_is_set(tx):
    """Its specs need no other."""
    params = {"w": jnp.ones((IN, OUT))}
    with jax.set_mesh(mesh_of()):
        got = oo.state_shardings(tx.init, params, shardings=P())
    assert got[0].mu["w"].mesh.size == 4


@pytest.mark.parametrize(
    "partitioning", [nn.with_partitioning, nn.with_logical_partitioning]
)
@pytest.mark.parametrize(
    "given", ["metadata", "specs", "boxes", "boxed shardings", "shardings"]
)
def test_linen_boxes(tx, partitioning, given):
    """A box is one sharding, which fits the state with its boxes and without them."""
    mesh = mesh_of()
    make = functools.partial(make_linen, tx, partitioning)
    abstract = jax.eval_shape(make)
    shardings = {
        "metadata": None,
        "specs": nn.get_partition_spec(abstract),
        "boxes": abstract,
        "boxed shardings": jax.tree.map(
            lambda x: NamedSharding(mesh, P("x", None) if x.ndim == 2 else P()),
            abstract,
        ),
        "shardings": spmd.logical_to_mesh_sharding(
            nn.get_partition_spec(abstract), mesh, AXIS_RULES
        ),
    }[given]
    got = oo.state_shardings(
        make, shardings=shardings, mesh=mesh, axis_rules=AXIS_RULES
    )
    mu = got.opt_state[0].mu
    assert mu["kernel"] == NamedSharding(mesh, P("x", None), memory_kind="pinned_host")
    assert mu["bias"].memory_kind == "device"
    state = jax.jit(make, out_shardings=got)()
    assert kinds(nn.unbox(state)) == kinds(got)
    moved = jax.device_put(nn.unbox(state), got)
    assert kinds(moved) == kinds(got)


def test_boxes_that_bring_their_mesh(tx):
    """And need no other."""
    partitioning = functools.partial(nn.with_partitioning, mesh=mesh_of(2))
    make = functools.partial(
        make_linen, tx, lambda init, _: partitioning(init, ("x", None))
    )
    got = oo.state_shardings(make)
    assert got.params["kernel"].mesh.size == 2
    assert got.opt_state[0].nu["kernel"].spec == P("x", None)


def test_what_is_asked_for_decides_before_what_a_box_says(tx):
    """The mesh, the rules of axes, and shardings, of which a box then need not know."""
    own = functools.partial(nn.with_partitioning, mesh=mesh_of(2))
    make = functools.partial(make_linen, tx, lambda init, _: own(init, ("x", None)))
    got = oo.state_shardings(make, mesh=mesh_of(4))
    assert got.params["kernel"].mesh.size == 4
    own = functools.partial(nn.with_logical_partitioning, rules=[("embed", None)])
    make = functools.partial(make_linen, tx, own)
    got = oo.state_shardings(make, mesh=mesh_of(), axis_rules=AXIS_RULES)
    assert got.params["kernel"].spec == P("x", None)
    make = functools.partial(make_linen, tx, nn.with_partitioning)
    got = oo.state_shardings(make, shardings=P(), mesh=mesh_of())
    assert got.params["kernel"].spec == P(), "the axes of the box are of no mesh"


def test_rules_that_are_set(tx):
    """`nn.logical_axis_rules` counts, as it does for Flax."""
    make = functools.partial(make_linen, tx, nn.with_logical_partitioning)
    with nn.logical_axis_rules(AXIS_RULES):
        got = oo.state_shardings(make, mesh=mesh_of())
    assert got.params["kernel"].spec == P("x", None)


@pytest.mark.parametrize("metadata", [("x", None), ("embed", "mlp")])
def test_nnx_variables(tx, metadata):
    """The metadata of variables, which `nnx.Optimizer` copies for moments."""
    mesh = mesh_of()
    make = functools.partial(make_nnx, tx, metadata)
    # NNX shards what it makes by itself, for which it asks for the mesh and the rules.
    with jax.set_mesh(mesh), nnx.logical_axis_rules(AXIS_RULES):
        got = oo.state_shardings(make)
        state = jax.jit(make, out_shardings=got)()
    by_path = kinds(got)
    assert by_path["1/opt_state/0/mu/kernel"] == "pinned_host"
    assert by_path["1/opt_state/0/mu/bias"] == "device"
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True))
    assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in pairs)
    assert {s.spec for x, s in pairs if x.shape == (IN, OUT)} == {P("x", None)}


def test_metadata_that_does_not_fit():
    """Adafactor's rows and columns are in the boxes of the kernels they are of."""
    tx = oo.offload(optax.adafactor(1e-3), oo.Rule(".*", min_bytes=8))
    make = functools.partial(make_linen, tx, nn.with_partitioning)
    got = oo.state_shardings(make, mesh=mesh_of(), axis_rules=AXIS_RULES)
    assert got.params["kernel"].spec == P("x", None)
    state = jax.jit(make, out_shardings=got)()
    assert kinds(nn.unbox(state)) == kinds(got)


def test_a_template_for_orbax(tx, tmp_path):
    """What it returns is what a template of Orbax takes."""
    ocp = pytest.importorskip("orbax.checkpoint")
    make = functools.partial(make_bare, tx)
    got = oo.state_shardings(
        make, shardings=specs_of(jax.eval_shape(make)), mesh=mesh_of()
    )
    template = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(make),
        got,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", make())
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", template)
    assert kinds(restored) == kinds(got)


def test_init_does_not_run(tx):
    """It is traced: nothing comes of it."""
    runs = []

    def make():
        jax.debug.callback(lambda: runs.append(1))
        return make_bare(tx)

    oo.state_shardings(make, shardings=P(), mesh=mesh_of())
    jax.effects_barrier()
    assert not runs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"shardings": P()},
            ValueError,
            r"no mesh is known, for '0/count', '0/mu/w', '0/nu/w'\. Give mesh=mesh",
        ),
        (
            {"shardings": P("embed"), "mesh": True},
            ValueError,
            r"does not have: '0/count' \(P.*'embed'.*the mesh has \('x',\)\).*"
            r"'0/nu/w'.*give axis_rules=",
        ),
        (
            {"shardings": "x", "mesh": True},
            TypeError,
            r"are not shardings: '0/count' \(str\), .*Allowed are a jax",
        ),
        ({"shardings": {"w": P()}, "mesh": True}, ValueError, "not a tree prefix"),
        ({"mesh": "x"}, TypeError, "mesh is 'x'; it must be a jax.sharding.Mesh"),
    ],
)
def test_errors(tx, arguments, error, message):
    """What came, which leaves, and what to give."""
    arguments = dict(arguments)
    if arguments.get("mesh") is True:
        arguments["mesh"] = mesh_of()
    with pytest.raises(error, match=message):
        oo.state_shardings(tx.init, {"w": np.ones((IN, OUT))}, **arguments)
