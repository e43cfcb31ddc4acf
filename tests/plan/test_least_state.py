"""The least state that fits, by sums."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from optax_offload._plan import search


class Oracle:
    """A peak from which each position takes a share of its size."""

    def __init__(self, fixed, sizes, saved):
        """Nothing has been asked yet."""
        self.fixed, self.sizes, self.saved = fixed, sizes, saved
        self.asked = []

    def __call__(self, selection):
        """The peak with a selection moved."""
        assert selection not in self.asked, "nothing is compiled twice"
        self.asked.append(selection)
        gone = sum(self.sizes[i] * self.saved[i] // 100 for i in selection)
        return self.fixed + sum(self.sizes) - gone


@settings(deadline=None)
@given(
    fixed=st.integers(0, 1000),
    budget=st.integers(0, 3000),
    shares=st.lists(st.tuples(st.integers(1, 100), st.integers(50, 150)), max_size=40),
)
def test_smallest_that_fits(fixed, budget, shares):
    """Nothing if it fits; else no more than the shortest prefix, in few compiles."""
    shares.sort(reverse=True)
    sizes = [size for size, _ in shares]
    used = Oracle(fixed, sizes, [saved for _, saved in shares])
    selection = search.smallest_that_fits(sizes, used, budget)

    def peak(positions):
        oracle = Oracle(used.fixed, used.sizes, used.saved)
        return oracle(frozenset(positions))

    n = len(sizes)
    prefixes = [k for k in range(n + 1) if peak(range(k)) <= budget]
    if not prefixes:
        assert selection is None
        assert len(used.asked) <= 2
        return
    shortest = prefixes[0]
    assert selection is not None
    assert selection in used.asked, "what is chosen has been compiled"
    assert peak(selection) <= budget
    assert sum(sizes[i] for i in selection) <= sum(sizes[:shortest])
    assert selection == frozenset(range(shortest)) or selection >= frozenset(
        range(shortest - 1)
    )
    if shortest == 0:
        assert len(used.asked) == 1
    assert len(used.asked) <= 2 + 3 * n.bit_length() + 2


def test_a_straight_line_takes_four():
    """Interpolation hits at once, and the one before it is the proof."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    selection = search.smallest_that_fits(sizes, used, 31 + sum(sizes) - 42)
    assert selection == frozenset(range(6))
    assert len(used.asked) == 4


def test_smaller_ones_stand_in_for_the_last():
    """Where 3 are missing, two of 2 are moved and not one of 7."""
    sizes = [7] * 9 + [2] * 9
    used = Oracle(31, sizes, [100] * 18)
    selection = search.smallest_that_fits(sizes, used, 31 + sum(sizes) - 45)
    assert selection == frozenset([*range(6), 9, 10])


def test_stand_ins_that_do_not_suffice():
    """What saves less than its size is made up for once, or given up."""
    saved = [100] * 3 + [90] * 6
    sizes = [2000] * 3 + [500, 400, 300, 200, 200, 100]
    used = Oracle(0, sizes, saved)
    found = search.smallest_that_fits(sizes, used, sum(sizes) - 2500)
    assert found == frozenset([0, 3, 8])
    hopeless = Oracle(0, sizes, [100] * 3 + [10] * 6)
    assert search.smallest_that_fits(sizes, hopeless, sum(sizes) - 2500) == frozenset(
        [0, 1]
    )


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
        found = search.least_sum(sizes, range(1, 5), least, below)
        assert sum(sizes[i] for i in found or ()) == min(sums, default=0)


def test_few_attempts():
    """What was found by then is taken: it fits, and was asked for."""
    sizes = [10] * 64
    for attempts in (1, 2, 3):
        used = Oracle(0, sizes, [1] * 40 + [100] * 24)
        found = search.smallest_that_fits(sizes, used, 500, attempts)
        assert found in used.asked
        assert len(used.asked) <= 2 + attempts
