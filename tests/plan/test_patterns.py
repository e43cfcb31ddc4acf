"""Families of leaves, their order, and the search for the fewest."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_offload._plan import patterns

MIB = 2**20


def leaf(path, nbytes, *, axis: int | None = 0, stacked=False, devices=1):
    return patterns.Leaf(path, nbytes, (nbytes or 0) // devices, axis, stacked)


def test_families_are_paths_but_for_numbers():
    """Layers in a list are one family; mu and nu are two."""
    leaves = [leaf(f"0/{m}/layers_{i}/w", MIB) for m in ("mu", "nu") for i in range(12)]
    found = patterns.families(leaves)
    assert [f.pattern for f in found] == [
        r"\d+/mu/layers_\d+/w",
        r"\d+/nu/layers_\d+/w",
    ]
    assert [f.nbytes_per_device for f in found] == [12 * MIB] * 2
    assert all(re.fullmatch(f.pattern, x.path) for f in found for x in f.leaves)


@pytest.mark.parametrize("path", ["0/mu/a.b+c", "0/mu/['x']", "0/mu/w 1", "0/µ/w"])
def test_patterns_match_their_own_path(path):
    """Whatever a path has in it."""
    assert re.fullmatch(patterns.pattern_of(path), path)
    assert not re.fullmatch(patterns.pattern_of("0/mu/a.b"), "0/mu/axb")


def test_order():
    """Sliceable before whole, stacked before matrices, large before small."""
    found = patterns.families(
        [
            leaf("whole", 9 * MIB, axis=None),
            leaf("small", MIB),
            leaf("large", 4 * MIB),
            leaf("stacked", 2 * MIB, stacked=True),
        ]
    )
    assert [f.pattern for f in found] == ["stacked", "large", "small", "whole"]


def test_what_cannot_move_or_is_small_is_left_out():
    """As the rules would leave it."""
    leaves = [leaf("key", None), leaf("count", 4), leaf("w", 65536), leaf("b", 65535)]
    assert [f.pattern for f in patterns.families(leaves)] == ["w"]
    assert len(patterns.families(leaves, min_bytes=4)) == 3


def test_an_axis_is_of_all_leaves():
    """One that is sharded elsewhere keeps the others from an axis in common."""
    (family,) = patterns.families([leaf("w0", MIB), leaf("w1", MIB, axis=1)])
    assert family.slice_axis is None


class Oracle:
    """A peak from which each position takes a share of its size."""

    def __init__(self, fixed, sizes, saved):
        self.fixed, self.sizes, self.saved = fixed, sizes, saved
        self.asked = []

    def __call__(self, choice):
        assert choice not in self.asked, "nothing is compiled twice"
        self.asked.append(choice)
        gone = sum(self.sizes[i] * self.saved[i] // 100 for i in choice)
        return self.fixed + sum(self.sizes) - gone


@given(
    fixed=st.integers(0, 1000),
    budget=st.integers(0, 3000),
    families=st.lists(
        st.tuples(st.integers(1, 100), st.integers(50, 150)), max_size=40
    ),
)
def test_fewest(fixed, budget, families):
    """Nothing if it fits; else no more than the shortest prefix, in few compiles."""
    families.sort(reverse=True)
    sizes = [size for size, _ in families]
    used = Oracle(fixed, sizes, [saved for _, saved in families])
    choice = patterns.fewest(sizes, used, budget)

    def peak(positions):
        oracle = Oracle(used.fixed, used.sizes, used.saved)
        return oracle(frozenset(positions))

    n = len(sizes)
    prefixes = [k for k in range(n + 1) if peak(range(k)) <= budget]
    if not prefixes:
        assert choice is None
        assert len(used.asked) <= 2
        return
    shortest = prefixes[0]
    assert choice is not None
    assert choice in used.asked, "what is chosen has been compiled"
    assert peak(choice) <= budget
    assert sum(sizes[i] for i in choice) <= sum(sizes[:shortest])
    assert choice == frozenset(range(shortest)) or choice >= frozenset(
        range(shortest - 1)
    )
    if shortest == 0:
        assert len(used.asked) == 1
    assert len(used.asked) <= 2 + 3 * n.bit_length() + 2


def test_a_straight_line_takes_four():
    """Interpolation hits at once, and the one before it is the proof."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    choice = patterns.fewest(sizes, used, 31 + sum(sizes) - 42)
    assert choice == frozenset(range(6))
    assert len(used.asked) == 4


def test_smaller_ones_stand_in_for_the_last():
    """Where 3 are missing, two of 2 are moved and not one of 7."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    choice = patterns.fewest(sizes, used, 31 + sum(sizes) - 45)
    assert choice == frozenset([*range(6), 9, 10])


def test_stand_ins_that_do_not_suffice():
    """What saves less than its size is made up for once, or given up."""
    saved = [100] * 3 + [90] * 6
    sizes = [2000] * 3 + [500, 400, 300, 200, 200, 100]
    used = Oracle(0, sizes, saved)
    found = patterns.fewest(sizes, used, sum(sizes) - 2500)
    assert found == frozenset([0, 3, 8])
    hopeless = Oracle(0, sizes, [100] * 3 + [10] * 6)
    assert patterns.fewest(sizes, hopeless, sum(sizes) - 2500) == frozenset([0, 1])


def test_least_is_exact_among_few():
    """The smallest sum in the range, of up to three."""
    sizes = [50, 11, 7, 5, 3]
    for least, below in itertools.product(range(1, 24), (10, 20, 40)):
        sums = [
            sum(c)
            for n in (1, 2, 3)
            for c in itertools.combinations(sizes[1:], n)
            if least <= sum(c) < below
        ]
        found = patterns._least(sizes, range(1, 5), least, below)
        assert sum(sizes[i] for i in found or ()) == min(sums, default=0)
