"""`eval_shape` and the shardings that a template takes from its arguments."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._places import templates


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_template_has_shardings_and_kinds(axis_type):
    """Moments like their parameters, the counter replicated."""
    sharding = NamedSharding(mesh_of(4, axis_type), P("x"))
    params = {"w": jax.device_put(jnp.ones((256, 128)), sharding)}
    tx = oo.offload(optax.adam(1e-3))
    template = oo.eval_shape(tx.init, params)
    mu = template[0].mu["w"].sharding
    assert (mu.spec, mu.memory_kind) == (P("x"), "pinned_host")
    count = template[0].count.sharding
    assert count.is_fully_replicated
    assert count.memory_kind == "device"


def test_parameters_are_enough():
    """Of abstract ones too; a random key on one device says nothing of counters."""
    sharding = NamedSharding(mesh_of(4), P("x"))
    tx = oo.offload(optax.adam(1e-3), oo.Rule(".*", min_bytes=8))

    def make(params, key):
        noise, step = jax.random.normal(key), jnp.int32(0)
        return {"params": params, "tx": tx.init(params), "noise": noise, "step": step}

    params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
    template = oo.eval_shape(make, params, jax.random.key(0))
    adam, _ = template["tx"]
    assert template["params"]["w"].sharding == sharding
    for moment in (adam.mu, adam.nu):
        assert moment["w"].sharding == sharding.with_memory_kind("pinned_host")
    whole = NamedSharding(sharding.mesh, P(), memory_kind="device")
    for scalar in (template["step"], template["noise"], adam.count):
        assert scalar.sharding == whole


@pytest.mark.parametrize("devices", [1, 4])
def test_template_is_traced_as_on_the_host(devices):
    """So that a step lowered from it is the step that will run."""
    sharding = NamedSharding(mesh_of(4), P("x"))
    if devices == 1:
        sharding = SingleDeviceSharding(jax.devices()[0])
    params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)}
    tx = oo.offload(optax.adam(1e-3))
    template = oo.eval_shape(tx.init, params)
    lowered = jax.jit(tx.update).lower(params, template, params)
    _, out_state = lowered.compile().output_shardings
    assert out_state[0].mu["w"].memory_kind == "pinned_host"
    # With the state taken for a device value this would have warned.
    jax.make_jaxpr(tx.update)(params, template, params)


def assert_sharded(leaves, params):
    """Leaves of shapes at paths get the shardings beside them from parameters."""
    types = [
        (path, jax.ShapeDtypeStruct(shape, jnp.float32))
        for path, (shape, _) in leaves.items()
    ]
    like = templates.shardings_like(types, [params])
    assert like == [sharding for _, sharding in leaves.values()]


def test_moments_go_with_their_parameters():
    """By the longest tail of the path that has the same shape; scalars with none."""
    mesh = mesh_of(4)
    rows, columns, whole = (
        NamedSharding(mesh, P(*s)) for s in [("x",), (None, "x"), ()]
    )
    params = {
        "a": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows)},
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns),
        "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        "number": 3,
    }
    leaves = {
        "0/mu/a/w": ((8, 4), rows),
        "0/mu/b/w": ((8, 4), columns),
        "w": ((8, 4), columns),
        "0/row/a/w": ((8,), None),
        "0/count": ((), None),
        "0/mu/number": ((), None),
        "": ((8, 4), None),
    }
    assert_sharded(leaves, params)


def test_out_shardings_decide_first_and_name_no_kind():
    """A prefix of the result is enough; the kind is the function's."""
    mesh = mesh_of(4)
    rows = NamedSharding(mesh, P("x"))
    given = NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")
    template = oo.eval_shape(
        lambda w: {"a": w["w"] + 1, "b": [w["w"]] * 2},
        {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows)},
        out_shardings={"a": None, "b": given},
    )
    assert template["a"].sharding.spec == P()
    assert template["b"][0].sharding == given.with_memory_kind("device")
    assert template["b"][1].sharding.spec == P(None, "x")


def test_out_shardings_that_are_no_prefix():
    """JAX's words, after ours."""
    with pytest.raises(
        ValueError, match="out_shardings is not a tree prefix of what the"
    ):
        oo.eval_shape(lambda: {"a": jnp.ones(3)}, out_shardings={"b": None})


def test_out_shardings_that_are_no_shardings():
    """All leaves are named, with the line that mends it."""
    message = (
        r"not a jax\.sharding\.Sharding: 'a' \(P(artitionSpec)?\), 'b' \(str\)\. For a "
        r"PartitionSpec give jax\.NamedSharding\(mesh, spec\)"
    )
    with pytest.raises(TypeError, match=message):
        oo.eval_shape(
            lambda: {"a": jnp.ones(3), "b": jnp.ones(3)},
            out_shardings={"a": P("x"), "b": "x"},
        )


def test_out_shardings_of_a_part():
    """None leaves it to the library, and may be in the tree."""
    sharding = NamedSharding(mesh_of(4), P("x"))

    def make():
        return {"a": (jnp.ones(4), None, jnp.ones(8)), "b": [None, jnp.ones(3)]}

    template = oo.eval_shape(make, out_shardings={"a": sharding, "b": None})
    whole = NamedSharding(mesh_of(4), P())
    found = [x.sharding for x in jax.tree.leaves(template)]
    assert found == [sharding, sharding, whole]
    assert jax.tree.structure(template) == jax.tree.structure(make())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit, None])
def test_where_no_argument_says_a_sharding(axis_type):
    """The mesh that is set, or the first device; in Explicit mode the types say it."""

    def make():
        x = jnp.ones((8, 4))
        if axis_type == AxisType.Explicit:
            x = jax.sharding.reshard(x, P("x"))
        return oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=8)).init(x)

    mesh = axis_type and mesh_of(4, axis_type)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        template = oo.eval_shape(make)
    sharding = template[0].mu.sharding
    assert sharding.memory_kind == "pinned_host"
    assert sharding.device_set == set(jax.devices()[: 4 if mesh else 1])
    if mesh:
        spec = P("x", None) if axis_type == AxisType.Explicit else P()
        assert (sharding.mesh, sharding.spec) == (mesh, spec)
        assert template[0].count.sharding.mesh == mesh


def test_weak_types_stay():
    """A counter that gives way to other dtypes is restored as one."""
    template = oo.eval_shape(lambda: (jnp.asarray(1.0), jnp.ones(())))
    assert [x.weak_type for x in template] == [True, False]


def test_moments_go_with_parameters_whose_shardings_are_given():
    """Of the same result; where two parameters end alike and differ, with none."""
    mesh = mesh_of(4)
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))

    def make():
        params = {name: {"w": jnp.ones((8, 4))} for name in ("a", "b")}
        others = {"c": {"w": jnp.ones((8, 4))}, "d": {"w": jnp.ones(4)}}
        return {"params": params, "mu": [params], "others": others}

    given = {"params": {"a": rows, "b": columns}, "mu": None, "others": None}
    template = oo.eval_shape(make, out_shardings=given)
    assert template["mu"][0]["a"]["w"].sharding.spec == rows.spec
    assert template["mu"][0]["b"]["w"].sharding.spec == columns.spec
    assert template["others"]["c"]["w"].sharding.spec == P()
    assert template["others"]["d"]["w"].sharding.spec == P()


def test_parts_of_encoded_leaves_go_with_the_leaf():
    """Of its own shape but for the last axis; scales that it does not divide, whole."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    both, row = (NamedSharding(mesh, P(*s)) for s in [("x", "y"), ("x",)])
    params = {
        "w": jax.ShapeDtypeStruct((8, 256), jnp.float32, sharding=both),
        "v": jax.ShapeDtypeStruct((8, 512), jnp.float32, sharding=row),
    }
    leaves = {
        "0/mu/w/codes_int8": ((8, 128), both),
        "0/mu/w/scales": ((8, 3), row),
        "0/mu/v/scales": ((8, 2), row),
        "0/mu/w/step": ((), None),
        # Of another leaf, and of a longer one than there is.
        "0/row/w/codes_int8": ((4, 128), None),
        "0/long/w/codes_int8": ((8, 1024), None),
    }
    assert_sharded(leaves, params)


def test_state_is_gathered_as_its_own_parameter_is_sharded():
    """Not over what another one is sharded over; and is spread again."""
    mesh, seen = mesh_of(4, AxisType.Explicit), []
    rows, whole = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P(None, None))
    ones = jnp.ones((8, 4))
    params = {"a": jax.device_put(ones, rows), "b": jax.device_put(ones, whole)}
    state = {"mu": {name: jax.device_put(ones, rows) for name in params}}

    def update(updates, state, params):
        seen.append({k: jax.typeof(x).sharding.spec for k, x in state["mu"].items()})
        return updates, state

    def step(params, state):
        args = params, state, params
        return templates.gathered(update, args, state)(*args)

    _, new = jax.jit(step)(params, state)
    assert seen == [{"a": P("x", None), "b": P(None, None)}]
    assert {x.sharding.spec for x in new["mu"].values()} == {P("x", None)}
