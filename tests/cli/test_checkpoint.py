"""Reading the leaves of an Orbax checkpoint, and those under a path."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_offload.cli import checkpoint

ocp = pytest.importorskip("orbax.checkpoint")


def saved(path, tree):
    """A tree, saved."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def test_leaves_have_shapes_bytes_and_shardings(tmp_path):
    """As they were when they were saved."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("x")))
    tree = {"mu": {"w": sharded}, "count": jnp.int32(3)}
    found = {x.path: x for x in checkpoint.leaves(saved(tmp_path / "saved", tree))}
    assert found.keys() == {"count", "mu/w"}
    mu = found["mu/w"]
    assert (mu.shape, mu.dtype, mu.nbytes) == ((4, 3), "float32", 48)
    assert mu.sharding == "P('x',)"
    assert (found["count"].shape, found["count"].nbytes) == ((), 4)


def test_boxes_are_no_part_of_a_path(tmp_path):
    """As rules see it: what stands alone under such a name was in a box."""
    variable = nnx.Param(jnp.ones(2))
    tree = {"nnx": variable, "two": {"value": jnp.ones(1), "other": jnp.ones(1)}}
    path = tmp_path / "saved"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    paths = [x.path for x in checkpoint.leaves(path)]
    assert sorted(paths) == ["nnx", "two/other", "two/value"]


def test_the_last_step_is_the_one_of_the_largest_number(tmp_path):
    """Not of the last name: 9 is before 10."""
    for step in ("9", "10", "2"):
        item = tmp_path / step / "default"
        item.mkdir(parents=True)
        (item / "_METADATA").touch()
    assert checkpoint._item(tmp_path) == tmp_path / "10" / "default"
    assert checkpoint._item(tmp_path / "2") == tmp_path / "2" / "default"


def test_nothing_is_there(tmp_path):
    """Where a checkpoint was looked for."""
    with pytest.raises(
        FileNotFoundError, match=r"is not an Orbax checkpoint: no _METADATA"
    ):
        checkpoint.leaves(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "_METADATA is damaged: it is not JSON"),
        ('{"tree_meta', "_METADATA is damaged: it is not JSON"),
        ("[]", "_METADATA is damaged: it has no table 'tree_metadata'"),
        ('{"tree_metadata": null}', "it has no table 'tree_metadata'"),
        (
            '{"tree_metadata": {"w": 3}}',
            "lists 1 leaves, but Orbax can read none of them",
        ),
        (
            """{"tree_metadata": {"w": {"key_metadata": []}}}""",
            r"Orbax cannot read it \(KeyError: 'value_metadata'\). Name another step",
        ),
    ],
)
def test_damaged_metadata(tmp_path, text, message):
    """What is wrong with which file, rather than a checkpoint of no leaves."""
    path = saved(tmp_path / "saved", {"w": jnp.ones(2)})
    (path / "_METADATA").write_text(text)
    with pytest.raises(ValueError, match=message):
        checkpoint.leaves(path)


LEAVES = [
    checkpoint.SavedLeaf(path, (2,), "float32", 8, "single device")
    for path in ("opt_state/1/0/mu/w", "opt_state/10/mu/w", "params/w")
]


@pytest.mark.parametrize("prefix", ["opt_state/1", "/opt_state/1/"])
def test_under_a_path(prefix):
    """Whole parts of it: 10 is not under 1."""
    assert checkpoint.under(LEAVES, prefix) == [("0/mu/w", 8)]


def test_under_no_path():
    """All of them."""
    assert len(checkpoint.under(LEAVES, "")) == 3


def test_under_what_is_not_there():
    """What there is instead."""
    message = r"the checkpoint has nothing under 'opt'; it has opt_state/1, opt_st"
    with pytest.raises(ValueError, match=message):
        checkpoint.under(LEAVES, "opt")
