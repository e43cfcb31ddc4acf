"""The search for the largest number that fits."""

import pytest

from benchmarks.memory.search import largest


@pytest.mark.parametrize("fixed", [0, 90, 700])
@pytest.mark.parametrize("each", [1, 7, 40])
@pytest.mark.parametrize("jitter", [0, 13])
@pytest.mark.parametrize("first", [1, 50, 900])
def test_largest_fits_and_one_more_does_not(fixed, each, jitter, first):
    """Also from a bad first guess, and where peaks are not a straight line."""
    tried = []

    def probe(n):
        tried.append(n)
        used = fixed + each * n + n * 7919 % (jitter + 1)
        return used <= 1000, used

    found = largest(probe, 1000, first, end=1200)
    assert found == 0 or probe(found)[0]
    assert not probe(found + 1)[0]
    assert len(tried) == len(set(tried)) + 1 + (found > 0), "nothing is tried twice"
    assert len(tried) <= 25


def test_nothing_fits():
    """Then the answer is 0."""
    assert largest(lambda n: (False, 10 * n), 5, first=8) == 0
