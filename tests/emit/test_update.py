"""What carries out a schedule does what stands there, and gives the plain values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from updates import traced

from optax_offload._emit.update import Around, run
from optax_offload._ground import compat
from optax_offload._places import memory
from optax_offload._schedule import schedule


def parameters(*shapes):
    """Leaves of these shapes."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return {f"w{i}": jax.random.normal(k, s) for i, (k, s) in enumerate(pairs)}


def carried_out(tx, params, state, window_bytes=None, **options):
    """An update by its schedule, its results, and what the schedule is."""
    update = traced(tx, params, **options)
    planned = schedule(update, window_bytes)
    args = jax.tree.leaves((params, state, params))

    @jax.jit
    def fn(*args):
        placed = [
            memory.transfer(x, "pinned_host") if i.on_host else x
            for x, i in zip(args, update.inputs, strict=True)
        ]
        return run(update, planned, placed, Around({}, {}))

    return update, planned, fn(*args)


@pytest.mark.parametrize(
    ("shapes", "options", "stages"),
    [
        ([(8, 16)] * 3, {"in_place": False}, ["Alone"] * 3),
        ([(8, 16)] * 3, {}, ["Loop"]),
        ([(64, 256)] * 2, {"slice_axis": 0, "window_bytes": 2**17}, ["Loop"]),
        ([(97, 16, 256)], {"slice_axis": 0, "window_bytes": 2**20}, ["Loop"]),
    ],
    ids=["alone", "whole in a loop", "slices", "a last slice"],
)
def test_stages_give_the_plain_values(shapes, options, stages):
    """In each of the forms that a stage can have; stored where it has to be."""
    tx, params = optax.adam(1e-2), parameters(*shapes)
    state = tx.init(params)
    update, planned, results = carried_out(tx, params, state, **options)
    if compat.LOOPS_RUN_ONCE or "slice_axis" in options or "Alone" in stages:
        assert [type(stage).__name__ for stage in planned.stages] == stages
    if shapes == [(97, 16, 256)]:
        (loop,) = planned.loops
        (rest,) = loop.remainders
        assert rest.first + rest.rows == 97
    want = jax.tree.leaves(jax.jit(tx.update)(params, state, params))
    for output, got, plain in zip(update.outputs, results, want, strict=True):
        assert got.sharding.memory_kind == output.memory_kind
        np.testing.assert_allclose(got, plain, rtol=1e-6, atol=1e-7)


def test_scalars_on_the_host_are_loaded_before():
    """A counter that is on the host, and goes back there."""
    tx, params = optax.adam(1e-2), parameters((8, 16))
    state = tx.init(params)
    update, planned, results = carried_out(tx, params, state, scalars=True)
    assert len(planned.scalars) == 1
    counts = [
        x for o, x in zip(update.outputs, results, strict=True) if "count" in o.path
    ]
    assert [(int(x), x.sharding.memory_kind) for x in counts] == [(1, "pinned_host")]


def test_versions_run_by_their_predicate():
    """Finite gradients move the state, others keep it."""
    tx, params = optax.apply_if_finite(optax.adam(1e-2), 3), parameters((8, 16))
    state = tx.init(params)
    _, planned, results = carried_out(tx, params, state, path=".*(mu|nu).*")
    assert len(planned.straights()) == 2
    want = jax.tree.leaves(jax.jit(tx.update)(params, state, params))
    for got, plain in zip(results, want, strict=True):
        np.testing.assert_allclose(got, plain, rtol=1e-6, atol=1e-7)
    bad = jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), params)
    _, _, results = carried_out(tx, bad, state, path=".*(mu|nu).*")
    assert float(jnp.abs(results[0]).max()) == 0.0, "a rejected update is zero"


def test_what_is_replaced_is_read_before():
    """What holds a load back, and what is read apart from what replaces it (F02, F09).

    Without these barriers values are the same, and compilers keep or copy more.
    """
    tx, params = optax.adam(1e-2), parameters(*[(64, 256)] * 3)
    options = {"slice_axis": 0, "path": ".*mu.*"}
    update, state = traced(tx, params, **options), tx.init(params)
    planned = schedule(update, 2**16)

    def fn(*args):
        placed = [
            memory.transfer(x, "pinned_host") if i.on_host else x
            for x, i in zip(args, update.inputs, strict=True)
        ]
        return run(update, planned, placed, Around({}, {}))

    text = jax.jit(fn).lower(*jax.tree.leaves((params, state, params))).as_text()
    barriers = re.findall(r"= stablehlo.optimization_barrier .*", text)
    slices = [x for x in barriers if x.endswith(": tensor<32x256xf32>")]
    assert len(slices) == len(params)  # Of `nu`, which is on the device.
    # Between three groups: two loads, and the store of the second one.
    assert len(barriers) == len(slices) + 3
