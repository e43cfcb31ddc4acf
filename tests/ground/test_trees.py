"""Paths of leaves, and how messages name them."""

import collections

import jax.numpy as jnp
import pytest

from optax_offload import _trees

Pair = collections.namedtuple("Pair", ["left", "right"])


def test_paths_and_leaves():
    """Keys, positions and names, with slashes between; None is no leaf."""
    tree = {"b": [1, Pair(2, {"c": 3})], "a": None}
    assert _trees.leaves_with_paths(tree) == [
        ("b/0", 1),
        ("b/1/left", 2),
        ("b/1/right/c", 3),
    ]
    assert _trees.leaves_with_paths(7) == [("", 7)]
    assert _trees.leaves_with_paths({}) == []


def test_paths_of_keys_that_hold_a_newline_or_a_slash():
    """The path is the key's own text, also where two leaves then have the same path."""
    tree = {"a\nb": 1, "c/d": 2, "c": {"d": 3}}
    assert [path for path, _ in _trees.leaves_with_paths(tree)] == [
        "a\nb",
        "c/d",
        "c/d",
    ]


def test_listed_names_the_first_and_counts_the_rest():
    """A message names five leaves and says how many more there are."""
    assert _trees.listed([]) == ""
    assert _trees.listed(["a", "b"]) == "'a', 'b'"
    assert _trees.listed(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"
    assert _trees.listed(list("abc"), most=1) == "'a' and 2 more"
    assert _trees.listed(["a\nb"]) == r"'a\nb'", "on one line"


def test_nearest_paths_first():
    """A typing mistake shows the path that was meant first, and each path once."""
    paths = ["0/count", "0/mu/dense/kernel", "0/nu/dense/kernel", "0/nu/dense/kernel"]
    text = _trees.nearest(r".*/muu/.*kernel", paths)
    assert text == (
        "Nearest paths: '0/mu/dense/kernel', '0/nu/dense/kernel', '0/count'"
    )


def test_nearest_of_many_paths():
    """Those that are not shown are counted."""
    text = _trees.nearest("w7", [f"w{i}" for i in range(9)], most=2)
    assert text == "Nearest paths: 'w7', 'w0' (7 more)"


@pytest.mark.parametrize("pattern", ["", ".*", r"\d+", "("])
def test_nearest_to_a_pattern_without_words(pattern):
    """There is nothing to go by: the paths in order."""
    assert _trees.nearest(pattern, ["b", "a"]) == "Nearest paths: 'a', 'b'"


def test_nearest_in_an_empty_tree():
    """There are no paths to name."""
    assert _trees.nearest("a", []) == "The tree has no leaves"


def test_no_match_message():
    """The pattern, and the nearest paths."""
    message = _trees.no_match_message("nuu", ["nu", "mu"])
    assert message == "pattern 'nuu' matches no leaf. Nearest paths: 'nu', 'mu'"


def test_arrays_are_leaves():
    """As they are: the same object."""
    x = jnp.ones(3)
    ((path, leaf),) = _trees.leaves_with_paths({"x": x})
    assert path == "x"
    assert leaf is x
