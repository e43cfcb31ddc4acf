"""Which groups share a loop, and which have their own."""

import pytest

from optax_offload._rows import RowLocal
from optax_offload._schedule import Group, Loop, Part
from optax_offload._schedule.updates import sharing
from optax_offload._schedule.updates.loops import (
    UPDATES_IN_AN_ITERATION,
    fastest,
    in_short_iterations,
)
from optax_offload._schedule.updates.sharing import MOST_UNFILLED_LOOPS, stages

pytestmark = pytest.mark.usefixtures("runs_once")

MIB = 2**20


def group(number, rows, nbytes, *, in_place=True, parts=1):
    """A group of one leaf, of so many rows."""
    local = RowLocal((), rows, {}, (), ())
    part = Part((number,), (number,), local)
    return Group(
        loads=(number,),
        targets=(),
        equations=(),
        nbytes=nbytes,
        moved_bytes=nbytes,
        row_local=local if in_place else None,
        in_place=in_place,
        parts=(part,) * parts,
    )


def loads(found):
    """The inputs that each stage loads, groups without a loop in brackets."""
    return [
        [n for g in x.groups for n in g.loads] if isinstance(x, Loop) else x.loads
        for x in found
    ]


def test_small_groups_share_a_loop():
    """Alone each would take a loop's time, for little to move."""
    groups = [group(n, 16, 64 * 2**10) for n in range(4)]
    assert loads(stages(groups, 16 * MIB)) == [[0, 1, 2, 3]]


def test_large_groups_have_a_loop_each():
    """Whose gradient need not be kept for the others."""
    groups = [group(n, 64, 64 * MIB, parts=2) for n in range(3)]
    assert loads(stages(groups, 16 * MIB)) == [[0], [1], [2]]


def test_large_groups_share_where_they_would_take_much_longer_alone():
    """In one part a slice is loaded only when the one before is stored."""
    groups = [group(n, 64, 64 * MIB) for n in range(3)]
    assert loads(stages(groups, 16 * MIB)) == [[0, 1, 2]]


def test_large_groups_share_where_all_gradients_are_there():
    """There is no gradient left that could be used up earlier."""
    groups = [group(n, 64, 64 * MIB, parts=2) for n in range(3)]
    (loop,) = stages(groups, 16 * MIB, at_once=True)
    assert isinstance(loop, Loop)
    assert sorted(n for g in loop.groups for n in g.loads) == [0, 1, 2]


def test_groups_without_buffers_are_in_no_loop():
    """They stay themselves, in their place."""
    groups = [group(0, 16, MIB, in_place=False), group(1, 16, 64 * MIB)]
    for at_once in (False, True):
        found = stages(groups, 16 * MIB, at_once)
        assert found[0] is groups[0]
        assert loads(found) == [(0,), [1]]


def test_a_full_loop_takes_no_more():
    """The next group begins another."""
    count = UPDATES_IN_AN_ITERATION + 3
    groups = [group(n, 16, 2**10) for n in range(count)]
    found = loads(stages(groups, 16 * MIB, at_once=True))
    assert [len(x) for x in found] == [UPDATES_IN_AN_ITERATION, 3]
    assert sorted(n for x in found for n in x) == list(range(count))


def test_each_group_is_in_one_stage():
    """Of many shapes too: no group is lost when the first unfilled loop is closed."""
    sizes = [3, 5, 7, 11, 13, 17, 19]
    assert len(sizes) > MOST_UNFILLED_LOOPS
    groups = [
        group(n, sizes[n % len(sizes)] * 8, sizes[n % len(sizes)] * 24 * MIB)
        for n in range(2 * len(sizes))
    ]
    found = stages(groups, 16 * MIB, at_once=True)
    every = [n for x in loads(found) for n in x]
    assert sorted(every) == list(range(len(groups)))


def test_nothing_to_do():
    """No group makes no stage."""
    assert stages([], MIB) == []
    assert stages([], MIB, at_once=True) == []


@pytest.mark.parametrize(
    ("leaves", "updates"), [(1, 16), (32, 16), (33, 8), (100, 4), (300, 2)]
)
def test_many_loops_have_short_iterations(leaves, updates):
    """All together have so many updates as compile in a reasonable time."""
    groups = [group(n, 64, 512 * MIB) for n in range(leaves)]
    apart = [loop for g in groups if (loop := fastest([g], 16 * MIB))]
    assert {loop.unroll for loop in apart} == {16}
    found = [x for x in in_short_iterations(apart, 16 * MIB) if isinstance(x, Loop)]
    assert [loop.unroll for loop in found] == [updates] * leaves
    assert [x.groups for x in found] == [x.groups for x in apart]
    assert {(x.slices, len(x.waits)) for x in found} == {(32, updates)}


def test_loops_are_looked_for_once_for_like_groups(monkeypatch):
    """Of six hundred leaves there are as many loops as groups in the largest one."""
    asked = []

    def counted(groups, window_bytes):
        asked.append(len(groups))
        return fastest(groups, window_bytes)

    monkeypatch.setattr(sharing, "fastest", counted)
    found = stages([group(n, 16, 64 * 2**10) for n in range(600)], 16 * MIB, True)
    most = UPDATES_IN_AN_ITERATION
    assert loads(found) == [
        [*range(n, min(n + most, 600))] for n in range(0, 600, most)
    ]
    assert sorted(asked) == [*range(1, most + 1)]


def test_loops_over_like_groups_are_those_found_for_each(monkeypatch):
    """In their order too, where some groups are larger than others."""
    sizes = [(16, 64 * 2**10, 1), (64, MIB, 2), (128, 3 * MIB, 1), (64, MIB, 1)]
    groups = [
        group(n, rows, nbytes, parts=parts)
        for n, (rows, nbytes, parts) in enumerate(sizes * 40)
    ]
    found = stages(groups, 16 * MIB, True)
    monkeypatch.setattr(Group, "measures", property(id))
    assert found == stages(groups, 16 * MIB, True)
    assert len(found) > 4
