"""The plan of an update: its groups, their order, and who waits for whom."""

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_offload import _jaxpr, _memory, _trees
from optax_offload._update import schedule as _schedule

SHAPE = (8, 4)
NBYTES = 8 * 4 * 4


def plan_of(
    tx,
    params,
    *,
    window_bytes=None,
    slice_axis=None,
    host=lambda x: x.ndim > 0,
    in_place=True,
):
    """The schedule of an update whose non-scalar state is all on the host."""
    state = jax.eval_shape(tx.init, params)
    closed, out = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    flat_out = jax.tree_util.tree_flatten_with_path(out)[0]
    updates = range(len(jax.tree.leaves(params)))
    first = len(updates)
    loads = [first + i for i, x in enumerate(jax.tree.leaves(state)) if host(x)]
    stores = [first + i for i, x in enumerate(jax.tree.leaves(out[1])) if host(x)]
    paths = [_trees.path_string(keys[1:]) for keys, _ in flat_out]
    schedule = _schedule.plan(
        _jaxpr.flatten(closed),
        loads=loads,
        stores=stores,
        updates=updates,
        homes=range(len(paths)) if in_place else [None] * len(paths),
        paths=paths,
        slice_axes=dict.fromkeys(loads, slice_axis),
        nbytes=_memory.nbytes,
        window_bytes=window_bytes,
    )
    names = [[paths[k] for k in g.outputs if k in updates] for g in schedule.groups]
    return schedule, names


@pytest.fixture(autouse=True)
def runs_once(monkeypatch):
    """Whatever the version of JAX: nothing is compiled here."""
    monkeypatch.setattr(_schedule, "RUNS_ONCE", True)


def layers(n):
    return {f"layers_{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(n)}


def test_adam_has_a_group_for_each_parameter_last_layer_first():
    """In the natural order of numbers, in which 10 comes after 9."""
    schedule, names = plan_of(optax.adamw(1e-3), layers(12))
    assert names == [[f"layers_{i}"] for i in reversed(range(12))]
    for group in schedule.groups:
        assert len(group.loads) == 2
        assert len(group.outputs) == 3
        assert group.nbytes == 2 * NBYTES
        assert group.tied_by == ()


def test_norm_of_gradients_ties_nothing():
    """Clipping before Adam is shared by all groups."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    schedule, names = plan_of(tx, layers(3))
    assert [len(n) for n in names] == [1, 1, 1]
    assert schedule.shared


def test_multi_steps_is_not_tied_by_its_cond():
    """Its predicate is the constant False: the cond is the branch."""
    tx = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    _, names = plan_of(tx, layers(3))
    assert [len(n) for n in names] == [1, 1, 1]


def test_counter_on_the_host_ties_nothing():
    """Scalars are loaded ahead."""
    schedule, names = plan_of(optax.adam(1e-3), layers(3), host=lambda x: True)
    assert [n for n in names if n] == [[f"layers_{i}"] for i in (2, 1, 0)]
    assert len(schedule.ahead) == 1


def test_norm_of_state_ties_all():
    """Correct, in one group, and the schedule says by what."""

    def update(updates, state, params=None):
        norm = optax.tree.norm(state)
        return jax.tree.map(lambda u, s: u + s / norm, updates, state), state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    schedule, names = plan_of(tx, layers(3))
    assert sorted(names[0]) == ["layers_0", "layers_1", "layers_2"]
    assert schedule.groups[0].tied_by == ("add",)


def test_dead_equations_tie_nothing():
    """What no output needs is not computed."""

    def update(updates, state, params=None):
        optax.tree.norm(state)
        return updates, jax.tree.map(lambda s: s * 2, state)

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    schedule, _ = plan_of(tx, layers(3))
    assert [len(g.loads) for g in schedule.groups] == [1, 1, 1]


@pytest.mark.parametrize(
    ("window_bytes", "waits"),
    [
        (1, (0, 1, 2, 3)),
        (2 * NBYTES, (0, 1, 2, 3)),
        (4 * NBYTES, (0, 0, 1, 2)),
        (5 * NBYTES, (0, 0, 1, 2)),
        (8 * NBYTES, (0, 0, 0, 0)),
        (None, (0, 0, 0, 0)),
    ],
)
def test_groups_wait_until_they_fit(window_bytes, waits):
    """A group runs beside as many before it as the window holds: in no loop, without
    buffers to write into, and in one, which has several only if two of them fit. A
    loop has two at once of what cannot be sliced, however many fit: what it computes
    with can take more memory than what is loaded."""
    adam, params = optax.adam(1e-3), layers(4)
    schedule, _ = plan_of(adam, params, window_bytes=window_bytes, in_place=False)
    assert (schedule.waits, schedule.loops) == (waits, ())
    schedule, _ = plan_of(adam, params, window_bytes=window_bytes)
    one_by_one = waits == (0, 1, 2, 3)
    in_loop = waits if any(waits) else (0, 0, 1, 2)
    assert [loop.waits for loop in schedule.loops] == (
        [(0,)] * 4 if one_by_one else [in_loop]
    )
    assert all(loop.turns == 1 and not loop.rows for loop in schedule.loops)


def test_a_group_has_what_only_it_needs():
    """In a loop: else what is fused with its update would be computed before."""

    def in_no_group(**kwargs):
        schedule, _ = plan_of(optax.adam(1e-3), layers(4), **kwargs)
        return len(schedule.shared)

    # Two products for each of four gradients.
    assert in_no_group(in_place=False) - in_no_group() >= 4 * 2


def test_default_window_is_a_sixteenth_of_the_state():
    """Within bounds; that of 12 leaves of 64 MiB and their two moments is 64 MiB."""
    mib = 2**20

    def window(rows):
        params = {
            f"w{i}": jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for i in range(12)
        }
        return plan_of(optax.adam(1e-3), params)[0].window_bytes

    assert window(8) == 16 * mib
    assert window(4096) == 2 * 12 * 16 * mib // 16
    assert window(16384) == 64 * mib


def test_summary():
    """What the log says of an update."""
    schedule, _ = plan_of(optax.adam(1e-3), layers(2), window_bytes=1000)
    assert str(schedule) == (
        "2 groups of 512 bytes in all, the largest of 256\n"
        "window of 1000 bytes: as asked\n"
        "loop that runs once over 2 groups, whole, of 256 bytes\n"
        "2 groups whole: no axis to slice a leaf of shape (8, 4)"
    )


def test_planning_is_linear_in_leaves():
    """Each equation is in one place only, and each leaf adds as many as the last."""

    def equations(n):
        schedule, _ = plan_of(optax.adam(1e-3), layers(n))
        used = [i for g in schedule.groups for i in g.equations] + [*schedule.shared]
        assert len(used) == len(set(used))
        return len(used)

    assert equations(50) - equations(5) == 45 * (equations(6) - equations(5))


def stacked(*shapes, dtype=jnp.float32):
    return {f"w{i}": jax.ShapeDtypeStruct(s, dtype) for i, s in enumerate(shapes)}


def test_groups_of_like_rows_share_a_loop():
    """As many turns as slices have to be, and it says so."""
    params = stacked(*[(24, 128, 256), (24, 256, 128)] * 4)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=5 << 20)
    (loop,) = schedule.loops
    # Of 6 MiB of moments each; two slices take at most 5: 3 turns of 2 MiB.
    assert (loop.turns, loop.rows, loop.unrolled) == (3, (8,) * 8, 3)
    assert loop.slice_bytes == (2 << 20,) * 8
    # A third slice would make 6 MiB; and the last waits for all others.
    assert loop.waits == (0, 0, *range(1, 22), 23)
    assert not schedule.whole
    assert "loop of 3 turns over 8 groups, 3 to an iteration, slices of 2097152" in str(
        schedule
    )


def test_leaves_are_whole_where_two_fit():
    """Of any shapes, in a loop that runs once."""
    params = stacked(*[(24, 128, 256), (1000, 128)] * 2)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=13 << 20)
    (loop,) = schedule.loops
    assert (loop.turns, loop.rows, loop.unrolled) == (1, (), 1)
    assert [g.nbytes for g in loop.groups] == [1024000, 6291456, 6291456, 1024000]
    assert loop.waits == (0, 0, 0, 1)
    assert "runs once over 4 groups, whole, of 1024000 to 6291456 bytes" in str(
        schedule
    )


def test_a_loop_begins_and_ends_with_its_smallest():
    """When nothing else is stored or loaded; the largest are beside each other."""
    shapes = [(rows, 1024) for rows in (1024, 64, 512, 64, 1024, 512)]
    schedule, names = plan_of(optax.adam(1e-3), stacked(*shapes), slice_axis=0)
    (loop,) = schedule.loops
    rows = [g.nbytes // (2 * 4 * 1024) for g in loop.groups]
    assert rows == [64, 512, 1024, 1024, 512, 64]
    assert loop.waits == (0, 0, 0, 2, 3, 3)
    # Where none is more than twice another, last layer first.
    alike = [(rows, 1024) for rows in (1024, 512, 1024, 512)]
    _, names = plan_of(optax.adam(1e-3), stacked(*alike), slice_axis=0)
    assert names == [["w3"], ["w2"], ["w1"], ["w0"]]


def test_a_group_that_outweighs_all_others_has_a_loop_of_its_own():
    """In one with others each of its slices would wait for the one before."""
    params = stacked((24, 256, 1024), (24, 256, 256))
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=10 << 20)
    assert [len(loop.groups) for loop in schedule.loops] == [1, 1]


def test_a_loop_that_another_shape_interrupts_goes_on():
    """Groups in the order of layers: those of odd shapes have loops of their own."""
    params = stacked(*[(2048, 1024), (24, 2048)] * 6)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0)
    assert [(len(loop.groups), loop.turns) for loop in schedule.loops] == [
        (6, 1),
        (6, 2),
    ]


def test_slices_need_not_fill_a_wide_window():
    """No more than three of 16 MiB are in flight."""
    params = stacked(*[(4096, 4096)] * 4)
    schedule, _ = plan_of(
        optax.adam(1e-3), params, slice_axis=0, window_bytes=256 << 20
    )
    (loop,) = schedule.loops
    assert loop.slice_bytes == (16 << 20,) * 4
    assert loop.waits == (0, 0, *range(29), 31)


def test_one_group_unrolls_its_loop():
    """Nothing overlaps from one iteration to the next."""
    schedule, _ = plan_of(
        optax.adam(1e-3), stacked((32, 64, 128)), slice_axis=0, window_bytes=1
    )
    assert [(s.turns, s.unrolled) for s in schedule.loops] == [(32, 32)]


def test_rows_that_do_not_divide_leave_a_last_slice():
    """97 layers, in seven slices of 13 and one of 6."""
    params = stacked((97, 64, 256))
    schedule, _ = plan_of(
        optax.adam(1e-3), params, slice_axis=0, window_bytes=16 * 2 * 64 * 256 * 4
    )
    assert [(s.turns, s.rows) for s in schedule.loops] == [(7, (13,))]


def test_loops_hold_32_groups():
    """More would cost compile time and gain a percent."""
    params = stacked(*[(2048, 1024)] * 40)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0)
    assert [len(loop.groups) for loop in schedule.loops] == [32, 8]


@pytest.mark.parametrize(
    ("tx", "rows", "parts"),
    [
        (optax.adam(1e-3), 512, [1, 1]),
        (optax.adam(1e-3), 64, [2]),  # of 256 KiB each, not worth a kernel more
        (optax.lion(1e-3), 512, [1]),
        (optax.amsgrad(1e-3), 512, [2, 1]),
        (optax.rmsprop(1e-3, momentum=0.9), 512, [1, 1]),
    ],
)
def test_half_of_a_group_is_stored_beside_the_other_halfs_loads(tx, rows, parts):
    """Where what is loaded first suffices for a store; the update comes last."""
    schedule, _ = plan_of(tx, stacked((rows, 1024)), slice_axis=0)
    (group,) = schedule.groups
    assert [len(part.loads) for part in group.parts] == parts
    assert tuple(i for part in group.parts for i in part.loads) == group.loads
    stored = [part.outputs for part in group.parts]
    assert sorted(sum(stored, ())) == sorted(group.outputs)
    homes = dict(zip(group.outputs, group.homes, strict=True))
    for part in group.parts[:-1]:
        assert {homes[k] for k in part.outputs} <= set(part.loads)


@pytest.mark.parametrize(
    ("shape", "dtype", "unit"),
    [
        ((24, 16, 64), jnp.float32, 1),  # 24 rows would fill lanes even less
        ((128, 4, 32), jnp.float32, 128),  # a TPU puts the 128 into the lanes
        ((64, 256), jnp.float32, 8),
        ((64, 256), jnp.bfloat16, 16),
        ((24, 4, 128), jnp.bfloat16, 16),
        ((24, 16, 128), jnp.bfloat16, 1),
        ((4096,), jnp.float32, 1024),
    ],
)
def test_slices_are_whole_tiles(shape, dtype, unit):
    """What a v5e's compiler rejects otherwise."""
    tx = optax.trace(0.9)
    schedule, _ = plan_of(tx, stacked(shape, dtype=dtype), slice_axis=0, window_bytes=1)
    if shape[0] < 2 * unit:
        assert schedule.whole[0].whole_because == f"{shape[0]} rows, in units of {unit}"
    else:
        assert schedule.groups[0].unit == unit
