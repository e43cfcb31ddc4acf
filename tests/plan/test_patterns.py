"""Patterns of leaves, and the order in which they are moved."""

import re

import pytest

from optax_offload._plan import patterns

MIB = 2**20


def leaf(path, nbytes, *, axis: int | None = 0, stacked=False, devices=1):
    """A leaf of so many bytes."""
    return patterns.Leaf(path, nbytes, (nbytes or 0) // devices, axis, stacked)


def test_a_pattern_is_a_path_but_for_numbers():
    """Layers in a list have one pattern; mu and nu have two."""
    leaves = [leaf(f"0/{m}/layers_{i}/w", MIB) for m in ("mu", "nu") for i in range(12)]
    found = patterns.leaf_patterns(leaves)
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
    found = patterns.leaf_patterns(
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
    assert [f.pattern for f in patterns.leaf_patterns(leaves)] == ["w"]
    assert len(patterns.leaf_patterns(leaves, min_bytes=4)) == 3


def test_an_axis_is_of_all_leaves():
    """One that is sharded elsewhere keeps the others from an axis in common."""
    (pattern,) = patterns.leaf_patterns([leaf("w0", MIB), leaf("w1", MIB, axis=1)])
    assert pattern.slice_axis is None
