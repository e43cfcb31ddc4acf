"""Groups in loops: how many slices, how many to an iteration, who waits for whom."""

import optax
import pytest
from updates import plan_of, stacked, traced

from optax_offload._schedule import schedule as scheduled
from optax_offload._schedule.updates.loops import Loop, Remainder

pytestmark = pytest.mark.usefixtures("runs_once")

# All gradients are there before the first loop, so that large groups share it too.
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
UNEQUAL = [(rows, 4096) for rows in (2048, 3072, 2560, 3584)]


def test_groups_of_like_rows_share_a_loop():
    """As many slices as there have to be, and it says so."""
    params = stacked(*[(24, 128, 256), (24, 256, 128)] * 4)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=5 << 20)
    (loop,) = schedule.loops
    # Of 6 MiB of moments each; two slices take at most 5: 3 slices of 2 MiB.
    assert (loop.slices, loop.rows, loop.unroll) == (3, (8,) * 8, 1)
    assert loop.slice_bytes == (2 << 20,) * 8
    # A third slice would make 6 MiB; and the last waits for all others.
    assert loop.waits == (0, 0, *range(1, 6), 7)
    assert not schedule.whole
    assert "loop over 8 groups, in 3 slices of 2.00 MiB, 1 to an iteration" in str(
        schedule
    )


def test_equal_loops_are_one_line():
    """A model's layers in a list have many of them."""
    schedule, _ = plan_of(optax.adam(1e-3), stacked(*[(1792, 1024)] * 70), slice_axis=0)
    assert len(schedule.loops) == 4
    of_a_loop = "groups, each updated whole, of 14.00 MiB"
    told = str(schedule).splitlines()[-2:]
    assert told == [f"3 times: 19 {of_a_loop}", f"13 {of_a_loop}"]


def test_leaves_are_whole_where_two_fit():
    """Of any shapes, in a loop that runs once."""
    params = stacked(*[(24, 128, 256), (1000, 128)] * 2)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=13 << 20)
    (loop,) = schedule.loops
    assert (loop.slices, loop.rows, loop.unroll) == (1, (), 1)
    assert [g.nbytes for g in loop.groups] == [1024000, 6291456, 6291456, 1024000]
    assert loop.waits == (0, 0, 0, 1)
    assert "4 groups, each updated whole, of 1000.00 KiB to 6.00 MiB" in str(schedule)


def test_a_leaf_alone_is_whole_where_two_would_fit():
    """Else its loop, run once, would have all of it on the device at the peak (F63)."""
    params = stacked((1792, 1024))
    for window_mib, slices in ((20, 4), (28, 1)):
        schedule, _ = plan_of(
            optax.adam(1e-3), params, slice_axis=0, window_bytes=window_mib << 20
        )
        (loop,) = schedule.loops
        assert loop.groups[0].nbytes == 14 << 20
        assert loop.slices == slices


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


@pytest.mark.parametrize(
    ("clip", "loops"),
    [(optax.clip_by_global_norm(1.0), 3), (optax.adaptive_grad_clip(0.01), 4)],
)
def test_large_groups_share_loops_where_all_gradients_come_first(clip, loops):
    """As where they are clipped by the norm of all, not by that of each."""
    tx = optax.chain(clip, optax.adam(1e-3))
    schedule, _ = plan_of(tx, stacked(*UNEQUAL), slice_axis=0)
    assert len(schedule.loops) == loops


def test_large_groups_share_loops_in_a_branch():
    """It is a loop itself, which begins when all gradients are there."""
    tx = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    schedule = scheduled(traced(tx, stacked(*UNEQUAL), slice_axis=0))
    assert [len(version.loops) for version in schedule.straights()] == [1, 1]


def test_a_loop_that_another_shape_interrupts_goes_on():
    """Groups in the order of layers: those of odd shapes have loops of their own."""
    params = stacked(*[(2048, 1024), (24, 2048)] * 6)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0)
    assert [(len(loop.groups), loop.slices) for loop in schedule.loops] == [
        (6, 1),
        (6, 2),
    ]


def test_slices_need_not_fill_a_wide_window():
    """No more than three of 16 MiB are in flight."""
    params = stacked(*[(4096, 4096)] * 4)
    schedule, _ = plan_of(CLIPPED, params, slice_axis=0, window_bytes=256 << 20)
    (loop,) = schedule.loops
    assert loop.slice_bytes == (16 << 20,) * 4
    assert (loop.unroll, loop.trip_count) == (4, 2)
    assert loop.waits == (0, 0, *range(13), 15)


def test_one_group_unrolls_its_loop():
    """Nothing overlaps from one iteration to the next; but there are two."""
    schedule, _ = plan_of(
        optax.adam(1e-3), stacked((32, 64, 128)), slice_axis=0, window_bytes=1
    )
    assert [(s.slices, s.unroll) for s in schedule.loops] == [(32, 16)]


def test_rows_that_do_not_divide_leave_a_last_slice():
    """97 layers, in eight slices of 12, four to an iteration, and one of 1."""
    params = stacked((97, 64, 256))
    schedule, _ = plan_of(
        optax.adam(1e-3), params, slice_axis=0, window_bytes=16 * 2 * 64 * 256 * 4
    )
    (loop,) = schedule.loops
    assert (loop.slices, loop.rows, loop.unroll) == (8, (12,), 4)
    assert loop.remainders == (Remainder(group=0, rows=1, first=96),)


def test_one_layer_of_a_prime_number_is_left():
    """Of 61 no number of slices to an iteration divides; of 60 it does."""
    params = stacked((61, 256, 1024))
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=1)
    (loop,) = schedule.loops
    assert (loop.slices, loop.rows, loop.unroll) == (60, (1,), 30)
    assert loop.remainders == (Remainder(group=0, rows=1, first=60),)


@pytest.mark.parametrize("rows", [2, 3, 7, 24, 61, 1000])
@pytest.mark.parametrize("leaves", [1, 4])
def test_a_loop_over_slices_has_two_iterations(rows, leaves):
    """Else no copy engine takes them. What is left is no more than a slice."""
    params = stacked(*[(rows, 64, 1024)] * leaves)
    update = traced(optax.adam(1e-3), params, slice_axis=0)
    for window_bytes in (1, 2**21, 2**24):
        sliced = [x for x in scheduled(update, window_bytes).loops if x.rows]
        assert sliced or window_bytes > 1
        for loop in sliced:
            assert loop.trip_count >= 2
            assert loop.trip_count * loop.unroll == loop.slices
            for rest in loop.remainders:
                assert rest.first == loop.slices * loop.rows[rest.group]
                assert rest.rows <= loop.rows[rest.group]


def test_large_slices_do_not_alternate_with_small_ones():
    """Beside the load of a large slice there would be the store of a small one only."""
    params = stacked((24, 1024, 512), (24, 256, 512))
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0)
    small, large = sorted(schedule.groups, key=lambda group: group.nbytes)

    def cost(*groups):
        return Loop(groups, 12, (2,) * len(groups), 6, ()).cost

    assert cost(small, small) < 2 * cost(small)
    assert cost(small, large) > cost(small) + cost(large)


@pytest.mark.parametrize(("rows", "loops"), [(512, [32, 8]), (2048, [16, 16, 8])])
def test_loops_hold_32_groups(rows, loops):
    """More would cost compile time and gain a percent. Or 256 MiB: gradients wait."""
    params = stacked(*[(rows, 1024)] * 40)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0)
    assert [len(loop.groups) for loop in schedule.loops] == loops
    schedule, _ = plan_of(CLIPPED, params, slice_axis=0)  # All are there anyway.
    assert [len(loop.groups) for loop in schedule.loops] == [32, 8]


def test_the_order_in_a_loop_is_data():
    """Which part waits for which store stands in the schedule, and is printed."""
    params = stacked(*[(512, 1024)] * 3)
    schedule, _ = plan_of(optax.adam(1e-3), params, slice_axis=0, window_bytes=8 << 20)
    (loop,) = schedule.loops
    assert [(step.slice, step.group, step.part) for step in loop.steps] == [
        (0, group, part) for group in range(3) for part in (0, 1)
    ]
    of = [[part.outputs for part in group.parts] for group in loop.groups]
    # Two updates of 4 MiB fit, and the last of a loop waits for the one before.
    assert [step.load_after for step in loop.steps] == [
        *[(), (), (), ()],
        (*of[0][0], *of[1][0]),
        (*of[0][1], *of[1][1]),
    ]
    assert all(step.store_after == () for step in loop.steps), "leaves are whole"


def test_slices_are_stored_in_order():
    """Each part after its like of the update before; of a group alone, in turns."""
    params = stacked(*[(24, 128, 256)] * 2)
    schedule, _ = plan_of(CLIPPED, params, slice_axis=0, window_bytes=5 << 20)
    (loop,) = schedule.loops
    of = [[part.outputs for part in group.parts] for group in loop.groups]
    first, second, third, fourth, *_ = loop.steps
    assert (first.store_after, second.store_after) == ((), ())
    assert (third.store_after, fourth.store_after) == (of[0][0], of[0][1])
    schedule, _ = plan_of(
        optax.adam(1e-3), stacked((32, 512, 1024)), slice_axis=0, window_bytes=1
    )
    (loop,) = schedule.loops
    (one, other) = (part.outputs for part in loop.groups[0].parts)
    stored_after = [step.store_after for step in loop.steps[:4]]
    assert stored_after == [(), one, other, one]
