"""Calls of jitted functions around what rests on the host."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_jaxprs import closed_of, names, on_device, on_host

from optax_offload._program.jits import around


def mesh_of(kind=AxisType.Auto):
    """Two devices in a row."""
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


def call_of(fn, *types):
    """The equation of a call."""
    (e,) = closed_of(fn, *types).jaxpr.eqns
    return e


def test_a_call_without_shardings_is_its_body():
    """The body is evaluated on the values as they are."""
    e = call_of(jax.jit(jnp.sin), on_device(4))
    equations = closed_of(lambda x: around(lambda x: [x * 2], e, [x]), on_device(4))
    assert names(equations.jaxpr.eqns) == ["mul"]


def test_shardings_of_a_jit_constrain():
    """Both what goes in and what comes out."""
    sharding = jax.NamedSharding(mesh_of(), P("d"))
    fn = jax.jit(jnp.sin, in_shardings=sharding, out_shardings=sharding)
    e = call_of(lambda x: fn(x), on_device(4))
    jaxpr = closed_of(lambda x: around(lambda x: [x * 2], e, [x]), on_device(4)).jaxpr
    wanted = "sharding_constraint"
    assert names(jaxpr.eqns) == [wanted, "mul", wanted]
    for constraint in (jaxpr.eqns[0], jaxpr.eqns[2]):
        assert constraint.params["sharding"].spec == P("d")


def test_what_rests_on_the_host_is_not_constrained():
    """A sharding of a jit is one of the device: a value at rest stays where it is."""
    sharding = jax.NamedSharding(mesh_of(), P("d"))
    fn = jax.jit(lambda x: x, in_shardings=sharding, out_shardings=sharding)
    e = call_of(lambda x: fn(x), on_device(4))
    jaxpr = closed_of(lambda x: around(lambda x: [x], e, [x]), on_host(4)).jaxpr
    assert names(jaxpr.eqns) == []
    assert jaxpr.outvars == jaxpr.invars


@pytest.mark.parametrize("number", [0, 1])
def test_only_what_has_a_sharding_is_constrained(number):
    """One of two arguments may have one."""
    sharding = jax.NamedSharding(mesh_of(), P("d"))
    given = (sharding, None) if number == 0 else (None, sharding)
    fn = jax.jit(lambda x, y: (x, y), in_shardings=given)
    e = call_of(lambda x, y: fn(x, y), on_device(4), on_device(4))
    jaxpr = closed_of(
        lambda x, y: around(lambda x, y: [x, y], e, [x, y]), on_device(4), on_device(4)
    ).jaxpr
    (constraint,) = jaxpr.eqns
    assert constraint.invars == [jaxpr.invars[number]]
