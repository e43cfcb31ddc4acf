"""What moved state, by what is known about it: the two likeliest causes come first."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._ground.errors import Evidence, causes

RESTORED, ANOTHER = "a checkpoint restored", "state that the init of another"
SHARDINGS, PUT = "in_shardings or out_shardings", "a device_put in the trainer"


@pytest.mark.parametrize(
    ("known", "first", "second"),
    [
        ({}, RESTORED, ANOTHER),
        ({"made": "eagerly"}, RESTORED, SHARDINGS),
        ({"made": "traced", "on_mesh": True}, SHARDINGS, RESTORED),
        ({"made": "eagerly", "on_mesh": True}, RESTORED, PUT),
        ({"on_mesh": True, "of_nnx": True}, "an eager with_sharding", RESTORED),
        ({"made": "eagerly", "of_nnx": True}, RESTORED, "an eager with_sharding"),
        ({"made": "traced", "was_on_host": True}, SHARDINGS, RESTORED),
        ({"made": "traced", "in_body": True}, "arrays in host memory", RESTORED),
        ({"mapped": True, "in_body": True}, "jax.pmap", RESTORED),
    ],
)
def test_the_likeliest_come_first(known, first, second):
    """With their fixes; the other six are named."""
    lines = causes(Evidence(**known)).splitlines()
    for line, what in zip(lines[1:], (first, second), strict=False):
        assert line.startswith(f"- {what}")
        assert ": " in line
    assert lines[3].count(";") == 5


def move(state):
    """State as a trainer's own shardings have it."""
    return jax.device_put(jax.device_get(state), jax.devices()[0])


def cause(tx, state, params, wrap=jax.jit):
    """The first cause of the error of an update."""
    with pytest.raises(oo.MemoryKindError) as error:
        wrap(tx.update)(params, state, params)
    return str(error.value).splitlines()[1]


def test_structs_of_jax_have_no_memory_kinds():
    """Whoever lowers a step with them is told which have some."""
    params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32)}
    tx = oo.offload(optax.adam(1e-3))
    step = oo.jit(tx.update)
    with pytest.raises(oo.MemoryKindError, match=r"use optax_offload\.eval_shape\n"):
        step.lower(params, jax.eval_shape(tx.init, params), params)
    step.lower(params, oo.eval_shape(tx.init, params), params)


def test_evidence_of_an_optimizer():
    """Whether its init ran, and whether an update had its state on the host before."""
    params = {"w": jnp.ones((256, 128))}
    tx = oo.offload(optax.adam(1e-3))
    state = optax.adam(1e-3).init(params)
    assert RESTORED in cause(tx, state, params)
    jax.jit(tx.update)(params, tx.init(params), params)
    assert SHARDINGS in cause(tx, move(tx.init(params)), params)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, state))
    assert "pmap" in cause(tx, stacked[1], stacked[0], jax.pmap)


def test_evidence_of_nnx():
    """On a mesh in Auto mode, where NNX moves what its optimizer's init made."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.ones, jax.NamedSharding(mesh, P("x")))
    model = nnx.Linear(256, 128, kernel_init=init, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, oo.offload(optax.adam(1e-3)), wrt=nnx.Param)
    with pytest.raises(oo.MemoryKindError) as error:
        oo.jit(lambda model, optimizer: optimizer.update(model, model))(
            model, optimizer
        )
    first = str(error.value).splitlines()[1]
    assert "Flax NNX on a mesh in Auto mode" in first
    assert "optax_offload.place(optimizer, rules, under='opt_state')" in first
