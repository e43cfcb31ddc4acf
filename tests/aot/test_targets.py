"""What can be compiled for: names, memory, meshes."""

import pytest
from jax.sharding import AxisType

from optax_offload import aot
from optax_offload._ground.units import MIB


@pytest.mark.parametrize(
    ("name", "normal", "kind", "device_count"),
    [
        ("v4", "v4:1x1x1", "tpu", 1),
        ("v5e", "v5e:1x1", "tpu", 1),
        ("v5e:16x16", "v5e:16x16", "tpu", 256),
        ("v5p:2x2x2", "v5p:2x2x2", "tpu", 8),
        ("v6e:2x4", "v6e:2x4", "tpu", 8),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", "tpu", 8),
        ("h100", "h100", "gpu", 1),
        ("h100:1", "h100", "gpu", 1),
        ("b200:16", "b200:16", "gpu", 16),
        ("rtx3060", "rtx3060", "gpu", 1),
    ],
)
def test_target_names(name, normal, kind, device_count):
    """A name says the chip and how many; equal targets are equal and hash alike."""
    target = aot.Target(name)
    assert (target.name, target.platform, target.device_count) == (
        normal,
        kind,
        device_count,
    )
    assert target == aot.Target(normal)
    assert hash(target) == hash(aot.Target(normal))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v7", r"Target\('v7'\) names no chip.*v5e.*'v5e:2x4'.*a100-40.*'h100:8'"),
        ("a100", "names no chip.*a100-40, a100-80"),
        ("v5e-4", "names no chip"),
        ("RTX 4090", "Did you mean .*'rtx4090'"),
        ("rtx4080", r"memory: Target\('rtx4090', memory_bytes=16 .*--memory 16GiB"),
        ("mi300x", "AMD's compiler .* only where ROCm is installed"),
        ("h100:2x2", "names no chip"),
        ("", "names no chip"),
        ("v5e:4", "a v5e are a grid of 2 dimensions, as in 'v5e:2x2'"),
        ("v5p:2x2", "a v5p are a grid of 3 dimensions, as in 'v5p:2x2x4'"),
        ("v5e:0x2", "a grid of 2 dimensions"),
        ("h100:0", "0 GPUs; allowed are 1 to 8, or whole hosts of 8"),
        ("h100:12", "12 GPUs; allowed are 1 to 8, or whole hosts of 8"),
    ],
)
def test_target_name_errors(name, message):
    """A name that cannot be is an error that says what can."""
    with pytest.raises(ValueError, match=message):
        aot.Target(name)


@pytest.mark.parametrize("memory_bytes", [0, -1, 2**40])
def test_target_memory_errors(memory_bytes):
    """A target's memory can only be set smaller."""
    with pytest.raises(
        ValueError, match=r"memory_bytes=.*'h100' has 84942979072 bytes"
    ):
        aot.Target("h100", memory_bytes=memory_bytes)


def test_target_memory():
    """A target knows the memory of a device, its chip's or a smaller one."""
    assert aot.Target("v5e:2x2").memory_bytes == 2**34 - 258 * MIB
    assert aot.Target("h100", memory_bytes=2**34).memory_bytes == 2**34


def test_mesh():
    """A target's mesh is abstract and over all its devices."""
    target = aot.Target("v5e:2x4")
    assert target.mesh().shape_tuple == (("x", 8),)
    assert target.mesh(("a", "b")).shape_tuple == (("a", 8), ("b", 1))
    mesh = target.mesh(("a", "b"), shape=(2, 4), axis_types=AxisType.Explicit)
    assert mesh.shape_tuple == (("a", 2), ("b", 4))
    assert mesh.axis_types == (AxisType.Explicit,) * 2


@pytest.mark.parametrize("shape", [(2, 2), (8,)])
def test_mesh_errors(shape):
    """A mesh that leaves devices out, or whose axes do not match, is an error."""
    with pytest.raises(ValueError, match=r"not one of the 8 devices.*multiply to 8"):
        aot.Target("v5e:2x4").mesh(("a", "b"), shape=shape)
