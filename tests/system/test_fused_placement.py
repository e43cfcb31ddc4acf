"""Steps that say where values are: in host memory, or sharded over devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from scanned_models import DONATED, offloaded

import optax_offload as oo
from benchmarks.common.differences import ulps

BOUND = 8
HOST = oo.Rule(".*", min_bytes=64)
LAYERS = jnp.linspace(-0.3, 0.3, 4 * 16 * 16).reshape(4, 16, 16)
NEVER = "1 gradient of 1.00 KiB never on the device whole"


def as_plain(make, tx, params, said=NEVER, fuse: Any = "auto"):
    """Compares a fused step with the plain one: values, memory kinds and shardings."""
    # JAX cannot make zeros like an array in host memory.
    state = tx.init(oo.set_memory_kind(params, ".*", "device"))
    args = (params, state, jnp.ones((8, 16)))
    want = jax.jit(make(tx))(*args)
    step = oo.jit(make(tx), late_gradients=fuse)
    assert said in str(step.schedule(*args))
    got = step(*args)
    assert ulps(got, want) <= BOUND
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.sharding.memory_kind == y.sharding.memory_kind
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
    ("fuse", "checkpointed"), [("host", False), ("recompute", True)]
)
def test_parameters_in_host_memory(fuse, checkpointed):
    """They are loaded in the scan's body, so that gradients are typed as of the host.

    One equation moves a tree of them, one leaf keeps them in host memory.
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def layer(h, w):
        w = jax.device_put(w, device)
        return jnp.tanh(h @ w["kernel"] + w["bias"][None]), None

    body = jax.checkpoint(layer) if checkpointed else layer

    def make(tx):
        def step(params, state, x):
            def loss(p):
                return jnp.mean(lax.scan(body, x, jax.device_put(p, host))[0] ** 2)

            grads = jax.device_put(jax.grad(loss)(params), device)
            norm = optax.tree.norm(grads)
            params = jax.device_put(params, device)
            updates, state = tx.update(grads, state, params)
            new = jax.device_put(optax.apply_updates(params, updates), host)
            return new, state, norm

        return step

    params = {"kernel": LAYERS, "bias": jnp.zeros((4, 16))}
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    params = oo.set_memory_kind(params, ".*", "pinned_host")
    said = "2 gradients of 4.25 KiB never on the device whole"
    as_plain(make, tx, params, said, fuse)


def on_mesh(kind):
    """The parameters on a mesh, and what gives a value another sharding there."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])

    def put(x, *spec):
        to = jax.NamedSharding(mesh, jax.P(*spec))
        if kind is AxisType.Auto:
            return lax.with_sharding_constraint(x, to)
        return jax.sharding.reshard(x, to)

    sharded = jax.NamedSharding(mesh, jax.P(None, "x", None))
    return mesh, jax.device_put(LAYERS, sharded), put


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ((None, "x", None), NEVER),
        (("x", None, None), "along the axis of the rows needs all of it at once"),
        ((None, None, "x"), NEVER),
    ],
)
def test_constraints_of_shardings(kind, spec, said):
    """Each row is sharded so, and the result too; but rows are not spread."""
    mesh, params, put = on_mesh(kind)

    def make(tx):
        def step(params, state, x):
            def layer(h, w):
                return jnp.tanh(h @ put(w, None, None)), None

            loss = lambda p: jnp.mean(lax.scan(layer, x, p)[0] ** 2)  # noqa: E731
            grads = put(jax.grad(loss)(params), None, "x", None)
            updates, state = tx.update(grads, state, params)
            return put(optax.apply_updates(params, updates), *spec), state

        return step

    with jax.set_mesh(mesh):
        as_plain(make, offloaded(optax.adam(1e-2)), params, said)


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (optax.adam(1e-2), "a row in 2 parts"),
        (optax.MultiSteps(optax.adam(1e-2), 2), "its state is kept in some steps"),
    ],
    ids=["window", "kept"],
)
def test_new_state_that_a_step_constrains(inner, said):
    """It is still the update's: with its window, and moved where that moves it."""
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    params = jnp.full((4, 16, 256), 0.1, jnp.float32)
    tx = oo.offload(inner, HOST, window_bytes=2**14)

    def constrained(x):
        space = jax.typeof(x).memory_space
        kind = "pinned_host" if space is jax.memory.Space.Host else "device"
        to = jax.NamedSharding(mesh, jax.P(), memory_kind=kind)
        return lax.with_sharding_constraint(x, to)

    def step(params, state, x):
        def loss(p):
            return jnp.mean(
                lax.scan(lambda h, w: (jnp.tanh(h @ w @ w.T), None), x, p)[0]
            )

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        new = optax.apply_updates(params, updates)
        return jax.tree.map(constrained, (new, state))

    args = params, tx.init(params), jnp.ones((8, 16))
    assert said in str(oo.jit(step, **DONATED).schedule(*args))
