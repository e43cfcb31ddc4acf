"""Budgets, and what a process has to set."""

import pytest

from optax_offload import aot
from optax_offload._plan import budget

H100 = aot.Target("h100")


def test_default_budget():
    """The memory less the reserve that the docstring names."""
    assert budget.default_budget_bytes(H100) == int(84942979072 * 0.9)
    v5e = aot.Target("v5e:2x2")
    assert budget.default_budget_bytes(v5e) == int(v5e.memory_bytes * 0.98)


@pytest.mark.parametrize("bytes_", [0, -1, 84942979073, "70GiB", 7e10])
def test_budgets_that_are_none(bytes_):
    """The message has what is allowed."""
    message = (
        rf"budget_bytes is {bytes_!r}; it must be a whole number of bytes, at least 1 "
        r"and at most what 'h100' has, 84942979072 \(79\.11 GiB\)"
    )
    with pytest.raises(ValueError, match=message):
        budget.checked_budget(bytes_, None, H100)


def test_a_budget_is_taken_as_it_is():
    """Without one, the default."""
    assert budget.checked_budget(7, None, H100).device_bytes == 7
    default = budget.checked_budget(None, None, H100)
    assert default.device_bytes == budget.default_budget_bytes(H100)
    assert default.holds(default.device_bytes, 2**60)
    assert not default.holds(default.device_bytes + 1, 0)


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        ("h100", 1),
        ("h100:8", 8),
        ("h100:16", 8),
        ("v5e:2x4", 8),
        ("v5e:4x4", 4),
        ("v5p:2x2x2", 4),
        ("tpu7x:2x2x2", 8),
    ],
)
def test_a_host_is_shared_by_its_devices(target, devices):
    """Each has its share of it."""
    target = aot.Target(target)
    assert target.devices_per_host == devices
    found = budget.checked_budget(None, 800, target)
    assert found.host_bytes == 800 // devices
    assert found.holds(0, 800 // devices)
    assert not found.holds(0, 800 // devices + 1)


def test_a_host_without_memory():
    """Zero says that nothing may move; less is a mistake."""
    assert budget.checked_budget(None, 0, H100).host_bytes == 0
    for wrong in (-1, "64GiB"):
        message = (
            f"host_memory_bytes is {wrong!r}; .* bytes, at least 0: .* or None for"
        )
        with pytest.raises(ValueError, match=message):
            budget.checked_budget(None, wrong, H100)


@pytest.mark.parametrize(
    ("target", "used", "moved", "expected"),
    [
        ("h100", 0.5, 0, {}),
        ("h100", 0.74, 0, {"XLA_CLIENT_MEM_FRACTION": "0.76"}),
        ("h100", 0.895, 0, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ("h100", 0.5, 90, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "99"}),
        ("h100:8", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("h100:16", 0.5, 10, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "88"}),
        ("v5e:2x2", 0.9, 90, {}),
    ],
)
def test_environment(target, used, moved, expected):
    """What JAX does not give by itself has to be asked for."""
    target = aot.Target(target)
    used_bytes = round(used * target.memory_bytes)
    assert budget.environment(target, used_bytes, moved * 2**30) == expected
