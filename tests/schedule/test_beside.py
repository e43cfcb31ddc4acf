"""What a step evaluates beside the rows of its scans, each after what it takes."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.extend import core as jex
from limited import limited
from small_steps import at_rest, offloaded, on_device, taken_apart, trained

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._places.step_options import Options
from optax_offload._schedule import plan
from optax_offload._schedule.beside import apart, beside, in_rows
from optax_offload._schedule.late import reduced
from optax_offload._schedule.rest import Outer

WIDTH = 8
PARAMS = {
    "stack": jax.ShapeDtypeStruct((6, WIDTH, WIDTH), jnp.float32),
    "list": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2,
}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
SCHEDULED = optax.adam(optax.cosine_decay_schedule(1e-2, 10))


def loss(params, x):
    """Scanned layers, and then others."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    for w in params["list"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def found(tx, late_gradients="auto"):
    """The plan of a step, and what it evaluates beside the rows of its scan."""
    step = trained(tx, PARAMS, loss=loss)
    planned = plan(step, Options(late_gradients=late_gradients))
    assert len(planned.scans) == 1
    passes = planned.passes
    return planned, beside(step, planned.scans, (), passes, reduced(step))


def scan_of(planned, there):
    """The node that the scan is, with its position among the others."""
    position = planned.scans[0].scan.position
    (k,) = (k for k, x in enumerate(there.nodes) if x.position == position)
    return k, there.nodes[k]


def test_a_scan_takes_and_defines_what_its_updates_do():
    """State is among it, and no gradient that never exists."""
    planned, there = found(optax.adam(1e-2))
    (each,) = planned.scans
    _, scan = scan_of(planned, there)
    assert scan.in_turns
    gradients = {v for f in each.fused for v in f.component.gradients}
    assert gradients
    assert gradients.isdisjoint(scan.defines)
    assert {v for f in each.now for v in f.component.results} <= {*scan.defines}
    state = {v for f in each.now for v in f.rows.inputs} - gradients
    assert state <= {*scan.reads}
    assert state <= in_rows(planned.scans)


@pytest.mark.parametrize("tx", [SCHEDULED, CLIPPED], ids=["schedule", "clip"])
def test_all_is_evaluated_after_what_it_takes(tx):
    """Also what updates in a scan take: in the program, that comes after it."""
    planned, there = found(tx)
    made = {v for x in (*there.nodes, *there.after) for v in x.defines}
    known = set()
    for node in there.nodes:
        assert known.issuperset(made.intersection(node.reads))
        known.update(node.defines)
    # But for what is of an update itself, which is evaluated where it is taken.
    step = planned.step
    outside = {v for i in step.live - {*step.inlined_at} for v in step.defines(i)}
    assert known.issuperset(there.taken & outside)


def test_a_scan_is_evaluated_after_what_its_updates_take():
    """In the program that comes after it: here a factor of its gradients."""
    inner = optax.adam(1e-2)
    tx = offloaded(inner)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        factor = jnp.cos(jnp.sum(x))
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = at_rest(jax.eval_shape(inner.init, PARAMS))
    x = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)
    taken = taken_apart(step, on_device(PARAMS), state, on_device(x))
    planned = plan(taken, Options())
    there = beside(taken, planned.scans, (), planned.passes, None)
    k, scan = scan_of(planned, there)
    (factor,) = (
        v
        for x in there.nodes
        for v in x.defines
        if taken.program.equations[x.position].primitive.name == "cos"
    )
    assert factor in scan.reads
    assert scan.position < max(x.position for x in there.nodes[:k])
    assert factor in {v for x in there.nodes[:k] for v in x.defines}


def test_what_is_summed_up_in_a_scan_is_defined_by_it():
    """The norm of all comes after it, and updates of others after that."""
    planned, there = found(CLIPPED)
    (each,) = planned.scans
    assert each.late
    k, scan = scan_of(planned, there)
    sums = [s.position for f in each.fused for s in f.component.sums]
    assert sums
    step = planned.step
    of_rows = {v for i in sums for v in step.defines(i)}
    assert of_rows <= {*scan.defines}
    readers = [n for n, x in enumerate(there.nodes) if not of_rows.isdisjoint(x.reads)]
    assert readers
    assert min(readers) > k


def test_what_takes_late_results_waits():
    """With what follows from it, until the pass over rows has made them."""
    planned, _ = found(CLIPPED)
    (each,) = planned.scans
    late = each.late[0].component.results[0]
    given, *made = (jex.Var(late.aval) for _ in range(4))
    reads = [(given,), (late,), (given, made[1])]
    some = [Outer(n, x, (v,)) for n, (x, v) in enumerate(zip(reads, made, strict=True))]
    separated = apart(planned.step, some, planned.scans, planned.passes)
    assert separated == (some[:1], some[1:])


@pytest.mark.parametrize("returned", [False, True])
def test_gradients_of_a_scan_that_are_whole_are_told(returned, monkeypatch):
    """Also beside a chain, whose own scans inside of layers stack none."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, segment_bytes=1, least_segments=1)
    tx = offloaded(optax.adam(1e-2))

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        more = grads["stack"] if returned else jnp.sum(x)
        return optax.apply_updates(params, updates), state, more

    state = oo.eval_shape(tx.init, PARAMS)
    params = {**PARAMS, "list": oo.set_memory_kind(PARAMS["list"], ".*", "pinned_host")}
    x = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)
    planned = oo.jit(step, donate_argnums=(0, 1)).schedule(params, state, x)
    assert planned.chain is not None
    assert bool(planned.scans) != returned
    told = "1 gradient of 1.50 KiB left outside: the step returns it"
    assert (told in str(planned)) == returned


def test_a_scan_that_runs_again_keeps_what_it_takes():
    """Its operands are taken by a pass after all else."""
    planned, there = found(CLIPPED, "recompute")
    (each,) = planned.scans
    assert each.way == "recompute"
    own = {*planned.step.reads(each.scan.position)}
    assert own <= there.taken


@pytest.mark.parametrize("scanned", [False, True])
def test_residuals_alone_are_no_turns_beside_a_scan(scanned, monkeypatch):
    """A head that has no leaves is not cut, as what it keeps is used up at once."""
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, segment_bytes=1, least_segments=4, least_residual_bytes=1)

    def loss(params, x):
        if scanned:
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        for _ in range(12):
            x = jnp.tanh(x @ x.T) @ x
        return jnp.mean(x**2)

    tx = offloaded(optax.adam(1e-2))

    def step(params, state, x):
        grads, more = jax.grad(loss, (0, 1))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, more

    params = oo.set_memory_kind(PARAMS["stack"], ".*", "pinned_host")
    state = oo.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)
    jitted = oo.jit(step, donate_argnums=(0, 1), residuals="host")
    refused = pytest.warns(oo.OffloadWarning, match="nothing is kept there")
    with refused if scanned else contextlib.nullcontext():
        assert (jitted.schedule(params, state, x).chain is None) == scanned
