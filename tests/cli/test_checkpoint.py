"""Reading the leaves of an Orbax checkpoint, and those under a path."""

import jax
import jax.numpy as jnp
import pytest
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


def test_nothing_is_there(tmp_path):
    """Where a checkpoint was looked for."""
    with pytest.raises(
        FileNotFoundError, match="no Orbax checkpoint: there is no _MET"
    ):
        checkpoint.leaves(tmp_path)


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
    message = r"nothing is under 'opt' in the checkpoint; there is opt_state/1, opt_st"
    with pytest.raises(ValueError, match=message):
        checkpoint.under(LEAVES, "opt")
