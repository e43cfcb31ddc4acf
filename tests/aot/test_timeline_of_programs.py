"""Programs on a modeled device: their transfers, and the time that these take."""

import re

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import BRANCHES, LOOP, NOTED, TOP_LEVEL, WAITING, gpu_slices
from jax import lax

from optax_offload import aot
from optax_offload._host.link import Link
from optax_offload.aot._timeline import Model, Timeline

# A transfer of 4 MiB takes 1 ms and 0.1 ms of latency, an operation that reads and
# writes as much 1 ms.
MODEL = Model(
    link=Link(bytes_per_second=2**22 * 1e3, latency_seconds=1e-4),
    memory_bytes_per_second=2**23 * 1e3,
    flops_per_second=1e12,
)


def milliseconds(value):
    """A time, about that long."""
    return pytest.approx(value / 1e3)


def test_top_level():
    """Two leaves: the second is loaded while the first is computed.

    Loads: 0 to 1.1, 1.1 to 2.2. Computation: 1.1 to 2.1, 2.2 to 3.2. Stores: 2.1 to
    3.2, 3.2 to 4.3.
    """
    found = Timeline.of(TOP_LEVEL, MODEL)
    assert found.count("load") == found.count("store") == 2
    assert found.sizes("load") == [2**22, 2**22]
    assert all(m.asynchronous for m in found.moves("load") + found.moves("store"))
    assert found.most_in_flight == (2, 2, 2)
    assert [t.between for t in found.moves("load")] == [0, 1]
    assert [t.between for t in found.moves("store")] == [1, 0]
    assert found.seconds == milliseconds(4.3)
    assert found.compute_seconds == milliseconds(2)
    assert found.link_seconds == milliseconds(4.3)
    for seconds in (found.load_seconds, found.store_seconds):
        assert seconds == milliseconds(2.2)


def test_waiting_at_once():
    """Without a start and a done, a transfer is waited for at once.

    As a copy, in a fusion that reads host memory itself, and within host memory, which
    keeps both directions busy.
    """
    found = Timeline.of(WAITING, MODEL)
    assert {d: found.count(d) for d in ("load", "store", "host copy")} == {
        "load": 1,
        "store": 1,
        "host copy": 1,
    }
    assert not any(m.asynchronous for d in found.spans for m in found.moves(d))
    assert [t.form for t in found.moves("load")] == ["fusion"]
    # The computation of the fusion writes 4 MiB of device memory, the store reads them.
    assert found.seconds == milliseconds(3 * 1.1 + 2 * 0.5)
    assert found.link_seconds == milliseconds(3.3)
    for seconds in (found.load_seconds, found.store_seconds):
        assert seconds == milliseconds(1.1)


def test_loop():
    """One slice after the other, six times: 1.1 ms there, 1 ms, and 1.1 ms back."""
    found = Timeline.of(LOOP, MODEL)
    (loop,) = found.places
    assert (loop.kind, loop.trip_count, loop.runs) == ("loop", 6, 6)
    assert loop.most_in_flight == (1, 1, 0)
    assert [(t.form, t.runs) for t in loop.moves] == [
        ("dynamic-slice", 6),
        ("dynamic-update-slice", 6),
    ]
    assert found.sizes("load") == [2**22] * 6
    assert found.seconds == loop.seconds == pytest.approx(6 * 3.2e-3)
    assert found.link_seconds == pytest.approx(6 * 2.2e-3)


def test_trip_count_that_the_compiler_noted():
    """It counts, and not what the constants before the loop say."""
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    assert Timeline.of(LOOP.replace("body=%body", noted), MODEL).count("load") == 3


def test_trip_count_that_the_text_does_not_tell():
    """It is modeled as one, and says so."""
    text = LOOP.replace("direction=LT", "direction=NE")
    found = Timeline.of(text, MODEL)
    assert found.places[0].trip_count is None
    assert found.count("load") == 1


@pytest.mark.parametrize(
    ("position", "kernel", "seconds"),
    [("", True, 4.2), (NOTED, False, 3.2)],
    ids=["kernels", "copy engines"],
)
def test_kernels_occupy_the_device(position, kernel, seconds):
    """What a copy engine does beside a computation, a kernel does before it.

    A load of 1.1 ms that is started before an operation of 1 ms, another one of 1 ms of
    what was loaded, and a store of 1.1 ms.
    """
    part = "f32[4,262144]{1,0}"
    text = (
        gpu_slices(position)
        .replace("8,128]", "8,262144]")
        .replace("[4,128]", "[4,262144]")
    )
    beside = f"  %d = {part} parameter(2)\n  %other = {part} sine(%d)\n  %part ="
    text = text.replace("  %part =", beside)
    found = Timeline.of(text, MODEL)
    moves = found.moves("load") + found.moves("store")
    assert [m.kernel for m in moves] == [kernel] * 2
    assert found.compute_seconds == pytest.approx(2e-3, rel=1e-4)
    assert found.seconds == pytest.approx(seconds / 1e3, rel=1e-4)


def test_model_of_a_target():
    """A chip's own link, unless a flag gives another bandwidth."""
    target = aot.Target("v5e:2x2")
    model = Model.of(target)
    assert model.link is target.chip.link
    assert model.memory_bytes_per_second == target.chip.memory_bytes_per_second
    assert model.flops_per_second == target.chip.float32_flops_per_second
    assert model.narrow_flops_per_second == target.chip.flops_per_second
    latency = target.chip.link.latency_seconds
    assert Model.of(target, 50e9).link == Link(50e9, latency)


def test_conditional():
    """The branch that moves more is modeled, both are listed."""
    found = Timeline.of(BRANCHES, MODEL)
    assert {p.name: p.runs for p in found.places} == {"out/twin": 0, "out/move": 1}
    assert found.count("host copy") == 0
    assert found.count("load") == found.count("store") == 1


def test_matrix_products():
    """The longer of the products and the bytes is what an operation takes."""
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[512,1024], b: f32[1024,256]) -> f32[512,256] {
  %a = f32[512,1024]{1,0} parameter(0)
  %b = f32[1024,256]{1,0} parameter(1)
  ROOT %c = f32[512,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
    found = Timeline.of(
        text, Model(memory_bytes_per_second=1e18, flops_per_second=1e12)
    )
    assert found.seconds == pytest.approx(2 * 512 * 1024 * 256 / 1e12)
    assert found.places == []


def test_matrix_products_of_16_bits():
    """At the chip's rate for these; one wide factor makes a product wide."""
    rates = {"flops_per_second": 1e12, "narrow_flops_per_second": 2e12}
    model = Model(memory_bytes_per_second=1e18, **rates)
    for left, right, rate in (
        ("bf16", "bf16", 2e12),
        ("f32", "bf16", 1e12),
        ("f8e4m3fn", "bf16", 2e12),
    ):
        text = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (a: {left}[512,1024], b: {right}[1024,256]) -> f32[512,256] {{
  %a = {left}[512,1024]{{1,0}} parameter(0)
  %b = {right}[1024,256]{{1,0}} parameter(1)
  ROOT %c = f32[512,256]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}
}}
"""
        found = Timeline.of(text, model)
        assert found.seconds == pytest.approx(2 * 512 * 1024 * 256 / rate)


def test_text_that_is_not_scheduled():
    """It is an error that shows how the text starts."""
    with pytest.raises(ValueError, match=r"is_scheduled=true: 'HloModule jit_f'"):
        Timeline.of("HloModule jit_f")


@pytest.mark.parametrize("target", ["h100", "v5e:1x1"])
@pytest.mark.aot
def test_compiled_copies(target):
    """What the compilers make of a plain load and store, and of one within the host."""
    target = aot.Target(target)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    sharding = jax.NamedSharding(target.mesh(), jax.P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=sharding)

    def step(xs):
        return [jax.device_put(jax.device_put(x, device) * 2, host) for x in xs]

    compiled = aot.compile(
        step, [x, x], target=target, out_shardings=[sharding] * 2, donate_argnums=0
    )
    found = Timeline.of(compiled.as_text())
    assert found.sizes("load") == found.sizes("store") == [2**20] * 2
    assert found.count("host copy") == 0
    assert all(m.asynchronous for m in found.moves("load") + found.moves("store"))
    assert {t.form for t in found.moves("load")} == {"copy"}


@pytest.mark.parametrize("target", ["h100", "v5e:1x1"])
@pytest.mark.aot
def test_compiled_loop(target):
    """Slices in a loop are asynchronous on both, and left to a GPU's copy engines."""
    target = aot.Target(target)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    sharding = jax.NamedSharding(target.mesh(), jax.P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32, sharding=sharding)

    def step(x):
        def one(i, x):
            y = jax.device_put(lax.dynamic_slice_in_dim(x, i, 1), device)
            return lax.dynamic_update_slice_in_dim(x, jax.device_put(-y, host), i, 0)

        return lax.fori_loop(0, 8, one, x)

    compiled = aot.compile(
        step, x, target=target, out_shardings=sharding, donate_argnums=0
    )
    found = Timeline.of(compiled.as_text())
    (loop,) = found.places
    assert (loop.kind, loop.trip_count) == ("loop", 8)
    assert found.sizes("load") == found.sizes("store") == [2**20] * 8
    assert [t.form for t in loop.moves] == [
        "dynamic-slice",
        "dynamic-update-slice",
    ]
    assert all(m.asynchronous for m in loop.moves)


@pytest.mark.aot
def test_compiled_matrix_products():
    """A TPU's are convolutions, also in batches; a GPU's are in fusions."""
    products = []
    for name in ("h100", "v5e:1x1"):
        target = aot.Target(name)
        struct = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
        compiled = aot.compile(lambda a, b: a @ b, struct, struct, target=target)
        text = compiled.as_text() or ""
        slow = Model(narrow_flops_per_second=1e9)  # such that only the products count
        products.append(Timeline.of(text, slow).seconds * 1e9)
        assert re.search(r"dot\(|convolution\(|gemm", text), text
    assert products == pytest.approx([2 * 8 * 512**3] * 2, rel=0.01)
