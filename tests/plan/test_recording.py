"""Which state a step factory's optimizers have."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_factories import HEAD, MIB, STACK, adam_step

import optax_offload as oo
from optax_offload import aot
from optax_offload._plan.recording import record
from optax_offload._plan.step import StepFactory

H100 = aot.Target("h100")


def test_state_is_recorded_from_init():
    """Its paths are those that rules see, without the chain around it."""
    (found,) = record(StepFactory(adam_step, H100))
    assert [(x.path, x.nbytes) for x in found.state] == [
        ("0/count", 4),
        ("0/mu/head", HEAD),
        ("0/mu/layers", STACK),
        ("0/nu/head", HEAD),
        ("0/nu/layers", STACK),
    ]
    assert found.parameter_bytes == STACK + HEAD
    assert [x.stacked for x in found.state] == [False, False, True, False, True]


def test_state_of_an_nnx_optimizer_is_found_among_the_arguments():
    """By paths without boxes, which are those that rules see in its updates."""

    def make_step(offload, target):
        def make():
            model = nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, offload(optax.adam(1.0)), wrt=nnx.Param)

        rows = NamedSharding(target.mesh(("x",)), P("x"))
        state = jax.tree.map(
            lambda x: x.update(sharding=rows) if x.ndim else x,
            oo.eval_shape(lambda: nnx.state(make())),
        )
        return oo.Step(lambda state: state, (state,))

    (found,) = record(StepFactory(make_step, aot.Target("h100:4")))
    nbytes = 256 * 256 * 4
    sizes = {x.path: (x.nbytes, x.nbytes_per_device) for x in found.state}
    assert sizes["0/mu/kernel"] == sizes["0/nu/kernel"] == (nbytes, nbytes // 4)


def test_leaves_are_counted_as_the_arguments_are_sharded():
    """Each device's share, and the first axis that it has whole."""
    (found,) = record(StepFactory(adam_step, aot.Target("h100:4")))
    sizes = {x.path: (x.nbytes_per_device, x.slice_axis) for x in found.state}
    assert sizes["0/mu/layers"] == (STACK // 4, 0)
    assert sizes["0/mu/head"] == (HEAD // 4, 0)
    assert sizes["0/count"] == (4, None)


def test_an_axis_that_is_sharded_is_not_sliced():
    """Rows that are sharded are not sliced along; of what is sharded whole nothing."""
    target = aot.Target("h100:4")

    def make_step(offload, target):
        mesh = target.mesh(("x", "y"), shape=(2, 2))
        specs = {"rows": P("x"), "both": P("x", "y"), "columns": P(None, "y")}
        params = {
            name: jax.ShapeDtypeStruct(
                (512, 512), jnp.float32, sharding=NamedSharding(mesh, spec)
            )
            for name, spec in specs.items()
        }
        tx = offload(optax.sgd(1.0, momentum=0.9))
        return oo.Step(lambda *x: x, (params, oo.eval_shape(tx.init, params)))

    (found,) = record(StepFactory(make_step, target))
    axes = {x.path.split("/")[-1]: x.slice_axis for x in found.state}
    assert axes == {"rows": 1, "both": None, "columns": 0}


def test_arguments_without_shardings_are_on_every_device():
    """As `aot.compile` takes them."""

    def make_step(offload, target):
        params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        tx = offload(optax.adam(1.0))
        return oo.Step(lambda *x: x, (params, jax.eval_shape(tx.init, params)))

    (found,) = record(StepFactory(make_step, aot.Target("h100:4")))
    assert {x.nbytes_per_device for x in found.state} == {4, MIB}


def plain(offload, target):
    """Uses no optimizer."""
    return oo.Step(lambda x: x, (jnp.ones(3),))


def never_initialised(offload, target):
    """Wraps an optimizer, and makes no state."""
    offload(optax.adam(1.0))
    return plain(offload, target)


def no_step(offload, target):
    """Returns a tuple."""
    return (lambda x: x), (jnp.ones(3),)


@pytest.mark.parametrize(
    ("make_step", "error", "message"),
    [
        (plain, ValueError, "does not call its first argument: what it makes has to"),
        (never_initialised, ValueError, r"does not call init .*oo\.eval_shape"),
        (
            no_step,
            TypeError,
            r"returns an optax_offload\.Step\(fn, args, \.\.\.\)",
        ),
    ],
)
def test_factories_that_are_none(make_step, error, message):
    """What is missing, and what to write."""
    with pytest.raises(error, match=message):
        record(StepFactory(make_step, H100))
