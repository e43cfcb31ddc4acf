"""The order in an iteration: of updates, of loads and of stores."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from small_jaxprs import load, on_device, on_host
from small_steps import (
    WIDTH,
    offloaded,
    scans_of,
    step_of,
    taken_apart,
    trained,
    two_matrices,
)

from optax_offload._ground import compat, limits
from optax_offload._places import memory
from optax_offload._places.step_options import Options
from optax_offload._schedule import order as ordering
from optax_offload._schedule import plan
from optax_offload._schedule.order import by_gradients
from optax_offload._schedule.pipeline import Pipeline, for_gpu, for_tpu

LENGTH, ROWS = 6, 512
TRACE = optax.trace(0.9)


@pytest.fixture(autouse=True)
def newest(monkeypatch):
    """Whatever the version of JAX: nothing is compiled here."""
    for flag in ("LOOPS_RUN_ONCE", "STORES_OVERLAP", "COPIES_AT_POSITIONS"):
        monkeypatch.setattr(compat, flag, True)


def stack(width=WIDTH, length=LENGTH):
    """The type of stacked layers."""
    return jax.ShapeDtypeStruct((length, WIDTH, width), jnp.float32)


def planned(inner=TRACE, params=None, loss=two_matrices, length=LENGTH, **options):
    """A step of two matrices a layer, its backward scan, and what is fused in it."""
    params = params or dict.fromkeys("ab", stack(length=length))
    step = trained(inner, params, loss=loss, **options)
    (each,) = plan(step, Options()).scans
    assert len(each.now) == len(jax.tree.leaves(params))
    return step, each.scan, list(each.now)


def shapes(variables):
    """The shapes of variables."""
    return [v.aval.shape for v in variables]


def test_updates_come_as_their_gradients_do():
    """Whatever their order was; the backward pass of the last matrix comes first."""
    wide = {"a": stack(16), "b": jax.ShapeDtypeStruct((LENGTH, 16, WIDTH), jnp.float32)}
    _, scan, fused = planned(params=wide)
    for some in (fused, fused[::-1]):
        first, second = by_gradients(scan, some)
        assert shapes(first.component.gradients) == [wide["b"].shape]
        assert shapes(second.component.gradients) == [wide["a"].shape]


def test_on_a_cpu_or_tpu_nothing_is_delayed():
    """Rows are stored an iteration late on a GPU only."""
    step, scan, fused = planned()
    assert not for_tpu(step, scan, Pipeline.of(fused, ())).delayed
    assert for_gpu(step, scan, Pipeline.of(fused, ())).delayed


def test_the_last_rows_are_delayed():
    """Those of the last gradient's update are stored in the next iteration."""
    _, scan, fused = planned()
    fused = by_gradients(scan, fused)
    found = ordering.delayed_rows(scan, fused)
    (state,) = (v for v in fused[1].replaced if memory.on_host(v.aval))
    assert found == {state}


def test_small_rows_are_delayed_too():
    """To keep them for an iteration costs nothing."""

    def loss(params, x):
        def layer(h, w):
            return jnp.tanh(h @ w["a"]) @ w["b"] + w["c"][None], None

        return jnp.sum(lax.scan(layer, x, params)[0] ** 2)

    shapes_of = {"b": (LENGTH, 256, WIDTH), "c": (LENGTH, WIDTH)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes_of.items()}
    _, scan, fused = planned(params={"a": stack(256), **params}, loss=loss)
    found = ordering.delayed_rows(scan, by_gradients(scan, fused))
    assert sorted(shapes(found)) == [(LENGTH, WIDTH), (LENGTH, WIDTH, 256)]


def test_of_one_update_a_half_is_delayed():
    """Its other half is stored beside the load of this one."""
    step = trained(optax.scale_by_adam())
    (each,) = plan(step, Options()).scans
    (fused,) = each.now
    _, last = (v for v in fused.replaced if memory.on_host(v.aval))
    assert ordering.delayed_rows(each.scan, each.now) == {last}


def test_what_stays_on_the_device_is_not_delayed():
    """Nothing of it is stored, at whatever time."""
    _, scan, fused = planned(optax.sgd(0.1), wrap=lambda tx: tx)
    assert not ordering.delayed_rows(scan, by_gradients(scan, fused))


@pytest.mark.parametrize(
    ("change", "value"), [("STORES_OVERLAP", False), ("length", 3), ("read", True)]
)
def test_rows_that_are_not_delayed(change, value, monkeypatch):
    """Of older compilers, of few iterations, and of what is read an iteration ahead."""
    _, scan, fused = planned(length=3 if change == "length" else LENGTH)
    if change == "STORES_OVERLAP":
        monkeypatch.setattr(compat, change, value)
    read = [v for f in fused for v in f.replaced.values()] if change == "read" else []
    assert not ordering.delayed_rows(scan, by_gradients(scan, fused), read)


def test_a_single_update_is_not_delayed():
    """There is nothing else in an iteration that it could be stored beside."""
    step = trained(TRACE)
    (each,) = plan(step, Options()).scans
    assert not ordering.delayed_rows(each.scan, each.now)


def test_beside_a_small_update_none_is_delayed():
    """Of two, one of which has hardly any state, the stores have nothing to overlap."""

    def loss(params, x):
        def layer(h, w):
            return jnp.tanh((h @ w["a"])[:, :WIDTH] + w["b"][None]), None

        return jnp.sum(lax.scan(layer, x, params)[0] ** 2)

    bias = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)
    _, scan, fused = planned(params={"a": stack(256), "b": bias}, loss=loss)
    assert not ordering.delayed_rows(scan, by_gradients(scan, fused))


def test_operands_whose_rows_are_loaded():
    """Not those on the device, nor those of which a row is used on the host too."""

    def fn(at_rest, here, kept, x):
        def body(h, rows):
            w, v, k = rows
            return load(w) * h + v + load(k), lax.optimization_barrier(k)

        return lax.scan(body, x, (at_rest, here, kept))

    types = on_host(LENGTH, 3), on_device(LENGTH, 3), on_host(LENGTH, 3), on_device(3)
    scan = scan_of(fn, *types)
    assert scan.loaded == [scan.body.xs[0]]


def test_rows_that_nothing_needs_are_not_loaded():
    """A parameter that layers do not use is not loaded ahead of them."""

    def fn(used, unused, untouched, x):
        def body(h, rows):
            load(rows[1])
            return load(rows[0]) * h, None

        return lax.scan(body, x, (used, unused, untouched))[0]

    scan = scan_of(fn, *[on_host(LENGTH, 3)] * 3, on_device(3))
    assert len(scan.body.xs) == 3
    assert scan.loaded == [scan.body.xs[0]]


def scan_of(fn, *types):
    """The only scan of a function that moves rows itself."""
    (scan,) = scans_of(step_of(fn, *types))
    return scan


def scanned_at_rest(length=LENGTH, unroll=1):
    """A step with a scan over rows at rest."""

    def fn(w, x):
        body = lambda h, r: (jnp.tanh(h * r), None)  # noqa: E731
        return lax.scan(body, x, w, unroll=unroll)[0]

    step = taken_apart(fn, on_host(length, 3), on_device(3))
    (scan,) = scans_of(step)
    return step, scan


def test_rows_of_parameters_are_loaded_ahead():
    """Each iteration loads those of the next one."""
    step, scan = scanned_at_rest()
    assert ordering.rows_ahead(step, scan) == [step.program.invars[0]]
    assert for_gpu(step, scan, Pipeline.of((), ())).ahead == (step.program.invars[0],)


@pytest.mark.parametrize("how", ["unrolled", "short", "older"])
def test_rows_that_are_not_loaded_ahead(how, monkeypatch):
    """Of a scan that is unrolled or short, and of older compilers."""
    step, scan = scanned_at_rest(
        length=3 if how == "short" else LENGTH, unroll=2 if how == "unrolled" else 1
    )
    if how == "older":
        monkeypatch.setattr(compat, "COPIES_AT_POSITIONS", False)
    assert ordering.rows_ahead(step, scan) == []


def test_rows_ahead_fit_the_window():
    """Of a window that was asked for no more than that is loaded ahead."""
    row = 4 * WIDTH * WIDTH

    def ahead(window_bytes):
        step, scan, _ = planned(
            params_at_rest=True,
            wrap=lambda tx: offloaded(tx, window_bytes=window_bytes),
        )
        return len(ordering.rows_ahead(step, scan))

    assert [ahead(n) for n in (2 * row, 2 * row - 1, row, row - 1)] == [2, 1, 1, 0]


def test_a_load_is_placed_before_its_own_store():
    """A parameter is read before it is replaced; without updates loads come first."""
    step, scan, fused = planned(params_at_rest=True)
    fused = by_gradients(scan, fused)
    ahead = ordering.rows_ahead(step, scan)
    assert len(ahead) == 2
    placed = ordering.placed_ahead(scan, fused, ahead)
    assert set(placed) == set(ahead)
    for n, f in enumerate(fused):
        for v in f.rows.inputs:
            assert placed.get(v, 0) <= n
    assert ordering.placed_ahead(scan, [], ahead) == dict.fromkeys(ahead, 0)


def test_residuals_are_stored_behind():
    """Those in host memory of which another scan takes rows, of long scans."""

    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, r: (jnp.sin(h * r), None), x, w)[0])

    def behind(length):
        step = taken_apart(
            jax.grad(loss, argnums=1),
            on_device(length, 2**15),
            on_device(2**15),
            residuals=True,
        )
        forward, backward = scans_of(step)
        assert ordering.residuals_behind(step, backward) == []
        return ordering.residuals_behind(step, forward)

    (kept,) = behind(LENGTH)
    assert kept.aval.shape == (LENGTH, 2**15)
    assert behind(3) == []


def test_flops_are_those_of_products():
    """Of all iterations: a row times a matrix, twice for each number of it."""

    def fn(w, x):
        return lax.scan(lambda h, r: (jnp.tanh(h @ r), None), x, w)[0]

    scan = scan_of(fn, on_device(LENGTH, 8, 8), on_device(2, 8))
    assert ordering.flops(scan) == LENGTH * 2 * 2 * 8 * 8


def test_updates_in_turn_where_there_is_computation():
    """A GPU stores each after the one before, where products take half as long."""
    _, scan, fused = planned()
    assert not ordering.updates_in_turn(scan, fused)
    bytes_each_way = sum(f.loaded_bytes for f in fused)
    needed = limits.now.flops_per_byte * bytes_each_way
    for flops, want in ((needed / 2 - 1, False), (needed / 2, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ordering, "flops", lambda _, n=flops: n)
            assert ordering.updates_in_turn(scan, fused) == want


def test_gradients_that_wait_leave_when_rows_are_loaded(monkeypatch):
    """Where this hides loads, which else begin when all gradients have left (F83)."""
    step, scan, fused = planned(params_at_rest=True)
    first, last = (v for f in by_gradients(scan, fused) for v in f.component.gradients)
    work = Pipeline.of((), (), (), (last, first))
    turn = for_gpu(step, scan, work)
    assert turn.waiting == work.waiting
    assert not turn.store_after
    assert not turn.store_after_loads
    monkeypatch.setattr(ordering, "flops", lambda _: 1e18)
    turn = for_gpu(step, scan, work)
    assert turn.waiting == (first, last)
    assert turn.store_after == {last: first}
    loads = turn.store_after_loads
    assert [*loads] == [first, last]
    assert len(turn.ahead) == 2
    assert sorted(map(id, sum(loads.values(), ()))) == sorted(map(id, turn.ahead))


def test_a_tpu_is_told_the_order_where_it_matters(monkeypatch):
    """If more than state rests on the host, or if computation hides the transfers."""
    step, scan, fused = planned()
    assert not ordering.moves_in_turn(step, scan, fused)
    monkeypatch.setattr(ordering, "flops", lambda _: 1e18)
    assert ordering.moves_in_turn(step, scan, fused)
    turn = for_tpu(step, scan, Pipeline.of(fused, ()))
    state = [v for f in fused for v in f.rows.inputs if memory.on_host(v.aval)]
    assert turn.first == tuple(dict.fromkeys(state))
    assert turn.updates[0].loads == turn.first
    assert turn.updates[0].held == fused[0].component.gradients
    monkeypatch.undo()
    monkeypatch.setattr(compat, "STORES_OVERLAP", True)
    step, scan, fused = planned(params_at_rest=True)
    assert ordering.moves_in_turn(step, scan, fused)
    assert not for_tpu(step, scan, Pipeline.of(fused, ())).first


def test_a_window_that_was_asked_for_is_kept_on_a_tpu(monkeypatch):
    """All rows of an iteration at once would be more."""
    wrap = lambda tx: offloaded(tx, window_bytes=2**20)  # noqa: E731
    step, scan, fused = planned(wrap=wrap)
    monkeypatch.setattr(ordering, "flops", lambda _: 1e18)
    assert not ordering.loads_first(step, scan, fused)
    assert not for_tpu(step, scan, Pipeline.of(fused, ())).first
