"""What compilers make of an update on the host, which the library does not use.

The findings are F70 to F74. A test that fails has found a compiler that does otherwise:
docs/how-it-works.md says what that would change.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Layout, with_layout_constraint

from optax_offload import aot

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SHAPE, LEAF = (2048, 2048), 2**24
on_host = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
pytestmark = [pytest.mark.aot, pytest.mark.slow]


def momentum(g, mu):
    """An optimizer: the new moment, and the update."""
    mu = 0.9 * mu + 0.1 * g
    return mu, -0.1 * mu


def hosted(g, mu):
    """An update on the host. A GPU's compiler wants its operands' layout (F26)."""
    g = with_layout_constraint(g, Layout((0, 1)))
    where = {"compute_type": "device_host", "out_memory_spaces": (HOST, DEVICE)}
    update: Any = on_host(momentum, **where)
    return update(jax.device_put(g, HOST), mu)


def compiled(step, name, *shapes):
    """The program of a step of gradients and moments, whose moments are donated."""
    target = aot.Target(name)

    def struct(shape, kind):
        place = jax.NamedSharding(target.mesh(), jax.P(), memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    grads = [struct(shape, None) for shape in shapes]
    moments = [struct(shape, "pinned_host") for shape in shapes]
    return aot.compile(step, grads, moments, target=target, donate_argnums=1)


def one_leaf(grads, moments):
    """One host computation."""
    return hosted(grads[0], moments[0])


def in_order(grads, moments):
    """Each update after the one before, which a value on the device says."""
    results, done = [], None
    for g, mu in zip(grads, moments, strict=True):
        if done is not None:
            g, _ = lax.optimization_barrier((g, done))
        mu, done = hosted(g, mu)
        results.append((mu, done))
    return [mu for mu, _ in results], [u for _, u in results]


def tied_on_the_host(grads, moments):
    """The second update after the first, which only new state in host memory says."""
    first, u = hosted(grads[0], moments[0])
    second, first = lax.optimization_barrier((moments[1], first))
    second, v = hosted(grads[1], second)
    return [first, second], [u, v]


def by_rows(grads, moments):
    """A loop that slices state for each host computation."""

    def body(n, carry):
        mu, u = carry

        def cut(x):
            return lax.dynamic_slice_in_dim(x, 256 * n, 256)

        def paste(x, row):
            return lax.dynamic_update_slice_in_dim(x, row, 256 * n, 0)

        rows = hosted(cut(grads[0]), cut(mu))
        return paste(mu, rows[0]), paste(u, rows[1])

    return lax.fori_loop(0, 8, body, (moments[0], jnp.zeros_like(grads[0])))


def test_a_gpu_copies_new_state_and_a_tpu_writes_it_in_place():
    """F70: buffers of their own, and a copy within host memory; or an alias."""
    gpu, tpu = compiled(one_leaf, "h100", SHAPE), compiled(one_leaf, "v5e", SHAPE)
    assert aot.peak(gpu).host_temporary_bytes == 2 * LEAF  # The gradient, new state.
    copies = [t.nbytes for t in aot.transfers(gpu) if t.direction == "host copy"]
    assert copies == [LEAF]
    assert aot.peak(tpu).host_temporary_bytes == 0
    assert "output_to_operand_aliasing" in (tpu.as_text() or "")


def test_no_order_of_updates_bounds_what_a_gpu_copies():
    """F70: the copies are the last instructions of the program."""
    shapes = [(1024 * n, 2048) for n in (2, 5, 3, 4)]
    gpu = aot.peak(compiled(in_order, "h100", *shapes))
    assert gpu.host_temporary_bytes > 0.6 * gpu.host_argument_bytes
    tpu = aot.peak(compiled(in_order, "v5e", *shapes))
    assert tpu.host_temporary_bytes == 0


def test_updates_tied_by_a_host_value_are_joined():
    """F71: the second computation takes the operands of the first as well."""

    def operands(program):
        calls = re.findall(r"custom-call-start\((.*?)\)", program.as_text())
        return [call.count("%") for call in calls]

    assert operands(compiled(in_order, "h100", SHAPE, SHAPE)) == [2, 2]
    assert operands(compiled(tied_on_the_host, "h100", SHAPE, SHAPE))[-1] > 2


@pytest.mark.parametrize("chip", ["h100", "v5e"])
def test_rows_of_state_go_through_the_device(chip):
    """F72: they are loaded for the host computation, and stored after it."""
    moved = aot.transfers(compiled(by_rows, chip, SHAPE))
    forms = {(t.direction, t.form) for t in moved if t.shape == SHAPE}
    assert forms == {("load", "dynamic-slice"), ("store", "dynamic-update-slice")}


def test_borrowed_memory_is_not_updated_in_place():
    """F74: the CPU backend makes new memory for what DLPack lent it."""
    update = jax.jit(lambda mu, g: 0.9 * mu + 0.1 * g, donate_argnums=0)
    owner, g = jnp.zeros((1024, 1024)), jnp.ones((1024, 1024))
    view, before = jax.dlpack.from_dlpack(owner), owner.unsafe_buffer_pointer()
    assert view.unsafe_buffer_pointer() == before
    assert update(view, g).unsafe_buffer_pointer() != before
    assert update(owner, g).unsafe_buffer_pointer() == before
