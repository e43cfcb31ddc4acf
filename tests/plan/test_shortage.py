"""What is said when nothing fits: by how much, and what would help."""

from optax_offload import aot
from optax_offload._plan.candidates import CompiledCandidate
from optax_offload._plan.shortage import does_not_fit

GIB = 2**30
H100 = aot.Target("h100")


def error(state=0, used=100, **parts):
    """The error of a step that needs so many GiB of 80, with all state moved."""
    named = {name: n * GIB for name, n in parts.items()}
    everything = CompiledCandidate(0, used * GIB, None, False, 1.0, named)
    return does_not_fit(H100, 80 * GIB, everything, state * GIB)


def test_numbers():
    """By how much, of how much, and of what it is made."""
    found = error(parameters=20, gradients=20, activations=60, state=0)
    assert "on 'h100' even with all state moved: short by 20.00 GiB of 80.00" in str(
        found
    )
    assert "It needs 100.00 GiB: parameters 20.00 GiB, gradients 20.00" in str(found)
    assert (found.used_bytes, found.limit_bytes) == (100 * GIB, 80 * GIB)


def test_only_what_is_enough_is_proposed():
    """More devices always are; the rest where they free more than is missing."""
    devices = "- more devices: parameters, gradients and batch sharded over at least 2"
    few = str(error(parameters=10, gradients=10, activations=10))
    assert few.split("What would help:\n")[1].startswith(devices)
    remat = str(error(activations=60))
    assert "would have to go to 40.00 GiB" in remat
    assert "bfloat16 parameters" not in remat
    assert "- bfloat16 parameters" in str(error(parameters=30, gradients=30))
    assert "rules that let go of the 30.00 GiB of state" in str(error(state=30))
    assert "rules that let go" not in str(error(state=10))


def test_state_that_is_loaded_at_once():
    """It is no activation, and remat would not help."""
    text = str(error(**{"state loaded at once": 60}))
    assert "- an optimizer that nothing joins all state of: 60.00 GiB of it is" in text
    assert "remat" not in text
    assert "joins" not in str(error(**{"state loaded at once": 10}))
