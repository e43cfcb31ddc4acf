"""Equations for a row, apart from what moves the row."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from small_jaxprs import closed_of, load, names, on_device, on_host, program_of
from small_jaxprs import store as to_host

from optax_offload._places import memory
from optax_offload._program import is_transfer, variables
from optax_offload._rows import RowLocal, kernel_of

STACK = (4, 3)


def rows_of(fn, *types):
    """All equations of a function of stacks, as rows."""
    program = program_of(fn, *types)
    every = [*program.invars, *(v for e in program.equations for v in e.outvars)]
    axes = {v: 0 for v in every if v.aval.shape}
    return RowLocal(
        tuple(program.equations),
        STACK[0],
        axes,
        tuple(program.invars),
        tuple(variables(program.outvars)),
    )


def momentum(m, g):
    """State that is loaded, and stored."""
    new = 0.9 * load(m) + g
    return to_host(new), -new


def test_a_kernel_moves_nothing():
    """All that it takes and gives is on the device, whose names the step has."""
    rows = rows_of(momentum, on_host(*STACK), on_device(*STACK))
    kernel = kernel_of(rows)
    assert not any(map(is_transfer, kernel.rows.equations))
    assert names(kernel.rows.equations) == ["mul", "add", "neg"]
    taken = [*kernel.rows.inputs, *kernel.rows.outputs]
    assert not any(memory.on_host(v.aval) for v in taken)
    assert kernel.sources == rows.inputs
    assert kernel.targets == rows.outputs


def test_a_kernel_computes_what_it_did():
    """Each input and output is that of its source and target."""
    rows = rows_of(momentum, on_host(*STACK), on_device(*STACK))
    kernel = kernel_of(rows)
    info = closed_of(lambda: ()).jaxpr.debug_info
    jaxpr = kernel.rows.jaxpr(2, info)
    m, g = np.ones((2, 3), np.float32), np.full((2, 3), 4, np.float32)
    new, negative = jax.core.eval_jaxpr(jaxpr, (), m, g)
    np.testing.assert_allclose(new, 4.9, rtol=1e-6)
    np.testing.assert_allclose(negative, -4.9, rtol=1e-6)


def test_what_is_loaded_twice_is_taken_once():
    """Two loads of one value are one input of the kernel."""
    rows = rows_of(lambda m: load(m) + jnp.sin(load(m)), on_host(*STACK))
    kernel = kernel_of(rows)
    (taken,) = kernel.rows.inputs
    assert names(kernel.rows.equations) == ["sin", "add"]
    assert all(taken in e.invars for e in kernel.rows.equations)


def test_what_is_stored_and_loaded_again():
    """Between both it never leaves the device."""

    def fn(m, g):
        stored = to_host(load(m) + g)
        return stored, load(stored) * 2.0

    kernel = kernel_of(rows_of(fn, on_host(*STACK), on_device(*STACK)))
    plus, times = kernel.rows.equations
    assert times.invars[0] is plus.outvars[0] is kernel.rows.outputs[0]


def test_what_is_not_moved_stays():
    """Without transfers the kernel is the equations."""
    rows = rows_of(lambda m: m * 2.0, on_device(*STACK))
    kernel = kernel_of(rows)
    assert names(kernel.rows.equations) == ["mul"]
    assert kernel.rows.inputs == rows.inputs
    assert kernel.rows.outputs == rows.outputs
    assert kernel.sources == rows.inputs
