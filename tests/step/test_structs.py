"""Structs that stand for the arguments of a call: as the arrays themselves."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mistyped
from jax.experimental.layout import Format
from small_steps import train_step
from step_forms import loss_fn

import optax_offload as oo
from optax_offload._places import memory

TX = oo.offload(optax.adamw(1e-3), oo.Rule(".*", min_bytes=64))


step = train_step(TX, loss_fn, value=True)


def arguments(at_rest):
    """Those of a call, on one device, with some parameters at rest on the host."""
    layers = jnp.linspace(-0.1, 0.1, 3 * 16 * 16).reshape(3, 16, 16)
    params = {"layers": layers, "head": jnp.ones((16, 16))}
    params = jax.device_put(params, jax.devices()[0])
    if at_rest:
        params = oo.set_memory_kind(params, at_rest, "pinned_host")
    return params, TX.init(params), jnp.ones((2, 16))


def structs(tree):
    """Structs as most people make them; shardings are of a single device."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def kinds(tree):
    """The memory kind of each leaf, of arrays or of shardings."""
    return [memory.memory_kind_of(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("at_rest", "fuse"), [("layers", True), (".*", False)])
def test_a_step_compiled_from_structs(at_rest, fuse):
    """It is the step that a call compiles, and calls itself with its results."""
    jitted = oo.jit(step, donate_argnums=(0, 1), fuse=fuse)
    args = arguments(at_rest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = jitted.lower(*structs(args)).compile()
    assert str(jitted.schedule(*structs(args))) == str(jitted.schedule(*args))
    assert kinds(compiled.output_shardings[:2]) == kinds(args[:2])
    got, want = args, arguments(at_rest)
    for _ in range(2):
        got = (*compiled(*got)[:2], args[2])
        want = (*jitted(*want)[:2], args[2])
        assert kinds(got) == kinds(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_where_results_of_structs_are():
    """`trace` and `eval_shape`, of the step and of this library."""
    jitted, args = oo.jit(step), arguments("layers")
    here, there = (jitted.trace(*a).jaxpr.out_avals for a in (args, structs(args)))
    assert [*map(memory.kind_of_type, there)] == [*map(memory.kind_of_type, here)]
    assert [*map(memory.kind_of_type, there)][:-1] == kinds(args[:2])
    assert jitted.eval_shape(*structs(args)) == jitted.eval_shape(*args)
    for fn in (jitted, lambda *args: args):
        assert oo.eval_shape(fn, *structs(args)) == oo.eval_shape(fn, *args)


def test_an_update_described_by_structs():
    """Parameters that it loads count, whatever stands for them."""
    params, _, _ = arguments(".*")
    assert str(TX.schedule(structs(params))) == str(TX.schedule(params))


def test_structs_keep_what_else_they_say():
    """Layouts and weak types; structs that say nothing are the same objects."""
    host = jax.device_put(jnp.ones((4, 8)), jax.devices()[0])
    host = oo.set_memory_kind(host, "", "pinned_host")
    layout = jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=host.format)
    weak = jax.ShapeDtypeStruct(
        host.shape, host.dtype, sharding=host.sharding, weak_type=True
    )
    plain = jax.ShapeDtypeStruct(host.shape, host.dtype)
    a, b, c = memory.as_placed((layout, weak, plain))
    assert a.format == Format(host.format.layout, a.sharding)
    assert b.weak_type
    assert c is plain
    tree = {"x": plain, "y": (host, None, 3)}
    assert memory.as_placed(tree) is tree
    assert memory.on_host(a)
    assert memory.on_host(b)


def test_arrays_that_jax_types_wrongly():
    """A call says that they do not stay on the host, once, and what to do (F28).

    State is taken from where it is, whatever its type.
    """
    params, state, x = arguments("layers")
    given = mistyped(params)
    assert not memory.on_host(given["layers"])
    jitted = oo.jit(step, donate_argnums=())
    with pytest.warns(oo.OffloadWarning, match=r"arguments '0/0/layers' are in host"):
        new, _, _ = jitted(given, mistyped(state), x)
    assert new["layers"].sharding.memory_kind == "device"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(given, mistyped(state), x)
        new, _, _ = jitted(oo.place(given, given), state, x)
    assert new["layers"].sharding.memory_kind == "pinned_host"
