"""Paths of leaves, and how messages name them."""

import collections
import re
import sys
import types
import typing

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from optax_offload._ground import trees

Pair = collections.namedtuple("Pair", ["left", "right"])


def test_paths_and_leaves():
    """Keys, positions and names, with slashes between; None is no leaf."""
    tree = {"b": [1, Pair(2, {"c": 3})], "a": None}
    assert trees.leaves_with_paths(tree) == [
        ("b/0", 1),
        ("b/1/left", 2),
        ("b/1/right/c", 3),
    ]
    assert trees.leaves_with_paths(7) == [("", 7)]
    assert trees.leaves_with_paths({}) == []


def test_paths_of_keys_that_hold_a_newline_or_a_slash():
    """The path is the key's own text, also where two leaves then have the same path."""
    tree = {"a\nb": 1, "c/d": 2, "c": {"d": 3}}
    assert [path for path, _ in trees.leaves_with_paths(tree)] == [
        "a\nb",
        "c/d",
        "c/d",
    ]


class NamedArray:
    """As haliax has it: registered without keys."""

    def __init__(self, array, axes=()):
        self.array, self.axes = array, axes


jax.tree_util.register_pytree_node(
    NamedArray, lambda x: ((x.array,), x.axes), lambda axes, xs: NamedArray(*xs, axes)
)


class Pairing(nn.Partitioned):
    """A box of two values."""

    other: typing.Any = 0


def test_boxes_are_no_part_of_a_path(monkeypatch):
    """Not one in another either; a key of the same name is, and so are two values."""
    monkeypatch.setitem(
        sys.modules, "haliax.core", types.SimpleNamespace(NamedArray=NamedArray)
    )
    tree = {
        "linen": nn.Partitioned({"a": 1, "b": 2}, ("x",)),
        "named": NamedArray(3),
        "nnx": nnx.Param(nn.LogicallyPartitioned(4, ("x",))),
        "none": nnx.Param(None),
        "pairing": Pairing(5, ("x",), other=6),
        "plain": {"value": 7, "array": 8},
    }
    paths = {
        "linen/a": 1,
        "linen/b": 2,
        "named": 3,
        "nnx": 4,
        "pairing/value": 5,
        "pairing/other": 6,
        "plain/array": 8,
        "plain/value": 7,
    }
    assert trees.leaves_with_paths(tree) == list(paths.items())
    assert jax.tree.leaves(tree) == list(paths.values())
    again = trees.map_with_path(lambda _, x, y: x + y, tree, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert jax.tree.leaves(again) == [2 * x for x in jax.tree.leaves(tree)]
    flat, structure = trees.flatten_with_path(tree, is_leaf=trees.is_linen_box)
    wanted = jax.tree.flatten(tree, is_leaf=trees.is_linen_box)
    assert ([x for _, x in flat], structure) == wanted
    assert [trees.path_string(keys) for keys, _ in flat][:3] == [
        "linen",
        "named",
        "nnx",
    ]


def test_listed_names_the_first_and_counts_the_rest():
    """A message names five leaves and says how many more there are."""
    assert trees.listed([]) == ""
    assert trees.listed(["a", "b"]) == "'a', 'b'"
    assert trees.listed(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"
    assert trees.listed(list("abc"), most=1) == "'a' and 2 more"
    assert trees.listed(["a\nb"]) == r"'a\nb'", "on one line"


def test_nearest_paths_first():
    """A typing mistake shows the path that was meant first, and each path once."""
    paths = ["0/count", "0/mu/dense/kernel", "0/nu/dense/kernel", "0/nu/dense/kernel"]
    text = trees.nearest(r".*/muu/.*kernel", paths)
    assert text == (
        "Nearest paths: '0/mu/dense/kernel', '0/nu/dense/kernel', '0/count'"
    )


def test_nearest_of_many_paths():
    """Those that are not shown are counted."""
    text = trees.nearest("w7", [f"w{i}" for i in range(9)])
    assert text == "Nearest paths: 'w7', 'w0', 'w1', 'w2', 'w3' (4 more)"


@pytest.mark.parametrize("pattern", ["", ".*", r"\d+", "("])
def test_nearest_to_a_pattern_without_words(pattern):
    """There is nothing to go by: the paths in order."""
    assert trees.nearest(pattern, ["b", "a"]) == "Nearest paths: 'a', 'b'"


def test_nearest_in_an_empty_tree():
    """There are no paths to name."""
    assert trees.nearest("a", []) == "The tree has no leaves"


def test_no_match_message():
    """The pattern, and the nearest paths."""
    message = trees.no_match_message(re.compile(r"vv\d"), ["nu", "mu"])
    assert message == r"pattern r'vv\d' matches no leaf. Nearest paths: 'mu', 'nu'"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nu", "Write '.*/nu/.*', which matches 2 leaves. Nearest"),
        ("0/mu", "Write '0/mu/.*', which matches 1 leaf. Nearest"),
        ("a/kernel|kernel", "Write '.*/(?:a/kernel|kernel)', which matches 2 leaves."),
        (
            ".*/kernel/value",
            "The box of a framework, such as nnx.Variable, is not part of a path. "
            "Write '.*/kernel', which matches 2 leaves. Nearest",
        ),
        ("kernel/array", "path. Write '.*/kernel', which matches 2"),
        ("(?i)KERNEL", "Nearest paths: "),
        (r"\d+/nuu/a/.*", r"Write r'\d+/nu/a/.*', which matches 1 leaf. Nearest"),
        ("(mu|nu)/a/.*", "Write '.*/(mu|nu)/a/.*', which matches 2 leaves."),
        ("kernl", "Write '.*/kernel', which matches 2 leaves."),
    ],
)
def test_remedy_proposes_a_pattern_that_matches(pattern, message):
    """With what is missing before or behind, no box's key, words as paths have them."""
    leaf = "0/nu/a/kernel"
    paths = ["0/mu/a/kernel", f"{leaf}/codes_int8", "0/nu/b", f"{leaf}/scales"]
    assert message in trees.remedy(re.compile(pattern), paths)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers/.*", r"Write r'layer_\d+/.*', which matches 12 leaves."),
        (".*/kernels", "Write '.*/kernel', which matches 12 leaves."),
        ("layr_3/.*", "Write 'layer_3/.*', which matches 1 leaf."),
        ("heads/.*", "Write 'head_7/.*', which matches 1 leaf."),
    ],
)
def test_remedy_for_layers_with_numbers(pattern, message):
    """All layers are meant where none has a number, or what is there once."""
    paths = [*(f"layer_{i}/kernel" for i in range(12)), "head_7/kernel/bias"]
    assert message in trees.remedy(re.compile(pattern), paths)


def test_arrays_are_leaves():
    """As they are: the same object."""
    x = jnp.ones(3)
    ((path, leaf),) = trees.leaves_with_paths({"x": x})
    assert path == "x"
    assert leaf is x


def test_nearest_paths_of_a_list_of_layers():
    """Each name once, not five leaves of the first layer; of chains each position."""
    names = ["key/bias", "key/kernel", "up/kernel"]
    paths = [f"0/mu/layers/{i}/{name}" for i in range(3) for name in names]
    shown = trees.nearest("layer/kernl", [*paths, "2/mu/layers/0/up/kernel"])
    assert shown == (
        "Nearest paths: '0/mu/layers/0/key/kernel', '0/mu/layers/0/up/kernel', "
        "'2/mu/layers/0/up/kernel', '0/mu/layers/0/key/bias' (6 more)"
    )
