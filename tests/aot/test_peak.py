"""The memory of a program, and what does not fit."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_programs import BOTH, descend, load_add_store, struct

from optax_offload import aot
from optax_offload._ground.units import MIB
from optax_offload.aot.chips import TPUS
from optax_offload.aot.peak import check_fit, does_not_fit


def test_peak_text():
    """The text of a peak is the sum, and the host's only where there is any."""
    usage = aot.Peak(5 * MIB, 512, 3 * MIB, 2 * MIB, 0, 0, 0, 0)
    assert usage.peak_bytes == 6 * MIB + 512
    assert str(usage) == (
        "peak 6.00 MiB = arguments 5.00 MiB + temporaries 512 B + outputs 3.00 MiB"
        " - aliased 2.00 MiB"
    )
    usage = aot.Peak(0, 0, 0, 0, 2**32, 0, 2**32, 2**31)
    assert usage.host_peak_bytes == 6 * 2**30
    assert str(usage).splitlines()[1] == (
        "host 6.00 GiB = arguments 4.00 GiB + temporaries 0 B + outputs 4.00 GiB"
        " - aliased 2.00 GiB"
    )


def test_peak_has_the_compilers_figures():
    """Each of them, those of host memory apart."""
    names = ("argument", "temp", "output", "alias")
    names = (*names, *(f"host_{name}" for name in names))
    stats = {f"{name}_size_in_bytes": 2**i for i, name in enumerate(names)}
    said = types.SimpleNamespace(**stats)
    program = types.SimpleNamespace(memory_analysis=lambda: said)
    found = aot.peak(program)  # pyright: ignore[reportArgumentType]
    assert found == aot.Peak(1, 2, 4, 8, 16, 32, 64, 128)
    assert (found.peak_bytes, found.host_peak_bytes) == (1 + 2 + 4 - 8, -16)


def test_what_a_heap_has_unused_counts_once():
    """A TPU's temporaries have it twice: those that all allocations leave (F86)."""
    said = types.SimpleNamespace(
        argument_size_in_bytes=8,
        temp_size_in_bytes=100,
        output_size_in_bytes=16,
        alias_size_in_bytes=4,
        total_allocation_bytes=60,
        host_argument_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        host_output_size_in_bytes=0,
        host_alias_size_in_bytes=0,
    )
    program: Any = types.SimpleNamespace(memory_analysis=lambda: said)
    assert aot.peak(program).temporary_bytes == 60 - 8 - 16 + 4
    assert aot.peak(program).peak_bytes == 60
    said.total_allocation_bytes = 0  # As a CPU's.
    assert aot.peak(program).temporary_bytes == 100


def test_a_tpus_program_compiles_in_its_peak():
    """Loops with values of their own: in the peak, and what its code takes (F86)."""

    def turn(_, x):
        a = x @ x
        b = jnp.tanh(a) @ x
        c = jnp.sin(b) @ a
        return (a @ (c @ (b + a))) @ (b @ c)

    def fn(x, count):
        for _ in range(3):
            x = jax.lax.fori_loop(0, count, turn, x)
        return jnp.sum(x)

    def compiled(memory_bytes: int | None):
        target = aot.Target("v5e:1x1", memory_bytes=memory_bytes)
        x = struct((8192, 8192))
        return aot.compile(fn, x, x.update(shape=(), dtype=jnp.int32), target=target)

    found = compiled(None)
    stats: Any = found.memory_analysis()
    if not hasattr(stats, "total_allocation_bytes"):
        pytest.skip("JAX before 0.12 does not say what a program allocates")
    peak = aot.peak(found)
    assert peak.temporary_bytes < stats.temp_size_in_bytes - 128 * MIB
    assert aot.peak(compiled(peak.peak_bytes + 16 * MIB)).peak_bytes <= peak.peak_bytes


def test_a_program_for_a_gpu_is_compared_with_its_memory():
    """All that it needs of the device counts, and nothing of the host's."""
    target = aot.Target("h100", memory_bytes=6 * MIB)
    check_fit(target, aot.Peak(3 * MIB, 2 * MIB, 3 * MIB, 2 * MIB, MIB, 0, 0, 0))
    with pytest.raises(aot.DoesNotFitError) as raised:
        check_fit(target, aot.Peak(3 * MIB, 3 * MIB + 1, 0, 0, 0, 0, 0, 0))
    assert (raised.value.used_bytes, raised.value.limit_bytes) == (6 * MIB + 1, 6 * MIB)


def test_a_tpus_tuples_take_memory():
    """16 KiB for each of a Python loop, and 15 KiB less with an option (F86)."""

    def temporary(layers: int, kib: int) -> int:
        def fn(x):
            for _ in range(layers):
                x = jnp.tanh(x @ x)
                x = x * jnp.sum(x)
            return x

        compiled = aot.compile(
            fn,
            struct((1024, 1024)),
            target=aot.Target("v5e:1x1"),
            compiler_options={"xla_jf_program_hbm_alignment_in_kib": kib},
        )
        return aot.peak(compiled).temporary_bytes

    grown, less = (temporary(16, kib) - temporary(8, kib) for kib in (16, 1))
    assert grown - less >= 8 * 15 * 2**10
    assert less <= 8 * 2 * 2**10


def test_peak_of_a_platform_that_does_not_say():
    """A program without memory analysis is an error, not a peak of zero."""
    silent = types.SimpleNamespace(memory_analysis=lambda: None)
    with pytest.raises(ValueError, match=r"memory_analysis\(\).*is None.*aot.compile"):
        aot.peak(silent)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("message", "used_bytes", "limit_bytes"),
    [
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.",
            20.5 * 2**30,
            15.75 * 2**30,
        ),
        (
            "the total memory required for HLO temporaries (512.00M) exceeds available "
            "HBM (100.00M). HLO module: jit_f.",
            512 * MIB,
            100 * MIB,
        ),
        (
            "Aborting compilation early because it's unlikely to have enough memory. "
            "Requires 3.5T, has 90.5G available.",
            3.5 * 2**40,
            90.5 * 2**30,
        ),
        (
            "TPU TensorCore Hbm usage: 34.5G, SparseCore Hbm usage 174.10G, exceeding "
            "available bytes: 95.5G",
            34.5 * 2**30,
            95.5 * 2**30,
        ),
    ],
)
def test_compiler_messages(message, used_bytes, limit_bytes):
    """The TPU compiler's numbers are read, in each of its wordings."""
    target = aot.Target("v5e")
    error = does_not_fit(target, f"RESOURCE_EXHAUSTED: {message}")
    assert error is not None
    assert (error.used_bytes, error.limit_bytes) == (used_bytes, limit_bytes)
    assert message in str(error)
    assert "'v5e:1x1'" in str(error)


def test_other_compiler_messages():
    """Running out of another memory than HBM is not taken for a program's size."""
    message = "Ran out of memory in memory space vmem. Used 20.1M of 16.0M vmem."
    assert does_not_fit(aot.Target("v5e"), message) is None


@pytest.mark.aot
@BOTH
def test_peak_by_hand(name):
    """Host bytes are exactly those of the offloaded array, and reused by its result."""
    target = aot.Target(name)
    on_host = struct((1024, 1024), target, kind="pinned_host")
    compiled = aot.compile(
        load_add_store, on_host, struct((1024, 1024)), target=target, donate_argnums=0
    )
    usage = aot.peak(compiled)
    assert usage.host_argument_bytes == 4 * MIB
    assert usage.host_output_bytes == 4 * MIB
    assert usage.host_aliased_bytes == 4 * MIB
    assert usage.host_temporary_bytes == 0
    assert usage.host_peak_bytes == 4 * MIB
    assert usage.argument_bytes == 4 * MIB
    assert usage.output_bytes < MIB / 2
    assert usage.temporary_bytes >= 4 * MIB
    assert usage.peak_bytes >= 8 * MIB
    assert "S(5)" in str(compiled.as_text())  # XLA's host memory


@pytest.mark.aot
@BOTH
def test_donation(name):
    """A donated argument's memory is its result's."""
    target = aot.Target(name)
    w = struct((1024, 1024))
    kept = aot.peak(aot.compile(descend, w, target=target))
    given = aot.peak(aot.compile(descend, w, target=target, donate_argnums=0))
    assert (kept.aliased_bytes, given.aliased_bytes) == (0, 4 * MIB)
    assert (kept.peak_bytes, given.peak_bytes) == (8 * MIB, 4 * MIB)


@pytest.mark.aot
@pytest.mark.parametrize("name", TPUS)
def test_tpu_memory_is_the_compilers(name):
    """The limit in the compiler's message is the target's memory, as it rounds it."""
    target = aot.Target(name)
    with pytest.raises(aot.DoesNotFitError, match=r"The compiler says: ") as e:
        aot.compile(descend, struct((2**36,)), target=target)
    assert e.value.used_bytes == 2 * 4 * 2**36
    assert e.value.limit_bytes == pytest.approx(target.memory_bytes, abs=0.02 * 2**30)
    assert e.value.peak is None


@pytest.mark.aot
def test_gpu_memory_is_compared():
    """A GPU's compiler goes on, so the peak is compared with the target's memory."""
    with pytest.raises(aot.DoesNotFitError, match=r"'h100'.*79.11 GiB") as e:
        aot.compile(descend, struct((2**36,)), target=aot.Target("h100"))
    assert e.value.used_bytes == 2 * 4 * 2**36
    assert e.value.limit_bytes == 84942979072
    assert e.value.peak is not None
    assert e.value.peak.peak_bytes == e.value.used_bytes


@pytest.mark.aot
@BOTH
def test_smaller_memory(name):
    """With less memory the same program fits no more."""
    big = struct((512, 1024, 1024))
    assert aot.compile(descend, big, target=aot.Target(name))
    small = aot.Target(name, memory_bytes=3 * 2**30)
    with pytest.raises(aot.DoesNotFitError) as e:
        aot.compile(descend, big, target=small)
    assert e.value.used_bytes == 2**32
    assert e.value.limit_bytes == pytest.approx(3 * 2**30, rel=0.01)


@pytest.mark.aot
def test_pressure():
    """A compiler that has less memory makes a program that needs less."""

    def loss(x, *weights):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    layers = range(1, 7)
    args = struct((16384, 1024)), *[struct((1024, 1024)) for _ in layers]

    def temporary_bytes(**memory):
        target = aot.Target("h100", **memory)
        compiled = aot.compile(jax.grad(loss, tuple(layers)), *args, target=target)
        return aot.peak(compiled).temporary_bytes

    assert temporary_bytes(memory_bytes=768 * MIB) < 0.9 * temporary_bytes()
