"""Rows that the next iteration stores: which they are, and that none goes astray."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import program
import pytest
from harness import committed, quick_of
from jax import lax
from limited import limited
from scanned_models import BATCH, DONATED, layer, make_step, offloaded, train

import optax_offload as oo
from benchmarks.common.differences import ulps
from optax_offload import aot
from optax_offload._emit import streamed_step
from optax_offload._ground import compat

BOUND = 32


def make_params(length):
    """Two matrices of each layer, and a vector that is small beside them."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((32, 16), (16, 32), (length, 16, 24), (length, 24, 16), (length, 4))
    made = [jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True)]
    names = ("in", "out", "small")
    layers = dict(zip(names, made[2:], strict=True))
    return committed({"embedding": made[0], "head": made[1], "layers": layers})


def make_loss(*, reverse=False, unroll=1):
    """The layers from the first to the last, or from the last to the first."""

    def scaled(h, w):
        return layer(h * jnp.tile(1 + w["small"], 4)[None], w)

    def loss(params, tokens):
        h = params["embedding"][tokens]
        h = lax.scan(scaled, h, params["layers"], reverse=reverse, unroll=unroll)[0]
        return jnp.mean((h @ params["head"] - jax.nn.one_hot(tokens, 32)) ** 2)

    return loss


@pytest.mark.parametrize(
    ("length", "unroll", "reverse"),
    quick_of(
        [
            (*some, reverse)
            for some in [(6, 3), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (5, 2)]
            for reverse in (False, True)
        ],
        {(6, 3, True)},
    ),
)
def test_every_row_is_stored(length, unroll, reverse):
    """Of scans too short for it, unrolled, from either end."""
    params, loss = make_params(length), make_loss(reverse=reverse, unroll=unroll)
    plain, tx = optax.adam(1e-2), offloaded(optax.adam(1e-2))
    want = train(jax.jit(make_step(plain, loss)), plain, params, steps=3)
    step = oo.jit(make_step(tx, loss), **DONATED)
    got = train(step, tx, params, steps=3)
    assert ulps(got, want) <= BOUND
    text = str(step.schedule(*got[:2], BATCH))
    fused = length > 1
    assert (f"backward scan of {length} iterations" in text) == fused
    # What is not fused is sliced by loops of ours, which say so too.
    if fused:
        by_kernels = not compat.COPIES_AT_POSITIONS
        assert ("kernels move these slices" in text) == by_kernels


@pytest.mark.parametrize("late_gradients", ["host", "recompute"])
def test_gradients_that_wait(late_gradients):
    """In the second scan rows are delayed, in the first there are none."""
    params, loss = make_params(5), make_loss()
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    tx = offloaded(plain)
    want = train(jax.jit(make_step(plain, loss)), plain, params, steps=3)
    step = oo.jit(make_step(tx, loss), late_gradients=late_gradients, **DONATED)
    assert ulps(train(step, tx, params, steps=3), want) <= BOUND


def test_what_need_not_wait_for_a_second_run_does():
    """That run takes the old parameters, of which there would be a copy."""
    params, loss = make_params(2), make_loss()
    clipped = jax.tree.map(lambda x: x.shape[1:] == (16, 24), params)
    clip = optax.masked(optax.clip_by_global_norm(0.1), clipped)
    plain = optax.chain(clip, optax.sgd(1e-2, 0.9))
    tx = offloaded(plain)
    want = train(jax.jit(make_step(plain, loss)), plain, params, steps=2)
    step = oo.jit(make_step(tx, loss), late_gradients="recompute", **DONATED)
    got = train(step, tx, params, steps=2)
    assert ulps(got, want) <= BOUND
    text = str(step.schedule(*got[:2], BATCH))
    assert "need all gradients first: 3 gradients" in text
    assert "updated with their rows" not in text


@pytest.mark.parametrize("reverse", [False, True])
def test_late_rows_with_every_jax(reverse, monkeypatch):
    """Those of the CPU are right, whether or not a version's are worth it on a GPU.

    What leaves the device in an iteration does so together (F65), and what only the
    rest of the step takes is computed before the scan (F67).
    """
    monkeypatch.setattr(compat, "STORES_OVERLAP", True)
    params, loss = make_params(5), make_loss(reverse=reverse)
    plain, tx = optax.adam(1e-2), offloaded(optax.adam(1e-2))
    want = train(jax.jit(make_step(plain, loss)), plain, params, steps=3)
    step = oo.jit(make_step(tx, loss), **DONATED)
    got = train(step, tx, params, steps=3)
    assert ulps(got, want) <= BOUND
    text = step.lower(*got[:2], BATCH).as_text()
    row = re.escape("tensor<1x24x16xf32>")
    assert re.search(rf"optimization_barrier .*: {row}, {row}$", text, re.M)
    assert re.search(r"optimization_barrier .* tensor<16x32xf32>", text)


later_jax = pytest.mark.skipif(
    not compat.STORES_OVERLAP, reason="no row is delayed before JAX 0.11"
)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.xdist_group("gpu")
@pytest.mark.parametrize("reverse", [False, True])
def test_positions_of_copies_are_those_of_rows(reverse):
    """They fall where the backward scan does, and each row is loaded once.

    A GPU's compiler does not clamp them (F66). Where it would take any position for the
    loop's counter (U10), it knows none, and no copy goes by one.
    """
    tx = offloaded(optax.adam(1e-2))
    target = aot.Target("h100")
    step = oo.stream(make_step(tx, make_loss(reverse=reverse)))
    state = oo.eval_shape(tx.init, make_params(6))
    compiled = aot.compile(
        step, make_params(6), state, BATCH, target=target, donate_argnums=(0, 1)
    )
    moved = [t for t in aot.transfers(compiled) if "slice" in t.form]
    found = list(program.slice_positions(compiled))
    assert {t.direction for t in moved if t.times > 1} == {"load", "store"}
    assert bool(found) == compat.COPIES_AT_POSITIONS
    loads = collections.defaultdict(list)
    for t, positions in found:
        rows = [position // t.nbytes for position in positions]
        assert all(0 <= row < 6 for row in rows), (t, rows)
        # The very first iteration stores a row of the next one, as it is.
        turned = t.direction == "store" and len(rows) == 2
        assert rows == sorted(rows, reverse=not reverse) or turned
        if t.direction == "load":
            loads[t.shape] += rows
    # Both moments of each leaf.
    assert all(sorted(rows) == sorted([*range(6)] * 2) for rows in loads.values())


def step_at_rest(length, **asked):
    """The step with parameters and residuals of layers on the host; what it takes."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0), **asked)
    params = oo.set_memory_kind(make_params(length), "layers/.*", "pinned_host")
    return make_step(tx, make_loss()), (params, tx.init(params), BATCH)


def compiled_at_rest(length, **asked):
    """It, for an H100."""
    step, args = step_at_rest(length, **asked)
    step = oo.stream(step, residuals="host")
    return aot.compile(step, *args, target=aot.Target("h100"), donate_argnums=(0, 1))


@later_jax
@pytest.mark.aot
@pytest.mark.xdist_group("gpu")
@pytest.mark.filterwarnings("ignore:.*over the window")
@pytest.mark.parametrize("computes_longer", [False, True])
def test_rows_are_loaded_ahead(computes_longer, monkeypatch):
    """By copies, each in the iteration before, of rows that are there.

    Nothing is copied within host memory, nor where updates are in parts.
    """
    limited(
        monkeypatch,
        flops_per_byte=0 if computes_longer else 1e9,
        least_residual_rows_bytes=0,
    )
    length = 6
    ahead, alone = compiled_at_rest(length), compiled_at_rest(length, window_bytes=64)
    loads = collections.defaultdict(list)
    for t, positions in program.slice_positions(ahead):
        rows = [position // t.nbytes for position in positions]
        assert all(0 <= row < length for row in rows), (t, rows)
        if t.direction == "load":
            loads[t.shape].append(rows)
    # The parameter, forward and backward, of which the last load is for no one; and
    # both moments, each in its own iteration.
    parameter = [[1, 2], [3, 4], [5, 4], [4, 3], [2, 1], [0, 1]]
    moment = [[5, 4], [3, 2], [1, 0]]
    for shape in ((length, 16, 24), (length, 24, 16)):
        assert sorted(loads[shape]) == sorted([*parameter, *moment, *moment])
    for compiled in (ahead, alone):
        assert not [t for t in aot.transfers(compiled) if t.direction == "host copy"]


def every_row(computes_longer, monkeypatch):
    """As with the newest JAX, residuals of any size, and as long as is said."""
    for name in ("COPIES_AT_POSITIONS", "STORES_OVERLAP"):
        monkeypatch.setattr(compat, name, True)
    limited(
        monkeypatch,
        least_residual_rows_bytes=0,
        flops_per_byte=0 if computes_longer else 1e9,
    )


def trained_as_plain(reverse, residuals):
    """The program of a step at rest, whose values are those of the plain one."""
    plain, tx = optax.adam(1e-2), offloaded(optax.adam(1e-2))
    params, loss = make_params(6), make_loss(reverse=reverse)
    want = train(jax.jit(make_step(plain, loss)), plain, params, steps=3)
    step = oo.jit(make_step(tx, loss), residuals=residuals, **DONATED)
    resting = oo.set_memory_kind(params, "layers/.*", "pinned_host")
    assert ulps(train(step, tx, resting, steps=3), want) <= BOUND
    return step.lower(resting, tx.init(resting), BATCH).as_text()


@pytest.mark.parametrize(
    ("computes_longer", "reverse"),
    quick_of(
        itertools.product([False, True], repeat=2), {(False, True), (True, False)}
    ),
)
def test_updates_are_in_turn(computes_longer, reverse, monkeypatch):
    """Where computation takes long enough, each is stored after the one before it."""
    every_row(computes_longer, monkeypatch)
    text = trained_as_plain(reverse, "host")
    # Rows of an update, with a buffer that the update before is stored into.
    row = r"tensor<1x\S+"
    in_turn = re.findall(
        rf"optimization_barrier .* : ({row}, )+tensor<6x\S+$", text, re.M
    )
    assert bool(in_turn) == computes_longer


@pytest.mark.parametrize("residuals", ["device", "host"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("computes_longer", [False, True])
def test_a_tpu_moves_rows_in_turn(computes_longer, reverse, residuals, monkeypatch):
    """What is replaced is loaded ahead where that is hidden, and residuals always."""
    every_row(computes_longer, monkeypatch)
    limited(monkeypatch, least_in_turn_bytes=0)
    results = streamed_step.emit.results
    monkeypatch.setattr(
        streamed_step.emit, "results", lambda *a, on_tpu: results(*a, on_tpu=True)
    )
    text = trained_as_plain(reverse, residuals)
    carried = "".join(re.findall(r"= stablehlo.while.*", text))
    assert ("tensor<1x16x24xf32>" in carried) == computes_longer
    of_residuals = f"tensor<1x{BATCH.size}x16xf32>"
    assert (of_residuals in carried) == (residuals == "host")
    # The large rows of an iteration, but for its first, each wait for the one before.
    pair = r"optimization_barrier %\S+, %\S+ : tensor<1x\S+, tensor<6x"
    assert len(re.findall(pair, text)) >= 8
