"""Leaves on disk are found again by their names, in another process too."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_offload as oo

pytest.importorskip("tensorstore", reason="needs the extra disk")


def to_disk(tree, directory, include=".*"):
    """Writes a tree to disk, and lets go of it, as if its process had ended."""
    there = oo.offload_states(
        tree, include, memory_kind="disk", directory=directory, block=True
    )
    del there
    gc.collect()


def colliding():
    """Two leaves have the path a/b."""
    return {"a/b": jnp.ones((2, 3)), "a": {"b": jnp.zeros((2, 3)), "c": jnp.ones(4)}}


def test_two_leaves_of_the_same_path(tmp_path):
    """They are told apart by their keys."""
    template = oo.eval_shape(colliding)
    to_disk(colliding(), tmp_path)
    back = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(back["a/b"], np.ones((2, 3)))
    np.testing.assert_array_equal(back["a"]["b"], np.zeros((2, 3)))
    assert not list(tmp_path.iterdir())


def test_one_of_two_leaves_of_the_same_path(tmp_path):
    """What is there is given to the leaf that it is of; the other is not there."""
    tree = colliding()
    del tree["a/b"]
    to_disk(tree, tmp_path)
    with pytest.raises(ValueError, match="does not fit the tree: 'a/b' is not there"):
        oo.reload_states(oo.eval_shape(colliding), directory=tmp_path)
    template = oo.eval_shape(colliding)
    del template["a/b"]
    back = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(back["a"]["b"], np.zeros((2, 3)))


def test_containers_may_be_others(tmp_path):
    """Where paths differ, they are enough: an attribute is as good as a key."""
    to_disk({"a": [jnp.ones(3)]}, tmp_path)
    template = oo.eval_shape(lambda: {"a": {"0": jnp.ones(3)}})
    back = oo.reload_states(template, directory=tmp_path)
    np.testing.assert_array_equal(back["a"]["0"], np.ones(3))


def test_the_same_array_at_two_places(tmp_path):
    """Written once, and there at both; one array again where it goes to one place."""

    def make():
        return {"embed": jnp.ones((2, 3)), "head": jnp.ones((2, 3)), "w": jnp.ones(3)}

    tree = make()
    tree["head"] = tree["embed"]
    to_disk(tree, tmp_path)
    assert len(list(tmp_path.glob("state-*/[0-9]*"))) == 2
    back = oo.reload_states(oo.eval_shape(make), directory=tmp_path, donate=False)
    assert back["embed"] is back["head"]
    template = oo.eval_shape(make)
    template["head"] = oo.set_memory_kind(template["head"], "", "pinned_host")
    back = oo.reload_states(template, directory=tmp_path)
    assert back["head"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(back["head"], back["embed"])
    assert not list(tmp_path.iterdir())


class SameText:
    """Keys that are not equal, and say the same of themselves."""

    def __init__(self, order):
        self.order = order

    def __lt__(self, other):
        return self.order < other.order

    def __repr__(self):
        return "key"


def test_leaves_that_cannot_be_told_apart(tmp_path):
    """Refused before anything is written or freed."""
    tree = {SameText(0): jnp.ones(3), SameText(1): jnp.zeros(3)}
    message = r"^'key': several leaves have this path, .* Nothing was moved\. Rename"
    with pytest.raises(ValueError, match=message):
        oo.offload_states(tree, memory_kind="disk", directory=tmp_path / "x")
    assert not any(x.is_deleted() for x in jax.tree.leaves(tree))
    assert not (tmp_path / "x").exists()


def test_paths_with_a_newline(tmp_path):
    """And other text that is no file name."""

    def make():
        return {"a\nb": jnp.ones(3), "\0": jnp.zeros(3), "../..": jnp.ones(2)}

    to_disk(make(), tmp_path)
    back = oo.reload_states(oo.eval_shape(make), directory=tmp_path)
    assert {name: x.shape for name, x in back.items()} == {
        "a\nb": (3,),
        "\0": (3,),
        "../..": (2,),
    }
