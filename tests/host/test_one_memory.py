"""Machines of one memory: by their devices' names, and a warning."""

import jax.numpy as jnp
import optax
import pytest

import optax_offload as oo
from optax_offload._host import one_memory as one_memory_

XEON = "Intel(R) Xeon(R) Platinum 8480C"


@pytest.mark.parametrize(
    ("device", "processor", "name"),
    [
        ("NVIDIA GB10", "", "DGX Spark (GB10)"),
        ("Orin", "", "Jetson"),
        ("NVIDIA Thor", "", "Jetson"),
        ("AMD Instinct MI300A", "", "MI300A"),
        ("AMD GPU gfx942", "AMD Instinct MI300A Accelerator", "MI300A"),
        ("Radeon 8060S Graphics", "", "Strix Halo (Ryzen AI Max)"),
        (
            "AMD Radeon Graphics",
            "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S",
            "Strix Halo (Ryzen AI Max)",
        ),
        ("Apple M4", "", "Apple silicon"),
        ("Metal", "", "Apple silicon"),
    ],
)
def test_one_memory(device, processor, name):
    """A name that several have is decided by the host's processor."""
    found = one_memory_.one_memory_of(device, processor)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("device", "processor"),
    [
        ("cpu", "AMD Instinct MI300A Accelerator"),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA GB200", ""),
        ("AMD Instinct MI300X", XEON),
        ("AMD GPU gfx942", XEON),
        ("AMD Radeon Graphics", XEON),
        # A card in a machine whose processor has a GPU too.
        ("AMD Radeon RX 7900 XTX", "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("TPU v5 lite", ""),
        ("", ""),
    ],
)
def test_two_memories(device, processor):
    """Coherent memories are two; a processor alone decides nothing."""
    assert one_memory_.one_memory_of(device, processor) is None


@pytest.fixture
def one_memory(monkeypatch):
    """The CPU's devices are of one memory, as they are; it is warned anew."""
    row = one_memory_.OneMemory("a CPU", "^cpu$", "the test")
    monkeypatch.setattr(one_memory_, "KNOWN", (row,))
    one_memory_.warn_if_one_memory.cache_clear()
    yield
    one_memory_.warn_if_one_memory.cache_clear()


def step_of(tx):
    """A step, and its arguments."""

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((256, 256))}
    return oo.jit(step), (params, tx.init(params))


@pytest.mark.usefixtures("one_memory")
def test_jit_warns_once():
    """At the caller's line, on the first call that has anything on the host."""
    step, args = step_of(optax.adam(1e-3))
    step(*args)
    step, args = step_of(oo.offload(optax.adam(1e-3)))
    with pytest.warns(oo.OffloadWarning, match=r"cpu and its host share") as caught:
        step(*args)
    assert "optax-offload doctor" in str(caught[0].message)
    assert caught[0].filename == __file__
    step(*args)
    step, args = step_of(oo.offload(optax.lion(1e-3)))
    step(*args)


@pytest.mark.usefixtures("one_memory")
def test_what_is_compiled_for_another_machine_does_not_warn():
    """A plan for a chip may be made anywhere."""
    step, args = step_of(oo.offload(optax.adam(1e-3)))
    step.lower(*args)
    step.eval_shape(*args)
    step.schedule(*args)
    step, args = step_of(oo.offload(optax.adam(1e-3)))
    with pytest.warns(oo.OffloadWarning):
        step(*args)


def test_jit_does_not_warn_here():
    """A CPU is for trying things out."""
    one_memory_.warn_if_one_memory.cache_clear()
    step, args = step_of(oo.offload(optax.adam(1e-3)))
    step(*args)
